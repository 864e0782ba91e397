# SPDX-License-Identifier: Apache-2.0
"""What comparisons of the tuner found; `python -m bench.evidence.tuning.report FILE...` prints it in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.document import table
from bench.evidence.matrix import World, append_run, read_runs
from commopt.command_line import CommandParser, content_of

_KIND = "tuning"


@dataclass(frozen=True)
class Configuration:
    """One model; milliseconds, the median step on the slowest rank, of runs that took turns.

    compute_ms: without communication. stock_ms: stock DDP. best: the fastest of all that was tried, all of which with
    its own time is in `candidates_ms`. tuned: the tuner's choice, "" where it made none within `steps`.
    explanation: the tuner's own.
    """

    model: str
    parameters: int
    batch: int
    allow: list[str]
    compute_ms: float
    stock_ms: float
    best: str
    best_ms: float
    tuned: str
    tuned_ms: float
    steps: int
    candidates_ms: dict[str, float]
    explanation: str

    @property
    def to_best(self) -> float:
        """The tuned step as a share of that of the fastest candidate."""
        return self.tuned_ms / self.best_ms

    @property
    def to_stock(self) -> float:
        """The tuned step as a share of stock DDP's."""
        return self.tuned_ms / self.stock_ms

    @property
    def exposed_to_stock(self) -> float | None:
        """What communication adds to a step as a share of what it adds in stock DDP; None where that hides it all."""
        stock_ms = self.stock_ms - self.compute_ms
        return (self.tuned_ms - self.compute_ms) / stock_ms if stock_ms > 0 else None


Run = tuple[World, list[Configuration]]
"""One cluster, and what was found on it."""


def append(path: Path, environment: World, configurations: Sequence[Configuration]) -> None:
    """Add a run to a file."""
    append_run(path, _KIND, asdict(environment), list(map(asdict, configurations)))


def read(paths: Sequence[Path]) -> list[Run]:
    """Read what `append` wrote; raises ValueError when a file holds something else."""
    return [run for path in paths for run in read_runs(path, _KIND, World, Configuration)]


def markdown(runs: Sequence[Run]) -> str:
    """Return a table of every configuration; milliseconds of a step."""
    headings = [
        "cluster, link",
        "model",
        "allowed",
        "computing alone",
        "stock DDP",
        "fastest of all tried",
        "`auto` chose",
    ]
    headings += ["of fastest", "of stock", "beyond computing, of stock's", "steps"]
    rows = []
    for environment, configurations in runs:
        for each in configurations:
            exposed = each.exposed_to_stock
            allowed = ", ".join(name for name in each.allow if name != "lossless") or "exact"
            shares = [f"{each.to_best:.2f}", f"{each.to_stock:.2f}", "-" if exposed is None else f"{exposed:.3f}"]
            best = f"{each.best_ms:.0f}: `{each.best}`, of {len(each.candidates_ms)}"
            tuned = f"{each.tuned_ms:.0f}: {each.tuned or 'nothing yet'}"
            alone = [f"{each.compute_ms:.0f}", f"{each.stock_ms:.0f}"]
            rows.append(
                [environment.cluster, f"`{each.model}`", allowed, *alone, best, tuned, *shares, str(each.steps)]
            )
    return table(headings, rows)


def main() -> None:
    """Print."""
    parser = CommandParser(prog="python -m bench.evidence.tuning.report", description="A table of tunings.")
    parser.add_argument(
        "files", type=content_of(lambda path: read([path])), nargs="+", help="what bench.evidence.tuning --json wrote"
    )
    print(markdown([run for runs in parser.parse_args().files for run in runs]))


if __name__ == "__main__":
    main()
