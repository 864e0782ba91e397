# SPDX-License-Identifier: Apache-2.0
"""The cost of a message by each strategy, corrected by the times of messages in live steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from commopt.cost import PriceTable
from commopt.cost.price_table import Floats
from commopt.document import require_time
from commopt.errors import ConfigurationError

if TYPE_CHECKING:
    from commopt.schedule.measurement import Estimate

LARGEST_FACTOR = 4.0  # beyond it, and below its inverse, the measurement is of something else than a price
_TELLING_RATIO = 2.0  # of two prices, from which on factor and overhead can be told apart
_MEASUREMENTS_KEPT = 4


@dataclass(frozen=True)
class Costs:
    """The costs of messages on the lane: by strategy, a message takes factor * price + overhead_us.

    Live steps correct both. A busy machine slows transfers down, and it lets every message wait, for a thread to wake
    up and for the rank that comes last, whatever its size. Earlier measurements, in which messages had other sizes,
    help to tell the two apart; each counts half as much as the one after it.

    A strategy without measurements shares what was learned last, since whatever slows one message slows the others: by
    how much all messages together took longer than their prices. What looks like an overhead may be a message that
    backward slows down, or a rank that came late, and shorter messages would not wait as long. That guess gives way to
    a measurement.

    prices: by strategy, as they were calibrated.
    overhead_us: of each message, before anything was learned.
    corrections: factor and overhead by strategy, as learned; the last one last.
    shared: the factor for strategies without one of their own.
    seen: by strategy the measurements behind them, the newest first: rows of price and time.
    """

    prices: Mapping[str, PriceTable]
    overhead_us: float = 0.0
    corrections: dict[str, tuple[float, float]] = field(default_factory=dict)
    shared: float = 1.0
    seen: Mapping[str, tuple[Floats, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.prices:
            raise ConfigurationError("costs: no prices; give one for at least one strategy")
        require_time(self.overhead_us, "costs: overhead_us")

    def only(self, strategies: Collection[str]) -> Costs:
        """Return the costs of some of the strategies."""
        return replace(self, prices={name: table for name, table in self.prices.items() if name in strategies})

    def table(self, strategy: str) -> PriceTable:
        """Return what messages of a strategy cost; raises ConfigurationError for one that has no price."""
        table = self._corrected.get(strategy)
        if table is None:
            raise ConfigurationError(f"costs: no price for {strategy!r}; there are {', '.join(map(repr, self.prices))}")
        return table

    def lane_us(self, nbytes: int, strategy: str) -> float:
        """Return how long a message keeps the lane busy."""
        return self.table(strategy)(nbytes)

    @cached_property
    def _corrected(self) -> dict[str, PriceTable]:
        return {name: table.along(*self.correction(name)) for name, table in self.prices.items()}

    def correction(self, strategy: str) -> tuple[float, float]:
        """Return the factor on a strategy's prices, and the overhead of a message."""
        return self.corrections.get(strategy, (self.shared, self.overhead_us))

    def learned(self, strategy: str, nbytes: Sequence[int], lane_us: Sequence[Estimate]) -> Costs:
        """Return the costs corrected by the messages of a measurement; those without a price or a time say nothing."""
        self.table(strategy)  # which has a price
        price = self.prices[strategy]
        rows = [(price(size), time_us.value) for size, time_us in zip(nbytes, lane_us, strict=True)]
        rows = [row for row in rows if min(row) > 0]
        if not rows:
            return self
        seen = (np.array(rows), *self.seen.get(strategy, ()))[:_MEASUREMENTS_KEPT]
        _, known_overhead_us = self.corrections.get(strategy, (1.0, self.overhead_us))
        others = {name: each for name, each in self.corrections.items() if name != strategy}
        return replace(
            self,
            corrections={**others, strategy: fit(seen, known_overhead_us)},
            shared=_within_limits(_all_together(rows, self.overhead_us)),
            seen={**self.seen, strategy: seen},
        )


def fit(measurements: Sequence[Floats], known_overhead_us: float) -> tuple[float, float]:
    """Return factor and overhead that fit rows of price and time; a measurement has half the weight of the newer one.

    The factor is the median slope between messages of which one has twice the price of the other (Theil and Sen), so
    that a few wild ones move it little. Where there are none, or the slope is absurd, the overhead stays as known.
    """
    price, time = np.concatenate(measurements).T
    weight = np.concatenate([np.full(len(rows), 0.5**age) for age, rows in enumerate(measurements)])
    small, large = np.nonzero(price[:, None] * _TELLING_RATIO <= price)
    if len(small):
        slopes = (time[large] - time[small]) / (price[large] - price[small])
        factor = _median(slopes, weight[large] * weight[small])
        overhead_us = _median(time - factor * price, weight)
        if 1 / LARGEST_FACTOR < factor < LARGEST_FACTOR and overhead_us >= 0:
            return factor, overhead_us
        known_overhead_us = min(known_overhead_us, max(overhead_us, 0.0))
    factor = _median((time - known_overhead_us) / price, weight)
    return _within_limits(factor), known_overhead_us


def _within_limits(factor: float) -> float:
    return min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, factor))


def _all_together(rows: Sequence[tuple[float, float]], overhead_us: float) -> float:
    """Return what messages took, less a known overhead of each, over what they should have taken."""
    price_us, time_us = map(sum, zip(*rows, strict=True))
    return max(0.0, time_us - len(rows) * overhead_us) / price_us


def _median(values: Floats, weight: Floats) -> float:
    """Return the weighted median, between two values if neither side outweighs the other."""
    order = np.argsort(values, kind="stable")
    upto = np.cumsum(weight[order])
    half = upto[-1] / 2
    low = values[order[int(np.searchsorted(upto, half * (1 - 1e-12)))]]
    high = values[order[int(np.searchsorted(upto, half * (1 + 1e-12)))]]
    return float(low + high) / 2
