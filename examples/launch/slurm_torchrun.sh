#!/bin/bash
# One torchrun on each node, which starts a rank for each GPU:
#   sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=64 slurm_torchrun.sh \
#       -m commopt run --strategy hierarchical_bf16 --report train.py
#SBATCH --ntasks-per-node=1
export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${RANKS_PER_NODE:-$SLURM_GPUS_ON_NODE}" --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" "$@"
