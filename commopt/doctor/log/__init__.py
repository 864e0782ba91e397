"""What an NCCL_DEBUG=INFO log says was really used."""
