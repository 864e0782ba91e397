# SPDX-License-Identifier: Apache-2.0
"""What the rounds of a LocalSGD make of a step: parameters leave before a forward, on the lane of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from commopt.aggregate import LocalSGD
from commopt.feedback.parameter_buckets import BUCKET_NBYTES
from commopt.schedule.candidates import INSIDE
from commopt.schedule.decision import Tried
from commopt.schedule.learning import Learned
from commopt.schedule.prices import Costs
from commopt.schedule.window import Window


def mean_step_us(
    average: LocalSGD,
    fragments_us: Sequence[float],
    ready_us: Sequence[float],
    lane_us: Sequence[float],
    compute_us: float,
    optimizer_us: float = 0.0,
) -> float:
    """Return what a step takes, from one reduction to the next: the mean over a period, after a period.

    fragments_us: for how long the exchange of each fragment keeps the lane. ready_us, lane_us: when each bucket of
    gradients is ready, from the beginning of a step, and for how long it keeps the lane. compute_us: when the last
    gradient is ready. optimizer_us: when the forward begins, before which fragments leave and are waited for.
    """
    first = average.start_step + average.period
    begin_us = free_us = measured_from_us = 0.0
    arrives_us: dict[int, float] = {}
    for steps in range(first, first + 2 * average.period):
        if steps == first + average.period:
            measured_from_us = begin_us
        forward_us = begin_us + optimizer_us
        for fragment in average.due(steps):
            free_us = arrives_us[fragment] = max(free_us, forward_us) + fragments_us[fragment]
        lands_us = [arrives_us.pop(each, 0.0) for each in average.due(steps - average.delay)]
        begin_us += max(0.0, max(lands_us, default=0.0) - forward_us)
        end_us = begin_us + compute_us
        for ready, takes in zip(ready_us, lane_us, strict=True):
            free_us = max(free_us, begin_us + ready) + takes
            end_us = max(end_us, free_us)
        begin_us = end_us
    return (begin_us - measured_from_us) / average.period


def largest_sum(average: LocalSGD, fragments: Sequence[int]) -> int:
    """Return the most that leaves in one step, of what is given for each fragment."""
    first = average.start_step + average.period
    return max(sum(fragments[each] for each in average.due(steps)) for steps in range(first, first + average.period))


def expected(average: LocalSGD, learned: Learned, steps: float, window: Window, costs: Costs) -> Tried:
    """Return what a LocalSGD should take under the conditions of a window, with its messages; fragments of one size."""
    home = {name: unit for unit in window.units for name in unit.names}
    groups = [list({home[name].names: home[name] for name in group}.values()) for group in window.plan.groups]
    nbytes = [sum(unit.nbytes for unit in group) for group in groups]
    ready_us = [max(unit.ready_us for unit in group) for group in groups]
    parcels = ceil(sum(nbytes) / average.fragments / BUCKET_NBYTES)
    parcel_us = costs.lane_us(sum(nbytes) // (average.fragments * parcels), repr(average.parameters))
    fragments_us = [parcels * parcel_us] * average.fragments
    lane_us = [costs.lane_us(each, repr(INSIDE)) for each in nbytes]
    then_us = mean_step_us(average, fragments_us, ready_us, lane_us, max(ready_us))
    saved_us = window.predicted(costs).finish_us - then_us
    step_us, exposed_us = (max(0.0, each.value - saved_us) for each in (window.step, window.exposed))
    return Tried(learned.measured, repr(average), 0.0, step_us, exposed_us, steps=steps)
