# SPDX-License-Identifier: Apache-2.0
"""The outcome of a session on a GPU: its records, their file, and its tables: `python -m bench.gpu.report FILE`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.document import table
from bench.output import print_rows, read_lines, write_results, written_by
from commopt.command_line import CommandParser

KIND, FILE = "gpu", "gpu.json"

Verdict = Literal["passed", "failed", "timed out", "skipped"]


@dataclass(frozen=True)
class Counted:
    """What pytest counted; `failures` names the tests that failed."""

    passed: int
    failed: int
    skipped: int
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """A figure to reach; `measured` and `met` are None where there was nothing to compare with."""

    what: str
    target: str
    measured: float | None
    met: bool | None


@dataclass(frozen=True)
class Table:
    """A step's own table, as it is printed; the first column is text."""

    title: str
    headings: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Outcome:
    """One step. `why` says what went wrong, or why it was skipped; `facts` are other figures worth keeping."""

    name: str
    command: str
    date: str
    seconds: float
    verdict: Verdict
    why: str = ""
    tests: Counted | None = None
    targets: list[Target] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    table: Table | None = None

    @property
    def fell_through(self) -> bool:
        """Whether it ran and did not pass."""
        return self.verdict in ("failed", "timed out")


def write(path: Path, environment: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write JSON lines: the environment, then a line for each step."""
    write_results(path, {"kind": KIND, **environment}, "step", map(asdict, outcomes))


def read(path: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """Read what `write` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.gpu", path):
        environment, rows = read_lines(path, "step")
        if environment.pop("kind") != KIND:
            raise ValueError("its first line is no environment of a GPU session")
        return environment, [_outcome(row) for row in rows]


def _outcome(row: dict[str, Any]) -> Outcome:
    tests, targets, shown = row.pop("tests"), row.pop("targets"), row.pop("table", None)
    return Outcome(
        **row,
        tests=Counted(**tests) if tests else None,
        targets=[Target(**each) for each in targets],
        table=Table(**shown) if shown else None,
    )


def merged(old: Sequence[Outcome], new: Sequence[Outcome], order: Sequence[str]) -> list[Outcome]:
    """Return the new outcomes and, of the other steps, the old ones; in `order`."""
    by_name = {outcome.name: outcome for outcome in (*old, *new)}
    return [by_name[name] for name in order if name in by_name]


_STEPS = ["step", "outcome", "s", "tests passed", "failed", "skipped", "targets", "met", "why"]
_TARGETS = ["what", "target", "measured", "met"]


def step_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a row per step."""
    rows = []
    for outcome in outcomes:
        tests, judged = outcome.tests, [each for each in outcome.targets if each.met is not None]
        counts = [str(count) for count in (tests.passed, tests.failed, tests.skipped)] if tests else ["", "", ""]
        targets = [str(len(judged)), str(sum(bool(each.met) for each in judged))] if judged else ["", ""]
        rows.append([outcome.name, outcome.verdict, f"{outcome.seconds:.0f}", *counts, *targets, outcome.why])
    return rows


def target_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a row per target."""
    verdicts = {True: "met", False: "missed", None: "-"}
    return [
        [
            f"{outcome.name}: {each.what}",
            each.target,
            "-" if each.measured is None else f"{each.measured:.3g}",
            verdicts[each.met],
        ]
        for outcome in outcomes
        for each in outcome.targets
    ]


def tables(outcomes: Sequence[Outcome]) -> list[Table]:
    """Return the tables of the steps that have one."""
    return [outcome.table for outcome in outcomes if outcome.table is not None]


def title(environment: dict[str, Any]) -> str:
    """Say where and when."""
    names = {"gpu": "", "torch": "torch ", "cuda": "CUDA ", "nccl": "NCCL ", "revision": "commopt at "}
    known = [f"{name}{environment[key]}" for key, name in names.items() if environment.get(key) is not None]
    return ", ".join([*known, environment["date"][:10]])


def print_tables(path: Path) -> None:
    """Print what a file of `bench.gpu` says; raises ValueError when it is another's."""
    environment, outcomes = read(path)
    print_rows(title(environment), _STEPS, step_rows(outcomes))
    if rows := target_rows(outcomes):
        print_rows("Targets", _TARGETS, rows)
    for each in tables(outcomes):
        print_rows(each.title, each.headings, each.rows)


def markdown(path: Path) -> str:
    """Return the tables for a document; raises ValueError when the file is another's."""
    environment, outcomes = read(path)
    parts = [f"{title(environment)}.", table(_STEPS, step_rows(outcomes))]
    if rows := target_rows(outcomes):
        parts.append(table(_TARGETS, rows))
    failed = [name for outcome in outcomes if outcome.tests for name in outcome.tests.failures]
    if failed:
        parts.append("\n".join(["Tests that failed:", "", *(f"- `{name}`" for name in failed)]))
    for each in tables(outcomes):
        parts += [f"{each.title}:", table(each.headings, [[f"`{name}`", *cells] for name, *cells in each.rows])]
    return "\n\n".join(parts)


def main() -> int:
    """Print the tables, for a terminal or for a document."""
    parser = CommandParser(prog="python -m bench.gpu.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help=f"{FILE} in the folder that --out of bench.gpu named")
    parser.add_argument("--markdown", action="store_true", help="print tables for a document")
    options = parser.parse_args()
    try:
        if options.markdown:
            print(markdown(options.file))
        else:
            print_tables(options.file)
    except (OSError, ValueError) as error:
        print(f"bench.gpu.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
