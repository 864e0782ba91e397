"""Predict and measure on six emulated clusters, and add up how far predictions are off: about half an hour.

    python -m bench.prediction.matrix --json bench/results/prediction.json

Clusters that are in the file already are left out, so that a run that was stopped can be resumed. Options that are not
listed below go to bench.prediction.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.matrix import Matrix, Place
from bench.prediction import record, summary
from bench.prediction.record import Run


@dataclass(frozen=True)
class AllModels:
    """Every model by every strategy, on one cluster."""

    place: Place

    def __str__(self) -> str:
        return str(self.place)

    @property
    def command(self) -> list[str]:
        """What every rank runs, but for where it writes to."""
        return ["bench.prediction"]

    def is_in(self, runs: list[Run]) -> bool:
        """Return whether a file has it."""
        return any(self.place.is_that(environment.nodes, environment.emulated_rate) for environment, _ in runs)


MATRIX = Matrix(
    "bench.prediction.matrix",
    (__doc__ or "").splitlines()[0],
    (
        AllModels(Place(2, 1, "50mbit")),
        AllModels(Place(2, 2, "100mbit")),
        AllModels(Place(3, 1, "100mbit")),
        AllModels(Place(4, 1, "200mbit")),
        AllModels(Place(3, 2, "200mbit")),
        AllModels(Place(4, 2, "400mbit")),
    ),
    record.read,
    summary.show,
    timeout_s=900.0,
)

if __name__ == "__main__":
    sys.exit(MATRIX.main())
