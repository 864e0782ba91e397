# SPDX-License-Identifier: Apache-2.0
"""What a window of steps measured, put together from all ranks: estimates with their noise, and whether two differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, fsum, hypot, isnan, sqrt
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from commopt.aggregate import LocalSGD
from commopt.feedback.parameter_buckets import BUCKET_NBYTES
from commopt.schedule.measure import StepTable, Times
from commopt.schedule.plan import Plan, Prediction, Unit
from commopt.schedule.simulation import INSIDE, mean_step_us, members_of, simulate

if TYPE_CHECKING:
    from commopt.schedule.costs import Costs

# For normal values: the standard deviation is 1.4826 MAD, and the median of n has an error of 1.2533 of it / sqrt(n).
_MEDIAN_ERROR_PER_MAD = 1.4826 * 1.2533
SIGNIFICANT_ERRORS = 3.0
DRIFT = 0.15  # of conditions: a smaller change is none
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
        are few, and does not show a change that moves all of them. The spread of all values around their median shows
        that, but not that a few are wild.
        """
        every = cls.of(values)
        known = _known([values[place] for place in chosen])
        if not known:
            return every
        mean = fsum(known) / len(known)
        error = hypot(*(value - mean for value in known)) / sqrt((len(known) - 1) * len(known)) if known[1:] else 0.0
        return cls(mean, max(error, every.error))

    def pooled(self, other: Estimate) -> Estimate:
        """Return the estimate from this and another measurement of the same value, of the same length.

        The error is that of both, or their difference if it is larger: neither saw the changes between them.
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


@dataclass(frozen=True)
class Measurement:
    """The times of one plan in a window of steps, from all ranks.

    plan: the messages that ran.
    units: in the order of backward; `ready_us` is the mean over usual steps (see `of`).
    ready_error_us: the standard error of each of these means.
    step_us: the time of each step, on the slowest rank.
    exposed_us: the part of each step after its last gradient, on the slowest rank.
    message_nbytes: the length of each message.
    lane_us: for how long each kept the lane, from the moment it could have started until it was done.
    steps_behind: how far compressed averages are behind exact ones, as ExactSample has it; None where nobody compares.
    movable: whether another plan may have other groups.
    earlier: another measurement of the same plan, which counts as much.
    """

    plan: Plan
    units: tuple[Unit, ...]
    ready_error_us: tuple[float, ...]
    step_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    message_nbytes: tuple[int, ...]
    lane_us: tuple[Estimate, ...]
    steps_behind: float | None = None
    movable: bool = True
    earlier: Measurement | None = None

    @classmethod
    def of(cls, plan: Plan, units: Sequence[Unit], times: StepTable) -> Measurement:
        """Reduce times of the last rank to means over usual steps; the units' own ready_us is ignored.

        The usual steps are the smallest majority around the median length, so that a few wild steps change nothing.
        Means over the same steps add up to a step. Medians would not, where each message is late now and then. Steps
        with a NaN are left out.
        """
        table = times.table()
        good = StepTable.of_table(table[~np.isnan(table).any(axis=1)], len(plan.groups))
        begin, compute_end, end = good.begin_us, good.compute_end_us, good.finished_us.max(axis=1, initial=0.0)
        if not len(begin):
            return cls(plan, tuple(units), (0.0,) * len(units), (), (), (), ())
        step_us = np.maximum(end, compute_end) - begin
        usual = _usual(step_us)
        ready = [Estimate.mean_of(column, usual) for column in (good.ready_us - begin[:, None]).T.tolist()]
        lane_us = np.maximum(good.finished_us - good.started_us, 0.0)
        return cls(
            plan=plan,
            units=tuple(replace(unit, ready_us=max(0.0, at.value)) for unit, at in zip(units, ready, strict=True)),
            ready_error_us=tuple(at.error for at in ready),
            step_us=tuple(step_us.tolist()),
            exposed_us=tuple(np.maximum(end - compute_end, 0.0).tolist()),
            message_nbytes=tuple(sum(unit.nbytes for unit in group) for group in members_of(units, plan.groups)),
            lane_us=tuple(Estimate.mean_of(column, usual) for column in lane_us.T.tolist()),
        )

    @cached_property
    def step(self) -> Estimate:
        """The time of a step; at least one must have been measured."""
        own = Estimate.of(self.step_us)
        return own if self.earlier is None else self.earlier.step.pooled(own)

    @cached_property
    def exposed(self) -> Estimate:
        """The part of a usual step after its last gradient; at least one must have been measured."""
        own = Estimate.mean_of(self.exposed_us, _usual(np.array(self.step_us)))
        return own if self.earlier is None else self.earlier.exposed.pooled(own)

    def __str__(self) -> str:
        return f"{ms(self.step.value)}, {ms(self.exposed.value)} of it exposed"

    # ------------------------------------------------------------------------------------ predictions

    def predicted(self, costs: Costs) -> Prediction:
        """Return the expected times of the plan itself, under these conditions, with the costs as known now."""
        return simulate(self.units, self.plan.groups, self.plan.strategy, costs)

    def expected_of(self, plan: Plan, costs: Costs) -> tuple[float, float]:
        """Return the expected step and exposed part of another plan, in microseconds.

        They differ from the measured ones as much as the simulated steps differ: the costs miss the same in both.
        """
        return self._expected(simulate(self.units, plan.groups, plan.strategy, costs).finish_us, costs)

    def expected_of_local_sgd(self, average: LocalSGD, costs: Costs) -> tuple[float, float]:
        """Return the expected mean step and exposed part of local SGD with the same messages, in microseconds.

        Its fragments are taken to be of one size.
        """
        groups = members_of(self.units, self.plan.groups)
        nbytes = [sum(unit.nbytes for unit in group) for group in groups]
        ready_us = [max(unit.ready_us for unit in group) for group in groups]
        buckets = ceil(sum(nbytes) / average.fragments / BUCKET_NBYTES)
        bucket_us = costs.lane_us(sum(nbytes) // (average.fragments * buckets), repr(average.parameters))
        fragments_us = [buckets * bucket_us] * average.fragments
        lane_us = [costs.lane_us(each, repr(INSIDE)) for each in nbytes]
        return self._expected(mean_step_us(average, fragments_us, ready_us, lane_us, max(ready_us)), costs)

    def _expected(self, simulated_us: float, costs: Costs) -> tuple[float, float]:
        saved_us = self.predicted(costs).finish_us - simulated_us
        return max(0.0, self.step.value - saved_us), max(0.0, self.exposed.value - saved_us)

    # ------------------------------------------------------------------------------------------ drift

    @cached_property
    def _span(self) -> Estimate:
        """The time from the first unit to the last; plans do not depend on the time before."""
        times = [unit.ready_us for unit in self.units]
        return Estimate(max(times) - min(times), self.ready_error_us[times.index(max(times))])

    @cached_property
    def _positions(self) -> Mapping[tuple[str, ...], Estimate]:
        """The place of each unit in that span, from 0 to 1."""
        first, width = min(unit.ready_us for unit in self.units), self._span.value or 1.0
        return {
            unit.names: Estimate((unit.ready_us - first) / width, (self._span.error + own) / width)
            for unit, own in zip(self.units, self.ready_error_us, strict=True)
        }

    def drift_from(self, before: Measurement, costs: Costs) -> str:
        """Name the first condition that moved by more than 15 %, and by more than noise explains; "" if none did.

        costs: as known now, so that messages of another size or number are not mistaken for slower ones.
        """
        if self._positions.keys() != before._positions.keys():
            return "other parameters train"
        span, span_before = self._span, before._span
        if span.drifted(span_before, DRIFT):
            return f"backward takes {ms(span.value)} from the first gradient on, {ms(span_before.value)} before"
        for names, now in self._positions.items():
            then = before._positions[names]
            if now.differs(then, DRIFT):
                return f"{names[0]!r} is ready after {now.value:.0%} of backward, {then.value:.0%} before"
        if self.plan.strategy == before.plan.strategy:
            ratio, ratio_before = self._price_ratio(costs), before._price_ratio(costs)
            if ratio is not None and ratio_before is not None and ratio.drifted(ratio_before, DRIFT):
                return f"messages take {ratio.value / ratio_before.value:.2f} times what they took"
        return ""

    def _price_ratio(self, costs: Costs) -> Estimate | None:
        """Return the median of measured over expected times of messages, with a typical error; None without any."""
        ratios = [
            (measured.value / expected_us, measured.error / expected_us)
            for nbytes, measured in zip(self.message_nbytes, self.lane_us, strict=True)
            if (expected_us := costs.lane_us(nbytes, self.plan.strategy)) > 0 and measured.value > 0
        ]
        if not ratios:
            return None
        return Estimate(median(value for value, _ in ratios), median(error for _, error in ratios))


def _usual(step_us: Times) -> list[int]:
    """Return the places of the smallest majority of steps around the median length, in their order."""
    nearest = np.argsort(np.abs(step_us - np.median(step_us)), kind="stable")
    return sorted(nearest[: len(step_us) // 2 + 1].tolist())
