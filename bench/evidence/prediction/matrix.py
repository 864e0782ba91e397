"""Predict and measure on six emulated clusters, and add up how far predictions are off: about half an hour.

    python -m bench.evidence.prediction.matrix --json bench/results/prediction.json

Clusters that are in the file already are left out, so that a run that was stopped can be resumed. Options that are not
listed below go to bench.evidence.prediction.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.evidence.matrix import EmulatedCluster, Matrix
from bench.evidence.prediction import report
from bench.evidence.prediction.report import Run


@dataclass(frozen=True)
class AllModels:
    """Every model by every strategy, on one cluster."""

    place: EmulatedCluster

    def __str__(self) -> str:
        return str(self.place)

    @property
    def command(self) -> list[str]:
        """What every rank runs, but for where it writes to."""
        return ["bench.evidence.prediction"]

    def is_in(self, runs: list[Run]) -> bool:
        """Return whether a file has it."""
        return any(self.place.is_that(environment.nodes, environment.emulated_rate) for environment, _ in runs)


MATRIX = Matrix(
    "bench.evidence.prediction.matrix",
    (__doc__ or "").splitlines()[0],
    (
        AllModels(EmulatedCluster(2, 1, "50mbit")),
        AllModels(EmulatedCluster(2, 2, "100mbit")),
        AllModels(EmulatedCluster(3, 1, "100mbit")),
        AllModels(EmulatedCluster(4, 1, "200mbit")),
        AllModels(EmulatedCluster(3, 2, "200mbit")),
        AllModels(EmulatedCluster(4, 2, "400mbit")),
    ),
    report.read,
    report.markdown,
    timeout_s=900.0,
)


if __name__ == "__main__":
    sys.exit(MATRIX.main())
