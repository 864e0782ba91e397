# SPDX-License-Identifier: Apache-2.0
"""Submit a training with submitit, which queues it again when Slurm stops it: pip install submitit.

python submitit_job.py --folder jobs --nodes 4 --ranks-per-node 8
"""

from __future__ import annotations

import argparse

import cloudpickle
import submitit
import train_preempted


class Training:
    """What submitit calls on every rank. Slurm starts the ranks, and `commopt.take_ranks` reads which this is."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def __call__(self) -> str | None:
        given = self._options
        bits: str | None = train_preempted.train(given.folder, given.strategy, given.steps, given.every, given.pause)
        return bits

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """What submitit calls on rank 0 when Slurm stops the job: the same again, from the last checkpoint."""
        return submitit.helpers.DelayedSubmission(self)


def main() -> None:
    """Submit, wait for the end, and print what every rank returned."""
    parser = train_preempted.command_line("Submit a training with submitit.")
    parser.add_argument("--nodes", type=int, default=2, help="(default 2)")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="(default 8)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="0 for none (default 8)")
    options = parser.parse_args()
    executor = submitit.AutoExecutor(options.folder / "%j")
    executor.update_parameters(
        nodes=options.nodes,
        tasks_per_node=options.ranks_per_node,
        timeout_min=60,
        slurm_setup=["export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0"],
        slurm_signal_delay_s=120,
        **({"slurm_gpus_per_node": options.gpus_per_node} if options.gpus_per_node else {}),
    )
    cloudpickle.register_pickle_by_value(train_preempted)  # or put this folder on the nodes' PYTHONPATH
    job = executor.submit(Training(options))
    print(f"job {job.job_id}", flush=True)
    print("\n".join(f"rank {rank}: bits {bits}" for rank, bits in enumerate(job.results())), flush=True)


if __name__ == "__main__":
    main()
