#!/bin/bash
# Ranks that hear USR1 two minutes before Slurm takes their nodes:
#   sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 slurm_preempted.sh \
#       train_preempted.py --folder checkpoints
#SBATCH --distribution=block --requeue --open-mode=append --signal=USR1@120
export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# Until python listens, it would die of the signal.
srun --kill-on-bad-exit=1 bash -c 'trap "" USR1; exec python "$@"' bash "$@"
