#!/bin/bash
# Ranks that Open MPI starts on the nodes of a job:
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 slurm_mpirun.sh \
#       -m commopt run --strategy hierarchical_bf16 --report train.py
mpirun --bind-to none -x NCCL_SOCKET_IFNAME=eth0 -x GLOO_SOCKET_IFNAME=eth0 python "$@"
