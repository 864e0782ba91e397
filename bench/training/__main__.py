# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.training --help`."""

from __future__ import annotations

import argparse
import sys
from itertools import product
from statistics import median

import torch
import torch.distributed as dist

import commopt
from bench.environment import command_of, machine
from bench.training import report
from bench.training.measure import Baseline, Run, Show, outcome_of, take_turn
from bench.training.report import Environment, Outcome
from bench.training.strategies import NOTES, parse_options
from commopt.cluster import link_rate
from commopt.hooks.presets import LOCAL_PRESETS
from examples.train_gpt import progress_bar, start_process_group
from topology import Cluster


def describe(options: argparse.Namespace, cluster: Cluster, baseline: Baseline) -> Environment:
    """Say where and how the numbers are made."""
    training = baseline.run.training
    device = training.device
    ranks_per_node = [len(node) for node in cluster.nodes]
    return Environment(
        **machine(),
        command=command_of("bench.training", ranks_per_node),
        device=torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        backend=dist.get_backend(),
        nodes=len(cluster.nodes),
        ranks_per_node=ranks_per_node,
        emulated_rate=link_rate(),
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        seconds=options.seconds,
        seed=options.seed,
        compute_ms=median(baseline.step_ms),
        evaluation=f"{training.evaluation}, shared out over all ranks",
        model=options.model,
        target_loss=options.target_loss,
        parallel=options.parallel,
    )


def main() -> None:
    """Measure every strategy between steps without communication, turn by turn, and report on rank 0."""
    options = parse_options()
    device = start_process_group()
    is_reporter = dist.get_rank() == 0
    cluster = commopt.Communicator().cluster
    if is_reporter and not link_rate():
        print(f"{cluster}; not on bench.cluster, so the bytes between nodes are unknown", file=sys.stderr)
    outcomes: list[Outcome] = []
    runs: dict[int, Run] = {}
    with progress_bar() as show:
        show(0.0, "steps without communication")
        baseline = Baseline(options, device)
        turns = list(product(range(1, options.turns + 1), enumerate(options.strategies)))
        for place, (turn, (index, strategy)) in enumerate(turns):
            run = runs.pop(index, None) or Run(strategy, options, device)
            until_s = options.seconds * turn / options.turns
            take_turn(run, baseline, until_s, options.look_every, cluster, _part(show, place, len(turns)))
            outcomes[index : index + 1] = [outcome_of(run)]
            if turn < options.turns:  # else its memory is free
                runs[index] = run
            environment = describe(options, cluster, baseline)
            if is_reporter and options.json:  # after each, so that an interrupted run keeps what it has
                report.write(options.json, environment, outcomes)
    if is_reporter:
        notes = [NOTES[outcome.strategy] for outcome in outcomes if outcome.strategy in NOTES]
        if any(outcome.strategy.partition(":")[0] in LOCAL_PRESETS for outcome in outcomes):
            notes.append(
                "LocalSGD: step and exposed are means. The loss is that of each node's own parameters, on its share of "
                "the held-out windows"
            )
        report.print_table(environment, outcomes, notes)
        if options.plot:
            from bench.plot.training import draw

            draw(environment, outcomes, options.plot)
            print(f"picture: {options.plot}")
    dist.destroy_process_group()


def _part(show: Show, index: int, count: int) -> Show:
    return lambda fraction, message: show((index + min(fraction, 1.0)) / count, message)


if __name__ == "__main__":
    main()
