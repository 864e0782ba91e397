"""The buckets that commopt's planner makes of a simulated model, by the plan that training uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commopt.schedule import SPARE, Costs, PriceTable, Unit, best_plan
from commopt.simulate.buckets import Bucket


def planned_buckets(units: Sequence[Unit], prices: Mapping[str, PriceTable], overhead_us: float) -> tuple[Bucket, ...]:
    """Return the buckets of the best plan, as an adaptive hook would have them once its prices are right."""
    plan = best_plan(units, Costs(prices, overhead_us), spare=SPARE)
    home = {name: unit for unit in units for name in unit.names}
    members = ([home[name] for name in group] for group in plan.groups)
    return tuple(Bucket.of(each, plan.strategy) for each in members)
