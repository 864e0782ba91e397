# SPDX-License-Identifier: Apache-2.0
"""What measurements say, and how much of it is noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, hypot, isnan, sqrt
from statistics import median

# For normal values: the standard deviation is 1.4826 MAD, and the median of n has an error of 1.2533 of it / sqrt(n).
_MEDIAN_ERROR_PER_MAD = 1.4826 * 1.2533
SIGNIFICANT_ERRORS = 3.0
DRIFT = 0.15  # of conditions: what moves by less has not moved
LEAST_GAIN = 0.01  # of a step


@dataclass(frozen=True)
class Estimate:
    """A typical value and its standard error."""

    value: float
    error: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from repeated measurements; there must be one, and NaNs are not counted.

        The median, and its error from the median absolute deviation: a few wild values move neither much.
        """
        known = _known(values)
        center = median(known)
        deviation = median(abs(value - center) for value in known)
        return cls(center, _MEDIAN_ERROR_PER_MAD * deviation / sqrt(len(known)))

    @classmethod
    def mean_of(cls, values: Sequence[float], chosen: Sequence[int]) -> Estimate:
        """Estimate the mean of the values at the places `chosen`, or as `of` where these are all NaN.

        The error is the larger of two, since each can be too small. The spread of the chosen is known badly when they
        are few, and does not show what moves them together. That of all values around their median does, but not that
        some are wild.
        """
        every = cls.of(values)
        known = _known([values[place] for place in chosen])
        if not known:
            return every
        mean = fsum(known) / len(known)
        error = hypot(*(value - mean for value in known)) / sqrt((len(known) - 1) * len(known)) if known[1:] else 0.0
        return cls(mean, max(error, every.error))

    def pooled(self, other: Estimate) -> Estimate:
        """Return what this and another measurement of the same value, as long as this one, tell together.

        The error is theirs, or what they differ by: each knows only of what moved while it was made.
        """
        error = max(hypot(self.error, other.error), abs(self.value - other.value)) / 2
        return Estimate((self.value + other.value) / 2, error)

    def differs(self, other: Estimate, least: float) -> bool:
        """Return whether the two are further apart than `least`, and than noise explains."""
        return abs(self.value - other.value) > max(least, SIGNIFICANT_ERRORS * hypot(self.error, other.error))

    def drifted(self, before: Estimate, share: float) -> bool:
        """Return whether the larger exceeds the smaller by more than this share of the smaller."""
        return self.differs(before, share * min(self.value, before.value))


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not isnan(value)]


def ms(time_us: float) -> str:
    """Write a time in milliseconds, with three digits."""
    value = time_us / 1000
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"
