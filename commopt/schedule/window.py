# SPDX-License-Identifier: Apache-2.0
"""What some steps of a run measured, put together from all ranks, and whether two such windows differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from commopt.schedule.estimate import DRIFT, Estimate, ms
from commopt.schedule.measure import StepTimes
from commopt.schedule.plan import Plan, Prediction, Unit, simulate
from commopt.schedule.prices import Costs, Floats, Observed, observed_ratio


@dataclass(frozen=True)
class Window:
    """A plan as it did in a few steps, as rank 0 gets it.

    plan: the messages that were run. movable: whether another plan may have other groups.
    units: in the order of backward, `ready_us` the mean over usual steps (see `of`); ready_error_us its error for each.
    step_us, exposed_us: of each step, on the slowest rank. observed: a message for each group of the plan.
    earlier: another window of the same plan, which counts as much. steps_behind: as ExactSample has it.
    """

    plan: Plan
    units: tuple[Unit, ...]
    ready_error_us: tuple[float, ...]
    step_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    observed: tuple[Observed, ...]
    steps_behind: float | None = None
    movable: bool = True
    earlier: Window | None = None

    @classmethod
    def of(cls, plan: Plan, units: Sequence[Unit], times: StepTimes) -> Window:
        """Reduce times of the last rank to means over usual steps; the units' own ready_us does not count.

        The usual steps are the smallest majority around the median length, so that a few wild steps move nothing. Means
        over the same steps add up to a step; medians do not, where each message is late now and then. Steps with a NaN
        are left out.
        """
        table = times.table()
        good = StepTimes.of_table(table[~np.isnan(table).any(axis=1)], len(plan.groups))
        begin, compute_end, end = good.begin_us, good.compute_end_us, good.finished_us.max(axis=1, initial=0.0)
        if not len(begin):
            return cls(plan, tuple(units), (0.0,) * len(units), (), (), ())
        step_us = np.maximum(end, compute_end) - begin
        usual = _usual(step_us)
        ready = [Estimate.mean_of(column, usual) for column in (good.ready_us - begin[:, None]).T.tolist()]
        lane_us = np.maximum(good.finished_us - good.started_us, 0.0)
        lane = [Estimate.mean_of(column, usual) for column in lane_us.T.tolist()]
        home = {name: unit for unit in units for name in unit.names}
        members = [{home[name].names: home[name] for name in group}.values() for group in plan.groups]
        return cls(
            plan=plan,
            units=tuple(replace(unit, ready_us=max(0.0, at.value)) for unit, at in zip(units, ready, strict=True)),
            ready_error_us=tuple(at.error for at in ready),
            step_us=tuple(step_us.tolist()),
            exposed_us=tuple(np.maximum(end - compute_end, 0.0).tolist()),
            observed=tuple(
                Observed(sum(unit.nbytes for unit in sent), plan.strategy, took)
                for sent, took in zip(members, lane, strict=True)
            ),
        )

    @cached_property
    def step(self) -> Estimate:
        """Time of a step; there must be one."""
        own = Estimate.of(self.step_us)
        return own if self.earlier is None else self.earlier.step.pooled(own)

    @cached_property
    def exposed(self) -> Estimate:
        """What a usual step takes after its last gradient; there must be one."""
        own = Estimate.mean_of(self.exposed_us, _usual(np.array(self.step_us)))
        return own if self.earlier is None else self.earlier.exposed.pooled(own)

    def __str__(self) -> str:
        return f"{ms(self.step.value)}, {ms(self.exposed.value)} of it exposed"

    # --------------------------------------------------------------------------------- what it lets expect

    def predicted(self, costs: Costs) -> Prediction:
        """Return what is expected of the plan, in these conditions, with all that is known of costs now."""
        return simulate(self.units, self.plan.groups, self.plan.strategy, costs)

    def expected_of(self, plan: Plan, costs: Costs) -> tuple[float, float]:
        """Return the step and its exposed part that are to be expected of another plan, in microseconds.

        They differ from those measured as the simulated steps do: what costs do not know about is the same in both.
        """
        then = simulate(self.units, plan.groups, plan.strategy, costs)
        saved_us = self.predicted(costs).finish_us - then.finish_us
        return max(0.0, self.step.value - saved_us), max(0.0, self.exposed.value - saved_us)

    # --------------------------------------------------------------------------------- what it differs in

    @cached_property
    def _span(self) -> Estimate:
        """From the first unit to the last; what comes before changes no plan."""
        times = [unit.ready_us for unit in self.units]
        return Estimate(max(times) - min(times), self.ready_error_us[times.index(max(times))])

    @cached_property
    def _positions(self) -> Mapping[tuple[str, ...], Estimate]:
        """Of each unit in that span, from 0 to 1."""
        first, width = min(unit.ready_us for unit in self.units), self._span.value or 1.0
        return {
            unit.names: Estimate((unit.ready_us - first) / width, (self._span.error + own) / width)
            for unit, own in zip(self.units, self.ready_error_us, strict=True)
        }

    def drift_from(self, before: Window, costs: Costs) -> str:
        """Say what moved by more than 15 % and more than noise explains, or nothing.

        costs: what is known of messages now, so that others in size or number are not mistaken for slower ones.
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
        if {each.strategy for each in self.observed} == {each.strategy for each in before.observed}:
            took, took_before = observed_ratio(self.observed, costs), observed_ratio(before.observed, costs)
            if took is not None and took_before is not None and took.drifted(took_before, DRIFT):
                return f"messages take {took.value / took_before.value:.2f} times what they took"
        return ""


def _usual(step_us: Floats) -> list[int]:
    """Return which steps are the smallest majority around the median length, in their order."""
    nearest = np.argsort(np.abs(step_us - np.median(step_us)), kind="stable")
    return sorted(nearest[: len(step_us) // 2 + 1].tolist())
