"""Prices as the run sees them: calibrated on an idle lane, corrected by what messages take beside backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from commopt.plan.evidence import DRIFT, Estimate
from commopt.plan.line import Line, Sample, fit
from commopt.plan.prices import Costs
from commopt.plan.window import Observed

_WINDOWS_KEPT = 4
_TELLING_PRICE = 0.1  # of the largest message before, to say that something is wrong with that


def ratios(observed: Sequence[Observed], costs: Costs) -> dict[str, Estimate]:
    """Return for each strategy the median of observed over expected time, and the error of a typical message's."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for message in observed:
        expected_us = message.expected_us(costs)
        if expected_us > 0 and message.lane_us.value > 0:
            ratio = message.lane_us.value / expected_us, message.lane_us.error / expected_us
            groups.setdefault(message.bucket.strategy, []).append(ratio)
    return {
        name: Estimate(median(value for value, _ in group), median(error for _, error in group))
        for name, group in groups.items()
    }


class Correction:
    """For each strategy a factor on the calibrated price and an overhead of each message; see `fit`.

    A busy machine does both: it slows transfers down, and it lets every message wait, for a thread to wake up and for
    the rank that comes last, whatever its size. Messages of a window before, which another plan may have cut
    otherwise, help to tell the two apart. They count half as much as those of the window after it, and no more when
    the line through all of them misses what was observed last, unless those were small messages only.

    A strategy that was not observed shares the change of those that were, by price: what slows one message slows the
    others. That is a guess, and how wrong it was says nothing about the others when the strategy is observed at last.
    """

    def __init__(self, costs: Costs) -> None:
        self._base = costs
        self._lines = {strategy: Line(overhead_us=costs.overhead_us) for strategy, _ in costs.prices}
        self._samples: dict[str, list[Sample]] = {}
        self._guessed: set[str] = set()

    def learn(self, observed: Sequence[Observed], drifted: bool = False) -> None:
        """Take over what a window observed. drifted: since the windows before, which then count no more."""
        if drifted:
            self._samples.clear()
        before, found = dict(self._lines), _samples(observed, self._base)
        for name, sample in found.items():
            self._lines[name] = self._fit(name, sample)
        known = [(found[name].price_us, before[name], self._lines[name]) for name in found if name not in self._guessed]
        if known:
            price_us = np.concatenate([price_us for price_us, _, _ in known])
            change = np.concatenate([new.times_us(price_us) / old.times_us(price_us) for price_us, old, new in known])
            for name in self._lines.keys() - found.keys():
                line = self._lines[name]
                shared = Sample(price_us, line.times_us(price_us) * change, np.zeros_like(price_us))
                self._lines[name] = fit([shared], line)
                self._guessed.add(name)
        self._guessed -= found.keys()

    def _fit(self, name: str, sample: Sample) -> Line:
        before = self._samples.get(name, [])
        samples = [sample, *before][:_WINDOWS_KEPT]
        line = fit(samples, self._lines[name])
        missed = Estimate.of((sample.time_us / line.times_us(sample.price_us)).tolist())
        largest_us = max((each.price_us.max() for each in before), default=0.0)
        telling = sample.price_us.max() >= _TELLING_PRICE * largest_us
        if before and telling and missed.drifted(Estimate(1.0), DRIFT):
            samples = [sample]
            line = fit(samples, self._lines[name])
        self._samples[name] = samples
        return line

    @property
    def lines(self) -> Mapping[str, Line]:
        """What became of the price of a message, by strategy; its overhead includes that of the costs."""
        return dict(self._lines)

    @property
    def costs(self) -> Costs:
        """The corrected costs; overheads are in the prices, since each strategy has its own."""
        prices = {
            key: table.along(self._lines[key[0]].factor, self._lines[key[0]].overhead_us)
            for key, table in self._base.prices.items()
        }
        return replace(self._base, prices=prices, overhead_us=0.0)


def _samples(observed: Sequence[Observed], costs: Costs) -> dict[str, Sample]:
    """Sort messages by strategy; one that is expected to take no time says nothing about a price."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for message in observed:
        bucket = message.bucket
        price_us = costs.transfer_us(bucket.nbytes, bucket.strategy, bucket.chunks)
        beside_us = message.expected_us(costs) - price_us - costs.overhead_us
        if price_us > 0 and message.lane_us.value > beside_us:
            row = price_us, message.lane_us.value - beside_us, message.lane_us.error
            rows.setdefault(bucket.strategy, []).append(row)
    return {name: Sample(*np.array(table).T) for name, table in rows.items()}
