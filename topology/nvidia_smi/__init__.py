"""The matrix that `nvidia-smi topo -m` prints, as people paste it."""

from topology.nvidia_smi.reader import read_matrix

__all__ = ["read_matrix"]
