"""What some steps of a run measured, put together from all ranks, and whether two such windows differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from commopt.errors import ConfigurationError
from commopt.schedule.estimate import DRIFT, Estimate, ms
from commopt.schedule.plan import Plan, Prediction, Unit, simulate
from commopt.schedule.prices import Costs, Floats, Observed, observed_ratio


@dataclass(frozen=True)
class GradientQuality:
    """How well compressed updates follow the gradients, on the first rank.

    cosine: of updates and the dense mean, sampled; None before the first sample. residual_norm: L2, of all that is kept
    for later.
    """

    cosine: float | None
    residual_norm: float


@dataclass(frozen=True)
class Window:
    """Measurements of a few steps, as rank 0 gets them.

    plan: the messages that were run. movable: whether another plan may have other groups.
    units: in the order of backward, `ready_us` the mean over usual steps (see `of`); ready_error_us its error for each.
    step_us, exposed_us: of each step, on the slowest rank. observed: a message for each group of the plan.
    lateness_us: of each rank, how much later than on the first rank its backward ended.
    """

    plan: Plan
    units: tuple[Unit, ...]
    ready_error_us: tuple[float, ...]
    step_us: tuple[float, ...]
    exposed_us: tuple[float, ...]
    observed: tuple[Observed, ...]
    lateness_us: tuple[float, ...] = ()
    quality: GradientQuality | None = None
    movable: bool = True

    @classmethod
    def of(
        cls,
        plan: Plan,
        units: Sequence[Unit],
        begin_us: Floats,
        compute_end_us: Floats,
        ready_us: Floats,
        started_us: Floats,
        finished_us: Floats,
        lateness_us: Sequence[float] = (),
    ) -> Window:
        """Reduce times of the last rank, on one clock, to means over usual steps.

        The usual steps are the smallest majority around the median length, so that a few wild steps move nothing. Means
        over the same steps add up to a step; medians do not, where each message is late now and then.

        begin_us, compute_end_us: [steps]. ready_us: [steps, units]; the units' own ready_us does not count.
        started_us, finished_us: [steps, groups], in the order of the lane. A message could start, on a rank, when the
        one before it had finished there and its last gradient was ready; `started_us` is when it could on the last
        rank, whenever it did. Steps with a NaN in any of these are left out.
        """
        columns = [begin_us[:, None], compute_end_us[:, None], ready_us, started_us, finished_us]
        good = ~np.isnan(np.concatenate(columns, axis=1)).any(axis=1)
        begin, compute_end, end = begin_us[good], compute_end_us[good], finished_us[good].max(axis=1, initial=0.0)
        if not len(begin):
            return cls(plan, tuple(units), (0.0,) * len(units), (), (), (), tuple(lateness_us))
        usual = _usual(np.maximum(end, compute_end) - begin)
        ready = [Estimate.mean_of(column, usual) for column in (ready_us[good] - begin[:, None]).T.tolist()]
        lane_us = np.maximum(finished_us[good] - started_us[good], 0.0)
        lane = [Estimate.mean_of(column, usual) for column in lane_us.T.tolist()]
        home = {name: unit for unit in units for name in unit.names}
        members = [{home[name].names: home[name] for name in group}.values() for group in plan.groups]
        return cls(
            plan=plan,
            units=tuple(replace(unit, ready_us=max(0.0, at.value)) for unit, at in zip(units, ready, strict=True)),
            ready_error_us=tuple(at.error for at in ready),
            step_us=tuple((np.maximum(end, compute_end) - begin).tolist()),
            exposed_us=tuple(np.maximum(end - compute_end, 0.0).tolist()),
            observed=tuple(
                Observed(sum(unit.nbytes for unit in sent), plan.strategy, took)
                for sent, took in zip(members, lane, strict=True)
            ),
            lateness_us=tuple(lateness_us),
        )

    def __post_init__(self) -> None:
        if len(self.ready_error_us) != len(self.units) or len(self.exposed_us) != len(self.step_us):
            raise ConfigurationError(
                f"window: {len(self.units)} units with {len(self.ready_error_us)} errors, {len(self.step_us)} steps "
                f"with {len(self.exposed_us)} exposed times; give one for each"
            )

    @cached_property
    def step(self) -> Estimate:
        """Time of a step; there must be one."""
        return Estimate.of(self.step_us)

    @cached_property
    def exposed(self) -> Estimate:
        """What a usual step takes after its last gradient; there must be one."""
        return Estimate.mean_of(self.exposed_us, _usual(np.array(self.step_us)))

    def straggler(self, share: float) -> str:
        """Say which rank ends its backward later than the median rank by more than `share` of a step, or nothing."""
        if not self.lateness_us or not self.step_us:
            return ""
        rank = int(np.argmax(self.lateness_us))
        late_us = self.lateness_us[rank] - float(np.median(self.lateness_us))
        if late_us <= share * self.step.value:
            return ""
        return f"rank {rank} ends its backward {ms(late_us)} after the median rank, and the others wait for it"


def _usual(step_us: Floats) -> list[int]:
    """Return which steps are the smallest majority around the median length, in their order."""
    nearest = np.argsort(np.abs(step_us - np.median(step_us)), kind="stable")
    return sorted(nearest[: len(step_us) // 2 + 1].tolist())


@dataclass(frozen=True)
class Conditions:
    """When gradients are ready and what messages cost, as far as a plan depends on it.

    span_us: from the first unit to the last; what comes before changes no plan.
    positions: of each unit in that span, from 0 to 1. observed: the messages that ran, all by one strategy.
    """

    span_us: Estimate
    positions: Mapping[tuple[str, ...], Estimate]
    observed: tuple[Observed, ...]

    @classmethod
    def of(cls, window: Window) -> Conditions:
        """Extract them from a window with at least one step."""
        times = [unit.ready_us for unit in window.units]
        first, last = min(times), max(times)
        error = window.ready_error_us[times.index(last)]
        span_us = Estimate(last - first, error)
        width = span_us.value or 1.0
        positions = {
            unit.names: Estimate((unit.ready_us - first) / width, (error + own) / width)
            for unit, own in zip(window.units, window.ready_error_us, strict=True)
        }
        return cls(span_us, positions, window.observed)

    def drift_from(self, before: Conditions, costs: Costs) -> str:
        """Say what moved by more than 15 % and more than noise explains, or nothing.

        costs: what is known of messages now, so that others in size or number are not mistaken for slower ones.
        """
        if self.positions.keys() != before.positions.keys():
            return "other parameters train"
        if self.span_us.drifted(before.span_us, DRIFT):
            return (
                f"backward takes {ms(self.span_us.value)} from the first gradient on, {ms(before.span_us.value)} before"
            )
        for names, now in self.positions.items():
            then = before.positions[names]
            if now.differs(then, DRIFT):
                return f"{names[0]!r} is ready after {now.value:.0%} of backward, {then.value:.0%} before"
        if {each.strategy for each in self.observed} == {each.strategy for each in before.observed}:
            took, took_before = observed_ratio(self.observed, costs), observed_ratio(before.observed, costs)
            if took is not None and took_before is not None and took.drifted(took_before, DRIFT):
                return f"messages take {took.value / took_before.value:.2f} times what they took"
        return ""


@dataclass(frozen=True)
class Measured:
    """A plan as it did in a window of measurements."""

    plan: Plan
    units: tuple[Unit, ...]
    step: Estimate
    exposed: Estimate
    conditions: Conditions
    movable: bool = True

    @classmethod
    def of(cls, window: Window, current: Plan | None) -> Measured:
        """Take it from a window in which `current` should have run: or what DDP's buckets made of it."""
        plan = current if current is not None and current.contents == window.plan.contents else window.plan
        return cls(plan, window.units, window.step, window.exposed, Conditions.of(window), window.movable)

    def pooled(self, earlier: Measured) -> Measured:
        """Return what this and an earlier window of the same plan tell together, in the conditions of this one."""
        return replace(self, step=earlier.step.pooled(self.step), exposed=earlier.exposed.pooled(self.exposed))

    def expected(self, costs: Costs) -> Prediction:
        """Return what is expected of the plan, in these conditions, with all that is known of costs now."""
        return simulate(self.units, self.plan.groups, self.plan.strategy, costs)

    def expected_of(self, plan: Plan, costs: Costs) -> tuple[float, float]:
        """Return the step and its exposed part that are to be expected of another plan, in microseconds.

        They differ from those measured as the simulated steps do: what costs do not know about is the same in both.
        """
        then = simulate(self.units, plan.groups, plan.strategy, costs)
        saved_us = self.expected(costs).finish_us - then.finish_us
        return max(0.0, self.step.value - saved_us), max(0.0, self.exposed.value - saved_us)
