# SPDX-License-Identifier: Apache-2.0
"""One rank of one world: times steps of every strategy in turns, and one that communicates nothing.

Started by bench.evidence.scaling on an emulated cluster; rank 0 writes what it found to --json.
"""

from __future__ import annotations

import argparse
import json
import re
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import bench.evidence.scaling
import commopt
from bench.environment import slowest_rank_ms
from bench.models import add_options
from bench.training.measure import FIRST_STEPS, Run, counting, mib_per_step
from bench.training.strategies import add_plan, add_strategies, require_known
from commopt.command_line import CommandParser, output_file, whole
from examples.train_gpt import start_process_group

WEAK, STRONG = "weak", "strong"
MODES = (WEAK, STRONG)
DEFAULT_STRATEGIES = ("ddp", "hierarchical", "hierarchical_quantized:bits=4", "hierarchical_powersgd")
_DEFAULT_WORLDS = "1x1,1x2,2x1,2x2,4x1,4x2"

World = tuple[int, int]


def parse_worlds(text: str) -> list[World]:
    """Return (nodes, ranks per node) for each of "1x1,2x4"."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", name) for name in text.split(",")]
    if None in found:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of NODESxRANKS such as 1x1,2x2")
    return [(int(match[1]), int(match[2])) for match in found if match]


def parse_modes(text: str) -> list[str]:
    """Return the modes in "weak,strong"."""
    names = text.split(",")
    if not set(names) <= set(MODES):
        raise argparse.ArgumentTypeError(f"{text!r} must name some of {', '.join(MODES)}")
    return names


def parser() -> argparse.ArgumentParser:
    """Return what the launcher and its workers have in common."""
    options = CommandParser(
        prog="python -m bench.evidence.scaling", description=(bench.evidence.scaling.__doc__ or "").splitlines()[0]
    )
    add = options.add_argument
    add("--worlds", type=parse_worlds, default=parse_worlds(_DEFAULT_WORLDS), metavar="NODESxRANKS[,...]")
    add("--modes", type=parse_modes, default=list(MODES), metavar="MODE[,MODE]", help=f"{' and '.join(MODES)} scaling")
    add("--global-batch", type=whole(1), help="of the world, strong scaling (default: --batch times the most ranks)")
    add("--rate", default="200mbit", help="of each emulated node's link (default 200mbit)")
    add("--delay", default="0ms", help="one-way delay of the network (default 0ms)")
    add("--turns", type=whole(1), default=3, help="of every strategy (default 3)")
    add("--steps", type=whole(1), default=4, help="in every turn (default 4)")
    add("--json", type=output_file, metavar="FILE", help="write JSON lines: the environment, then a line per point")
    add_strategies(options, DEFAULT_STRATEGIES)
    add_plan(options)
    add_options(options)
    return options


def parse_options() -> argparse.Namespace:
    """Read the launcher's command line; a wrong one ends here, before anything is started."""
    options = parser().parse_args()
    try:
        for name in options.strategies:
            require_known(name)
        options.global_batch = options.global_batch or options.batch * max(n * ranks for n, ranks in options.worlds)
        for nodes, ranks in options.worlds:
            batch_per_rank(STRONG if STRONG in options.modes else WEAK, nodes * ranks, options)
    except ValueError as error:
        parser().error(str(error))
    return options


def batch_per_rank(mode: str, ranks: int, options: argparse.Namespace) -> int:
    """Return the samples of a rank in one step; raises ValueError where they cannot be shared out."""
    if mode == WEAK:
        batch: int = options.batch
        return batch
    if options.global_batch % ranks:
        raise ValueError(
            f"--global-batch {options.global_batch} cannot be shared out over {ranks} ranks; pass a multiple of {ranks}"
        )
    return int(options.global_batch // ranks)


NOOP = "noop"


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the model's parameters, the step without communication and every strategy's figures; collective."""
    cluster = commopt.Communicator().cluster
    runs = [Run(strategy, options, device) for strategy in (NOOP, *options.strategies)]
    for run in runs:
        dist.barrier()
        for _ in range(FIRST_STEPS):
            run.step()
    for _ in range(options.turns):
        for run in runs:
            with counting(run, cluster):
                for _ in range(options.steps):
                    run.step()
    noop, *others = (_found(run) for run in runs)
    parameters = sum(parameter.numel() for parameter in runs[0].training.model.parameters())
    return {"parameters": parameters, "noop_ms": noop["step_ms"], "strategies": others}


def _found(run: Run) -> dict[str, Any]:
    """Return the fields of a Point that are a strategy's own; collective."""
    step_ms = slowest_rank_ms(run.step_s[FIRST_STEPS:])
    sent_mib = mib_per_step([turn.sent for turn in run.moved], len(step_ms)) or 0.0
    return {"strategy": run.strategy, "step_ms": median(step_ms), "inter_mib_per_step": sent_mib}


def main() -> None:
    """Measure; rank 0 writes."""
    options = parser().parse_args()
    device = start_process_group()
    found = measure(options, device)
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
