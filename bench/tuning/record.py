"""What a run of the comparison found: its environment, and a record for every configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.prediction import lines
from bench.prediction.lines import World

_KIND = "tuning"


@dataclass(frozen=True)
class Configuration:
    """One model; milliseconds, the median step on the slowest rank, of contenders that took turns.

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
    lines.append(path, _KIND, asdict(environment), list(map(asdict, configurations)))


def read(paths: Sequence[Path]) -> list[Run]:
    """Read what `append` wrote; raises ValueError when a file holds something else."""
    return [run for path in paths for run in lines.read(path, _KIND, World, Configuration)]
