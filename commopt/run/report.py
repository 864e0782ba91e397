"""What the hooks did, in a few lines at the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from commopt.display import aligned
from commopt.run.models import Trained

NOTHING = (
    "commopt run: no DistributedDataParallel model was trained in this process, so there was nothing to do; start one "
    "process for each GPU with torchrun (processes that a script starts itself are not seen)"
)
_HEADINGS = ("model", "averaged by", "steps", "MB per step\nin the node", "MB per step\nbetween nodes")


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


def say_nothing_was_done(environ: Mapping[str, str] = os.environ) -> None:
    """Say on the first rank that there was no model."""
    if environ.get("RANK", "0") == "0":
        print(NOTHING, file=sys.stderr)


def _row(record: Trained) -> tuple[str, ...]:
    stats = record.stats
    steps = stats["steps"]
    sent = (stats[f"{level}_bytes"] / max(steps, 1) / 1e6 for level in ("intra", "inter"))
    return (record.name, stats["aggregator"], str(steps), *(f"{mb:.4g}" for mb in sent))
