"""A straight line through what messages took, drawn so that a few wild ones do not move it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from commopt.plan.prices import Floats

LARGEST_FACTOR = 4.0
_TELLING_SPREAD = 2.0  # largest over smallest price from which on factor and overhead can be told apart
_NEGLIGIBLE = 1e-3
_NOISY_ERRORS = 1.5  # a normal value deviates by 0.8 errors on average
_ROUNDS = 3
_SHRINKS = 60
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Line:
    """A message takes factor * price + overhead_us."""

    factor: float = 1.0
    overhead_us: float = 0.0

    def times_us(self, price_us: Floats) -> Floats:
        """Return the time of messages of these prices."""
        return self.factor * price_us + self.overhead_us


@dataclass(frozen=True)
class Sample:
    """Messages of one window: the calibrated price of each, above 0, what it took, and the error of that."""

    price_us: Floats
    time_us: Floats
    error_us: Floats


def fit(samples: Sequence[Sample], known: Line) -> Line:
    """Return the line of least relative absolute deviation; messages weigh half of those of the sample before theirs.

    The factor is within 1/4..4, since beyond that something else is being measured; the overhead is at least 0. The
    overhead stays as known where the two cannot be told apart: where prices are too much alike, where a factor alone
    misses by no more than noise explains, and where the factor would be at a limit. It only gives way so far that the
    factor need not fall below half of the one known. A known line that misses by less than 0.1 % stays.
    """
    price, time, error = (
        np.concatenate(parts) for parts in zip(*((s.price_us, s.time_us, s.error_us) for s in samples), strict=True)
    )
    weight = np.concatenate([np.full(len(s.price_us), 0.5**age) for age, s in enumerate(samples)])
    if _missed(known, price, time, weight) < _NEGLIGIBLE:
        return known
    most_us = _median(time - 0.5 * known.factor * price, weight)
    overhead_us = max(0.0, min(known.overhead_us, most_us))
    line = Line(_factor(price, time, weight / price, overhead_us), overhead_us)
    noise = _NOISY_ERRORS * _median(error / time, weight)
    if price.max() < _TELLING_SPREAD * price.min() or _missed(line, price, time, weight) <= noise:
        return line
    # Relative to the line, not to what was measured: or one that took no time at all would outweigh the rest.
    free = line
    for _ in range(_ROUNDS):
        free = _least_deviation(price, time, weight / free.times_us(price))
    return free if 1 / LARGEST_FACTOR < free.factor < LARGEST_FACTOR else line


def _missed(line: Line, price: Floats, time: Floats, weight: Floats) -> float:
    return float(weight @ np.abs(time / line.times_us(price) - 1) / weight.sum())


def _least_deviation(price: Floats, time: Floats, weight: Floats) -> Line:
    """Minimize the weighted absolute deviation, exactly in the factor and by golden section in the overhead.

    The deviation is convex in both together, so its minimum over the factor is convex in the overhead.
    """

    def deviation(overhead_us: float) -> float:
        line = Line(_factor(price, time, weight, overhead_us), overhead_us)
        return float(weight @ np.abs(time - line.times_us(price)))

    low, high = 0.0, float(time.max())
    left, right = high - _GOLDEN * high, _GOLDEN * high
    at_left, at_right = deviation(left), deviation(right)
    for _ in range(_SHRINKS):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = deviation(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = deviation(right)
    overhead_us = min((0.0, low, high), key=deviation)
    return Line(_factor(price, time, weight, overhead_us), overhead_us)


def _factor(price: Floats, time: Floats, weight: Floats, overhead_us: float) -> float:
    """Return the factor of least weighted absolute deviation for a given overhead."""
    factor = _median((time - overhead_us) / price, weight * price)
    return min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor))


def _median(values: Floats, weight: Floats) -> float:
    """Return the weighted median, between two values if neither side outweighs the other."""
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(weight[order])
    half = upto[-1] / 2
    low = values[order[int(np.searchsorted(upto, half * (1 - 1e-12)))]]
    high = values[order[int(np.searchsorted(upto, half * (1 + 1e-12)))]]
    return float(low + high) / 2
