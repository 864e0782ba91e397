#!/bin/bash
# Ranks that srun starts itself, one for each GPU:
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 slurm_srun.sh \
#       -m commopt run --strategy hierarchical_bf16 --report train.py
#SBATCH --distribution=block
export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
srun --kill-on-bad-exit=1 python "$@"
