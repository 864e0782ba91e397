# SPDX-License-Identifier: Apache-2.0
"""`python -m commopt run`: train with a strategy and leave the script as it is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from commopt.command_line import BAD_INPUT, refuse
from commopt.display import aligned
from commopt.errors import ConfigurationError
from commopt.run.models import Models, Trained, watching
from commopt.run.script import Choice, Script

USAGE = (
    "torchrun ... -m commopt run --strategy NAME[:OPTION=VALUE...] [--option OPTION=VALUE] [--report] SCRIPT ARGS..."
)
EPILOG = f"""A DDP model whose hook the script has registered itself is left alone. Give every rank the same command.
exit status: the script's; {BAD_INPUT} bad input (one line on stderr, on every rank, before the script starts)."""
NOTHING = (
    "commopt run: no DistributedDataParallel model was trained in this process, so there was nothing to do; start one "
    "process for each GPU with torchrun (processes that a script starts itself are not seen)"
)
_HEADINGS = ("model", "averaged by", "steps", "MB per step\nin the node", "MB per step\nbetween nodes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of run."""
    parser.usage = USAGE
    parser.description = "Run a training script unchanged; every DistributedDataParallel model in it gets a hook."
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--strategy", required=True, metavar="NAME", help="a preset and its options: hierarchical_quantized:bits=4")
    add(
        "--option",
        dest="settings",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="another option of commopt.attach: plan=ddp, links=links.json, ranks_per_node=8; may be repeated",
    )
    add("--report", action="store_true", help="print at the end what was sent, on rank 0")
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    add("script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help="the script and its arguments")


def run(options: argparse.Namespace) -> int:
    """Run the script; what it raises, SystemExit too, passes through. Return 0 when it ends by itself."""
    try:
        if not options.script:
            raise ConfigurationError(f"no script was named; {USAGE}")
        script = Script(options.script[0], tuple(options.script[1:]), options.module)
        choice = Choice.read(options.strategy, options.settings)
        script.require_there()
    except ConfigurationError as error:
        return refuse("commopt run", error)
    models = Models(choice)
    try:
        with watching(models):
            made = script.run()
    except SystemExit:  # it holds on to what the script made, through its traceback
        _conclude(models, options)
        raise
    _conclude(models, options)
    del made
    return 0


def _conclude(models: Models, options: argparse.Namespace) -> None:
    models.close()
    if models.seen and options.report:
        show(models.trained)
    elif not models.seen and os.environ.get("RANK", "0") == "0":
        print(NOTHING, file=sys.stderr)


def show(trained: Sequence[Trained], stream: TextIO | None = None) -> None:
    """Print a line for each model, on the world's first rank."""
    mine = [record for record in trained if record.rank == 0]
    if not mine:
        return
    lines = ["", *aligned(_HEADINGS, [_row(record) for record in mine], left=2)]
    for record in mine:
        if record.explanation:
            lines += ["", f"{record.name}:", record.explanation]
    print(*lines, sep="\n", file=stream or sys.stdout, flush=True)


def _row(record: Trained) -> tuple[str, ...]:
    stats = record.stats
    steps = stats["steps"]
    sent = (stats[f"{level}_bytes"] / max(steps, 1) / 1e6 for level in ("intra", "inter"))
    return (record.name, stats["aggregator"], str(steps), *(f"{mb:.4g}" for mb in sent))
