"""What it costs to wait for the slowest of many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, isfinite, log
from statistics import NormalDist

from commopt.errors import ConfigurationError

_STRATA = 32


@dataclass(frozen=True)
class Stragglers:
    """In each step each rank's computation takes exp(sigma Z - sigma^2 / 2) times its mean, Z normal, all independent.

    The mean of that is 1 and, for small sigma, its standard deviation sigma: 0.02 is 2 %.
    """

    sigma: float

    def __post_init__(self) -> None:
        if not (isfinite(self.sigma) and 0 <= self.sigma <= 1):
            raise ConfigurationError(f"Stragglers(sigma={self.sigma!r}) must be between 0 and 1, for example 0.02")

    def slowest(self, ranks: int) -> tuple[float, ...]:
        """Return equally likely factors of the slowest of `ranks` ranks, in increasing order.

        They are the middles of 32 strata of its distribution, F(x)^ranks: no chance is involved.
        """
        if not self.sigma:
            return (1.0,)
        normal = NormalDist()
        # 1 - u^(1/P), without losing the digits that count where P is large
        tails = (-expm1(log((stratum + 0.5) / _STRATA) / ranks) for stratum in range(_STRATA))
        return tuple(exp(-self.sigma * normal.inv_cdf(tail) - self.sigma**2 / 2) for tail in tails)
