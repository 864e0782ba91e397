"""Show what a session on a GPU came to: `python -m bench.gpu.report FOLDER`.

With --document FILE the tables go between the two marks in a Markdown file too, so that nobody types a figure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.document import table, write_between
from bench.gpu.record import Outcome, read
from bench.gpu.session import FILE
from bench.table import print_rows
from commopt.command_line import Parser

BEGIN, END = "<!-- results: written by bench.gpu.report -->", "<!-- end of results -->"
_STEPS = ["step", "outcome", "s", "tests passed", "failed", "skipped", "asked", "met", "why"]
_ASKED = ["what", "asked", "measured", "met"]
_WIDTH = 150  # without a terminal


def step_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a row per step."""
    rows = []
    for outcome in outcomes:
        tests, judged = outcome.tests, [each for each in outcome.asked if each.met is not None]
        counts = [str(count) for count in (tests.passed, tests.failed, tests.skipped)] if tests else ["", "", ""]
        asked = [str(len(judged)), str(sum(bool(each.met) for each in judged))] if judged else ["", ""]
        rows.append([outcome.name, outcome.verdict, f"{outcome.seconds:.0f}", *counts, *asked, outcome.why])
    return rows


def asked_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a row per figure that is asked for."""
    verdicts = {True: "met", False: "missed", None: "-"}
    return [
        [
            f"{outcome.name}: {each.what}",
            each.asked,
            "-" if each.measured is None else f"{each.measured:.3g}",
            verdicts[each.met],
        ]
        for outcome in outcomes
        for each in outcome.asked
    ]


def title(environment: dict[str, Any]) -> str:
    """Say where and when."""
    keys = ("gpu", "torch", "cuda", "nccl", "date")
    gpu, torch, cuda, nccl, date = (str(environment.get(key, "unknown")) for key in keys)
    return f"{gpu}, torch {torch}, CUDA {cuda}, NCCL {nccl}, {date[:10]}"


def print_tables(path: Path) -> None:
    """Print what a file of `bench.gpu` says; raises ValueError when it is another's."""
    environment, outcomes = read(path)
    print_rows(title(environment), _STEPS, step_rows(outcomes), width=_WIDTH)
    if rows := asked_rows(outcomes):
        print_rows("What is asked for", _ASKED, rows, width=_WIDTH)


def markdown(environment: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Return the tables for a document."""
    parts = [f"{title(environment)}; `{environment['command']}`", table(_STEPS, step_rows(outcomes))]
    if rows := asked_rows(outcomes):
        parts.append(table(_ASKED, rows))
    return "\n\n".join(parts)


def main() -> int:
    """Print, and fill in the document."""
    parser = Parser(prog="python -m bench.gpu.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what --out of bench.gpu was")
    parser.add_argument("--document", type=Path, metavar="FILE", help="put the tables into FILE as well")
    options = parser.parse_args()
    try:
        print_tables(options.folder / FILE)
        if options.document is not None:
            write_between(options.document, BEGIN, END, markdown(*read(options.folder / FILE)))
            print(f"tables: {options.document}")
    except (OSError, ValueError) as error:
        print(f"bench.gpu.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
