# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.evidence.convergence --help`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType

from bench.demo import local_ranks
from bench.environment import end_when_told, machine
from bench.evidence.convergence import large_table, local_table, plan, rates, report, sparse_table
from bench.evidence.convergence.ranks import parse_options
from bench.training import report as link_report
from commopt.cluster import EmulatedCluster

_UNUSABLE = 2
_LINK_SECONDS = 6.0
_LINK_SECONDS_QUICK = 0.5
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}  # four ranks need no four GPUs: how well a model learns is the same without


def train(options: argparse.Namespace) -> int:
    """Make the file or go on with it; return the exit status of the ranks. Raises ValueError when it is another's."""
    environment = report.Environment(
        **machine(),
        command=options.command,
        ranks_per_node=list(options.ranks_per_node),
        settings=options.settings,
        kind=options.kind,
    )
    report.write(options.json, *report.resume(options.json, environment))
    launcher, settings = local_ranks(len(options.ranks_per_node), options.ranks_per_node[0])
    command = [sys.executable, "-m", *launcher, "-m", "bench.evidence.convergence.ranks", *sys.argv[1:]]
    with subprocess.Popen(command, env={**os.environ, **settings, **_NO_GPU}) as ranks:
        try:
            return ranks.wait()
        finally:
            ranks.terminate()  # when this process is told to stop, torchrun has to stop the ranks


def time_steps(options: argparse.Namespace) -> int:
    """Measure how long a step takes where the network is slow, unless known; return the exit status."""
    strategies = [entry.strategy for entry in options.entries if entry.on_link]
    if set(strategies) <= {outcome.strategy for outcome in link_outcomes(options)}:
        return 0
    if missing := EmulatedCluster.missing(plan.RATE):
        print(f"No times on a slow network: {missing}", file=sys.stderr)
        return 0
    seconds = _LINK_SECONDS_QUICK if options.quick else _LINK_SECONDS
    arguments = ["--strategies", ",".join(strategies), *plan.GPT.model, "--json", str(options.link_json)]
    arguments += ["--seconds", str(seconds), "--look-every", str(seconds)]
    with EmulatedCluster(len(options.ranks_per_node), options.ranks_per_node, plan.RATE) as cluster:
        return cluster.run(["-m", "bench.training", *arguments], env=_NO_GPU, capture=False).returncode


def link_outcomes(options: argparse.Namespace) -> Sequence[link_report.Outcome]:
    """Return what was measured where the network is slow, nothing when nothing was."""
    return link_report.read(options.link_json)[1] if options.link_json.exists() else []


def _tables(options: argparse.Namespace) -> ModuleType:
    """Return what prints the table of such a file."""
    chosen: dict[ModuleType, bool] = {
        large_table: options.large,
        local_table: options.local_sgd,
        sparse_table: bool(options.second_selection),
        rates: options.rates,
    }
    return next((module for module, is_chosen in chosen.items() if is_chosen), report)


def main() -> int:
    """Train, time and report."""
    options = parse_options()
    end_when_told()
    try:
        if not options.report:
            failure = train(options) or (0 if options.no_link else time_steps(options))
            if failure:
                return failure
        table = _tables(options).markdown(options.json)
    except (OSError, ValueError) as error:
        print(f"bench.evidence.convergence: {error}", file=sys.stderr)
        return _UNUSABLE
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
