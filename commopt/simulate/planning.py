"""The buckets that commopt's planner makes of a simulated model, by the plan that training uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commopt.plan import Bucket, Costs, Key, PriceTable, Unit, best_plan
from commopt.plan.adapt import SPARE


def planned_buckets(units: Sequence[Unit], prices: Mapping[Key, PriceTable], overhead_us: float) -> tuple[Bucket, ...]:
    """Return the buckets of the best plan, as an adaptive hook would have them once its prices are right."""
    return best_plan(units, Costs(prices, overhead_us), spare=SPARE).buckets
