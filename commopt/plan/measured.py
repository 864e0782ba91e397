"""A plan as it did in a window of measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace

from commopt.plan.conditions import Conditions
from commopt.plan.evidence import Estimate
from commopt.plan.plan import Plan, Prediction, Unit
from commopt.plan.prices import Costs
from commopt.plan.schedule import simulate
from commopt.plan.window import Window


@dataclass(frozen=True)
class Measured:
    """What ran, and what its steps took; the window must have one."""

    plan: Plan
    units: tuple[Unit, ...]
    step: Estimate
    exposed: Estimate
    conditions: Conditions

    @classmethod
    def of(cls, window: Window, current: Plan | None) -> Measured:
        """Take it from a window in which `current` should have run: or what DDP's buckets made of it."""
        found = Plan(window.buckets, origin="found")
        plan = current if current is not None and current.contents == found.contents else found
        return cls(plan, window.units, window.step, window.exposed, Conditions.of(window))

    def pooled(self, earlier: Measured) -> Measured:
        """Return what this and an earlier window of the same plan tell together, in the conditions of this one."""
        return replace(self, step=earlier.step.pooled(self.step), exposed=earlier.exposed.pooled(self.exposed))

    def expected(self, costs: Costs) -> Prediction:
        """Return what is expected of the plan, in these conditions, with all that is known of costs now."""
        return simulate(self.units, self.plan.buckets, costs, self.plan.order)
