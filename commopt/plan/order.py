"""First needed, first sent: the buckets that the next forward reads first do not wait behind the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from commopt.plan.plan import Plan, Unit
from commopt.plan.prices import Costs
from commopt.plan.schedule import ready_and_lane_us, simulate


def first_needed_first(ready_us: Sequence[float], lane_us: Sequence[float]) -> tuple[int, ...]:
    """Return the launch order of buckets that stand in the order of backward.

    Whenever the lane is free it takes, of the buckets that are ready, the one that stands last: its parameters come
    first in the forward. If none is ready it takes the next that will be. All of it in the model: the ranks follow the
    order as it was computed, whatever becomes ready first.

    The last message ends no later than in any other order. Proof: the rule never leaves the lane idle while a bucket is
    ready. The lane is therefore busy from the first ready time until all that has become ready meanwhile is done,
    whichever came first; the work in such a busy period is the sum of its lane times, in any order of them. So the idle
    gaps, and the end, are those of every order that never idles, FIFO in the order of ready times being one. An order
    that does idle has by every moment done no more work, and ends no earlier. (Sums of floats in another order are
    equal up to rounding.)
    """
    by_ready = sorted(range(len(ready_us)), key=lambda place: (ready_us[place], -place))
    waiting: list[int] = []  # negated, so that the heap yields the last
    order: list[int] = []
    free_us, coming = 0.0, 0
    while len(order) < len(by_ready):
        if not waiting:
            free_us = max(free_us, ready_us[by_ready[coming]])
        while coming < len(by_ready) and ready_us[by_ready[coming]] <= free_us:
            heappush(waiting, -by_ready[coming])
            coming += 1
        order.append(-heappop(waiting))
        free_us += lane_us[order[-1]]
    return tuple(order)


def prioritized(plan: Plan, units: Sequence[Unit], costs: Costs) -> Plan:
    """Return the same buckets in the order of `first_needed_first`, with its prediction."""
    order = first_needed_first(*ready_and_lane_us(units, plan.buckets, costs))
    return replace(plan, order=order, predicted=simulate(units, plan.buckets, costs, order))
