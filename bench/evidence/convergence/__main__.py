# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.evidence.convergence --help`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from bench.demo import local_ranks
from bench.environment import end_when_told, machine
from bench.evidence.convergence import local_table, mask_table, report, sparse_table
from bench.evidence.convergence.ranks import STAGES, parse_options, todo

_UNUSABLE = 2
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # the ranks need no GPUs: how well a model learns is the same without


def train(options: argparse.Namespace) -> int:
    """Make the file or go on with it; return the exit status of the ranks. Raises ValueError when it is another's."""
    ranks_per_node = options.comparison.ranks_per_node
    environment = report.Environment(
        **machine(),
        command=options.command,
        ranks_per_node=list(ranks_per_node),
        settings=options.comparison.settings(),
    )
    report.write(options.json, *report.resume(options.json, environment))
    launcher, settings = local_ranks(len(ranks_per_node), ranks_per_node[0])
    command = [sys.executable, "-m", *launcher, "-m", "bench.evidence.convergence.ranks", *sys.argv[1:]]
    for stage in STAGES:
        if not todo(options.comparison, stage, report.read(options.json)[1]):
            continue
        jobs = [[*command, f"--stage={stage}", f"--job={job}"] for job in range(options.jobs)]
        if failure := _together(jobs, settings):
            return failure
    return 0


def _together(commands: Sequence[Sequence[str]], settings: Mapping[str, str]) -> int:
    """Run commands side by side, each to its end, and return 0, or the status of one that failed.

    When this process is told to stop, so are they: torchrun has to stop the ranks.
    """
    running = [subprocess.Popen(command, env={**os.environ, **settings, **_NO_GPU}) for command in commands]
    try:
        statuses = [each.wait() for each in running]
    finally:
        for each in running:
            each.terminate()
        for each in running:
            each.wait()
    return next(filter(None, statuses), 0)


def main() -> int:
    """Train and report."""
    options = parse_options()
    end_when_told()
    special = (
        (options.local_sgd, local_table),
        (options.local_mask, mask_table),
        (options.second_selection, sparse_table),
    )
    tables = next((table for wanted, table in special if wanted), report)
    try:
        if not options.report and (failure := train(options)):
            return failure
        table = tables.markdown(options.json)
    except (OSError, ValueError) as error:
        print(f"bench.evidence.convergence: {error}", file=sys.stderr)
        return _UNUSABLE
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
