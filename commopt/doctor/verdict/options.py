# SPDX-License-Identifier: Apache-2.0
"""The options of `commopt doctor --measure`; nothing here loads torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from commopt.command_line import number, output_file, whole

BUDGET_S = 60.0


def asked(options: argparse.Namespace) -> bool:
    """Return whether links are to be measured: by --measure, or by what only a measurement can answer."""
    return options.measure or any(getattr(options, name) is not None for name in ("model", "params", "script"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of --measure."""
    add: Any = parser.add_argument_group("measuring").add_argument
    add("--measure", action="store_true", help="measure every link too, and end in a verdict of at most 25 lines")
    add("--model", metavar="NAME", help="also predict a step of this model: gpt2, bert-large, resnet50, ...")
    add("--params", type=_numel, metavar="N", help="or of a transformer with so many parameters: 124M, 7B")
    add("--batch", type=whole(1), metavar="N", help="samples of a rank (default: as published for the model, else 8)")
    script = "or record steps of this script, with the arguments that follow; the last option"
    add("--script", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS...", help=script)
    budget = f"time for everything (default {BUDGET_S:g}); slow links get shorter messages"
    add("--budget", dest="budget_s", type=number(5.0, 3600.0), default=BUDGET_S, metavar="SECONDS", help=budget)
    page = "write the verdict as one page with all links and commands, which needs nothing else"
    add("--html", type=output_file, metavar="FILE", help=page)
    add("--save", type=output_file, metavar="FILE", help="write what was measured as JSON")
    add("--compare", type=Path, metavar="FILE", help="also print what changed since --save FILE")


def _numel(text: str) -> int:
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
    digits, factor = (text[:-1], units[text[-1:].upper()]) if text[-1:].upper() in units else (text, 1)
    try:
        value = round(float(digits) * factor)
    except (ValueError, OverflowError):
        value = 0
    if not 1 <= value <= 10**13:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of parameters, 1 to 1e13; write 124M or 7B")
    return value
