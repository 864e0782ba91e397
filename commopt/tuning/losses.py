"""What each way of sending leaves out of each parameter's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from commopt.plan import Bucket, Unit


@dataclass(frozen=True)
class Losses:
    """Squared L2 norms by parameter: of what a strategy leaves out (none for exact ones), and of the gradient."""

    left_out: Mapping[str, Mapping[str, float]]
    squares: Mapping[str, float]

    def energies(self, strategies: Sequence[str], units: Sequence[Unit]) -> dict[str, list[float]]:
        """Return for each strategy what it leaves out of every unit."""
        return {
            strategy: [sum(self._of(strategy, name) for name in unit.names) for unit in units]
            for strategy in strategies
        }

    def error(self, buckets: Sequence[Bucket]) -> float:
        """Return the share of the whole gradient's norm that these buckets leave out."""
        total = sum(self.squares.get(name, 0.0) for bucket in buckets for name in bucket.names)
        left_out = sum(self._of(bucket.strategy, name) for bucket in buckets for name in bucket.names)
        return sqrt(left_out / total) if total else 0.0

    def _of(self, strategy: str, name: str) -> float:
        return self.left_out.get(strategy, {}).get(name, 0.0)
