"""What a run of the comparison found: its environment, and a record for every configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.prediction import lines
from bench.prediction.lines import World

_KIND = "prediction"


@dataclass(frozen=True)
class Environment(World):
    """Where and how the numbers of one cluster were made.

    links: for each curve that was probed, by its name, what its largest message took, as [bytes, us, us of a core on
    each rank]. probe_s: how long that took in all.
    """

    probe_s: float
    links: dict[str, list[float]]


@dataclass(frozen=True)
class Configuration:
    """One model by one strategy; milliseconds, of a usual step on the slowest rank.

    predicted_ms: by the simulator, beside communication on the same processors. apart_ms: the same if each rank had
    processors of its own for it. compute_ms: measured without communication. exposed_ms, communication_ms: predicted;
    lane_ms: measured, what communication_ms is a prediction of. cpu_ms, compute_cpu_ms: what all ranks together used in
    a step with and without communication.
    steps_ms: what was timed. buckets: bytes of DDP's, those that were simulated in `simulated_buckets`.
    """

    model: str
    parameters: int
    batch: int
    strategy: str
    measured_ms: float
    predicted_ms: float
    apart_ms: float
    compute_ms: float
    exposed_ms: float
    communication_ms: float
    lane_ms: float
    cpu_ms: float
    compute_cpu_ms: float
    steps_ms: list[float]
    buckets: list[int]
    simulated_buckets: list[int]
    notes: list[str]

    @property
    def error(self) -> float:
        """By how much of what was measured the prediction is too long."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def apart_error(self) -> float:
        """The same of the prediction that knows nothing of shared processors."""
        return self.apart_ms / self.measured_ms - 1


Run = tuple[Environment, list[Configuration]]
"""One cluster, and what was found on it."""


def append(path: Path, environment: Environment, configurations: Sequence[Configuration]) -> None:
    """Add a run to a file."""
    lines.append(path, _KIND, asdict(environment), list(map(asdict, configurations)))


def read(paths: Sequence[Path]) -> list[Run]:
    """Read what `append` wrote; raises ValueError when a file holds something else."""
    return [run for path in paths for run in lines.read(path, _KIND, Environment, Configuration)]
