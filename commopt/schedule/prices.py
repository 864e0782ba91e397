"""What a message costs: its time by size for every strategy, corrected by what messages take beside backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import numpy as np
from numpy.typing import NDArray

from commopt.document import require_text, require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.schedule.estimate import DRIFT, Estimate

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
        if len(self.nbytes) == 1:
            return 0.0
        return max(0.0, (self.time_us[-1] - self.time_us[-2]) / (self.nbytes[-1] - self.nbytes[-2]))

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
        for strategy in self.prices:
            require_text(strategy, "costs: a strategy")

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

    def expected_us(self, costs: Costs) -> float:
        """Return for how long it should keep the lane; raises ConfigurationError for a strategy without a price."""
        return costs.lane_us(self.nbytes, self.strategy)


def observed_ratio(observed: Sequence[Observed], costs: Costs) -> Estimate | None:
    """Return the median of observed over expected time, with the error of a typical message; None without messages."""
    ratios = [
        (message.lane_us.value / expected_us, message.lane_us.error / expected_us)
        for message in observed
        if (expected_us := message.expected_us(costs)) > 0 and message.lane_us.value > 0
    ]
    if not ratios:
        return None
    return Estimate(median(value for value, _ in ratios), median(error for _, error in ratios))


# ---------------------------------------------------------------------------------------- correction

LARGEST_FACTOR = 4.0
_TELLING_SPREAD = 2.0  # largest over smallest price from which on factor and overhead can be told apart
_NOISY_ERRORS = 1.5  # a normal value deviates by 0.8 errors on average
_NEGLIGIBLE = 1e-3
_ROUNDS = 3
_SHRINKS = 60
_GOLDEN = (5**0.5 - 1) / 2
_WINDOWS_KEPT = 4


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

    @classmethod
    def of(cls, observed: Sequence[Observed], costs: Costs) -> Sample | None:
        """Take the messages of one strategy; what is expected to take no time says nothing about a price."""
        rows = []
        for message in observed:
            price_us = costs.table(message.strategy)(message.nbytes)
            if price_us > 0 and message.lane_us.value > 0:
                rows.append((price_us, message.lane_us.value, message.lane_us.error))
        return cls(*np.array(rows).T) if rows else None


class Correction:
    """For each strategy a factor on the calibrated price and an overhead of each message.

    A busy machine does both: it slows transfers down, and it lets every message wait, for a thread to wake up and for
    the rank that comes last, whatever its size. Windows before, in which messages had other sizes, help to tell the
    two apart; each counts half as much as the one after it.

    A strategy that was not observed shares the change of the one that was, price by price: what slows one message
    slows the others. That is a guess, which gives way to what is observed.
    """

    def __init__(self, costs: Costs) -> None:
        self._base = costs
        self._lines = {strategy: Line(overhead_us=costs.overhead_us) for strategy in costs.prices}
        self._samples: dict[str, list[Sample]] = {}

    def learn(self, observed: Sequence[Observed], drifted: bool = False) -> None:
        """Take over what a window observed, all by one strategy. drifted: windows before count no more."""
        if drifted:
            self._samples.clear()
        if not observed or (sample := Sample.of(observed, self._base)) is None:
            return
        name = observed[0].strategy
        before, was_guessed = self._lines[name], name not in self._samples
        samples = [sample, *self._samples.get(name, [])][:_WINDOWS_KEPT]
        line = fit(samples, before)
        missed = Estimate.of((sample.time_us / line.times_us(sample.price_us)).tolist())
        if len(samples) > 1 and missed.drifted(Estimate(1.0), DRIFT):  # then things were otherwise before
            samples = [sample]
            line = fit(samples, before)
        self._samples[name], self._lines[name] = samples, line
        if was_guessed and len(self._samples) > 1:
            return  # how wrong a guess was says nothing about the others
        change = line.times_us(sample.price_us) / before.times_us(sample.price_us)
        for other in self._lines.keys() - self._samples.keys():
            known = self._lines[other]
            shared = Sample(sample.price_us, known.times_us(sample.price_us) * change, np.zeros_like(sample.price_us))
            self._lines[other] = fit([shared], known)

    @property
    def lines(self) -> Mapping[str, Line]:
        """What became of the price of a message, by strategy; its overhead includes that of the costs."""
        return dict(self._lines)

    @property
    def costs(self) -> Costs:
        """The corrected costs; overheads are in the prices, since each strategy has its own."""
        prices = {
            name: table.along(self._lines[name].factor, self._lines[name].overhead_us)
            for name, table in self._base.prices.items()
        }
        return replace(self._base, prices=prices, overhead_us=0.0)


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
