# SPDX-License-Identifier: Apache-2.0
"""What a message costs: its time by size for every strategy, corrected by what messages take beside backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from commopt.document import require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.schedule.estimate import Estimate

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

_SMALLEST_BYTES = 256
_PER_OCTAVE = 8


@dataclass(frozen=True)
class PriceTable:
    """Time of a message by its bytes: straight lines between points.

    Below the first point a message costs what it costs there; beyond the last the line goes on, but never falls.
    """

    nbytes: tuple[int, ...]
    time_us: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.nbytes or len(self.nbytes) != len(self.time_us):
            raise ConfigurationError(
                f"price table: {len(self.nbytes)} sizes and {len(self.time_us)} times; give as many of both, at least 1"
            )
        for size, time_us in zip(self.nbytes, self.time_us, strict=True):
            require_whole(size, 0, "price table: a size")
            require_time(time_us, f"price table: the time of {size} bytes")
        if any(left >= right for left, right in zip(self.nbytes, self.nbytes[1:], strict=False)):
            raise ConfigurationError(f"price table: sizes {list(self.nbytes)} must increase")

    @classmethod
    def of(cls, price: Callable[[int], float], largest_bytes: int) -> PriceTable:
        """Tabulate `price`, bytes of one message to microseconds, up to the largest message it is needed for.

        Where it is a straight line the table is exact; a bend is cut off within 1/8 of an octave.
        """
        require_whole(largest_bytes, 1, "largest_bytes")
        octaves = np.log2(max(largest_bytes / _SMALLEST_BYTES, 1.0))
        steps = _SMALLEST_BYTES * 2 ** (np.arange(int(octaves * _PER_OCTAVE) + 1) / _PER_OCTAVE)
        sizes = sorted({1, largest_bytes, *(int(size) for size in steps if size < largest_bytes)})
        return cls(tuple(sizes), tuple(float(price(size)) for size in sizes))

    @cached_property
    def _points(self) -> tuple[Floats, Floats]:
        return np.array(self.nbytes, dtype=np.float64), np.array(self.time_us, dtype=np.float64)

    @cached_property
    def last_slope(self) -> float:
        """Microseconds a byte beyond the last point."""
        slopes = np.diff(self.time_us) / np.diff(self.nbytes)
        return float(slopes[-1:].sum().clip(0.0))

    def times_us(self, nbytes: Whole) -> Floats:
        """Return the time of each of these sizes."""
        sizes, times = self._points
        inside = np.interp(nbytes, sizes, times)
        return np.asarray(inside + self.last_slope * np.maximum(nbytes - sizes[-1], 0.0), dtype=np.float64)

    def __call__(self, nbytes: int) -> float:
        """Return the time of one message."""
        return float(self.times_us(np.array([nbytes]))[0])

    def along(self, factor: float, overhead_us: float) -> PriceTable:
        """Return the table of factor * time + overhead_us."""
        return PriceTable(self.nbytes, tuple(factor * time_us + overhead_us for time_us in self.time_us))


@dataclass(frozen=True)
class Costs:
    """What messages cost on the lane; `prices` by strategy. overhead_us: of each message, beside its price."""

    prices: Mapping[str, PriceTable]
    overhead_us: float = 0.0

    def __post_init__(self) -> None:
        if not self.prices:
            raise ConfigurationError("costs: no prices; give one for at least one strategy")
        require_time(self.overhead_us, "costs: overhead_us")

    def only(self, strategies: Collection[str]) -> Costs:
        """Return the costs of some of the strategies."""
        return replace(self, prices={name: table for name, table in self.prices.items() if name in strategies})

    def table(self, strategy: str) -> PriceTable:
        """Return the prices of a strategy; raises ConfigurationError for one that has none."""
        table = self.prices.get(strategy)
        if table is None:
            raise ConfigurationError(f"costs: no price for {strategy!r}; there are {', '.join(map(repr, self.prices))}")
        return table

    def lane_us(self, nbytes: int, strategy: str) -> float:
        """Return how long a message keeps the lane busy."""
        return self.overhead_us + self.table(strategy)(nbytes)


@dataclass(frozen=True)
class Observed:
    """A message as it was run in every step.

    lane_us: for how long it kept the lane, from the moment it could have started: with all that goes by before it
        does start.
    """

    nbytes: int
    strategy: str
    lane_us: Estimate


def observed_ratio(observed: Sequence[Observed], costs: Costs) -> Estimate | None:
    """Return the median of observed over expected time, with the error of a typical message; None without messages."""
    ratios = [
        (message.lane_us.value / expected_us, message.lane_us.error / expected_us)
        for message in observed
        if (expected_us := costs.lane_us(message.nbytes, message.strategy)) > 0 and message.lane_us.value > 0
    ]
    if not ratios:
        return None
    return Estimate(median(value for value, _ in ratios), median(error for _, error in ratios))


# ---------------------------------------------------------------------------------------- correction

LARGEST_FACTOR = 4.0  # beyond it, and below its inverse, something else than a price is being measured
_TELLING_RATIO = 2.0  # of two prices, from which on factor and overhead can be told apart
_WINDOWS_KEPT = 4


class Line(NamedTuple):
    """A message takes factor * price + overhead_us."""

    factor: float
    overhead_us: float


class Correction:
    """For each strategy a factor on the calibrated price and an overhead of each message.

    A busy machine does both: it slows transfers down, and it lets every message wait, for a thread to wake up and for
    the rank that comes last, whatever its size. Windows before, in which messages had other sizes, help to tell the
    two apart; each counts half as much as the one after it. A strategy that was not observed shares what was learned
    last: what slows one message slows the others. That is a guess, which gives way to what is observed.
    """

    def __init__(self, costs: Costs) -> None:
        self._base = costs
        self._last = Line(1.0, costs.overhead_us)
        self._lines: dict[str, Line] = {}
        self._seen: dict[str, list[Floats]] = {}  # of each window, rows of price and time

    def learn(self, observed: Sequence[Observed]) -> None:
        """Take over what a window observed, all by one strategy; what should take no time says nothing of a price."""
        rows = [(self._base.table(each.strategy)(each.nbytes), each.lane_us.value) for each in observed]
        rows = [row for row in rows if min(row) > 0]
        if not rows:
            return
        name = observed[0].strategy
        self._seen[name] = [np.array(rows), *self._seen.get(name, [])][:_WINDOWS_KEPT]
        known = self._lines.get(name, Line(1.0, self._base.overhead_us))
        self._last = self._lines[name] = fit(self._seen[name], known.overhead_us)

    def line(self, strategy: str) -> Line:
        """Return what became of the price of a message; its overhead includes that of the costs."""
        return self._lines.get(strategy, self._last)

    @property
    def costs(self) -> Costs:
        """The corrected costs; overheads are in the prices, since each strategy has its own."""
        return Costs({name: table.along(*self.line(name)) for name, table in self._base.prices.items()})


def fit(windows: Sequence[Floats], known_overhead_us: float) -> Line:
    """Return the line through rows of price and time, those of a window with half the weight of those before it.

    The factor is the median slope between messages of which one has twice the price of the other (Theil and Sen), so
    that a few wild ones move it little. Where there are none, or the slope is absurd, the overhead stays as known.
    """
    price, time = np.concatenate(windows).T
    weight = np.concatenate([np.full(len(rows), 0.5**age) for age, rows in enumerate(windows)])
    small, large = np.nonzero(price[:, None] * _TELLING_RATIO <= price)
    if len(small):
        slopes = (time[large] - time[small]) / (price[large] - price[small])
        factor = _median(slopes, weight[large] * weight[small])
        overhead_us = _median(time - factor * price, weight)
        if 1 / LARGEST_FACTOR < factor < LARGEST_FACTOR and overhead_us >= 0:
            return Line(factor, overhead_us)
        known_overhead_us = min(known_overhead_us, max(overhead_us, 0.0))
    factor = _median((time - known_overhead_us) / price, weight)
    return Line(min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor)), known_overhead_us)


def _median(values: Floats, weight: Floats) -> float:
    """Return the weighted median, between two values if neither side outweighs the other."""
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(weight[order])
    half = upto[-1] / 2
    low = values[order[int(np.searchsorted(upto, half * (1 - 1e-12)))]]
    high = values[order[int(np.searchsorted(upto, half * (1 + 1e-12)))]]
    return float(low + high) / 2
