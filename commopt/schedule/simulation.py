# SPDX-License-Identifier: Apache-2.0
"""A lane, simulated: it carries the messages of a step one after the other, in a fixed order.

Plans, local SGD and `commopt simulate` all use this one model of it, `finish_times_us`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commopt.aggregate import LocalSGD
from commopt.errors import ConfigurationError
from commopt.schedule.plan import Prediction, Unit

if TYPE_CHECKING:
    from commopt.schedule.costs import Costs

INSIDE = LocalSGD()
"""Stands for the averages of gradients inside the nodes, which are the same for every LocalSGD."""


def finish_times_us(ready_us: Sequence[float], lane_us: Sequence[float], free_us: float = 0.0) -> list[float]:
    """Return when each message is done: it begins when it is ready and the message before it is done.

    ready_us: when each message could begin, in the order of the lane.
    lane_us: for how long each keeps the lane busy.
    free_us: when the lane is free for the first one.
    """
    finished_us = []
    for ready, takes in zip(ready_us, lane_us, strict=True):
        free_us = max(free_us, ready) + takes
        finished_us.append(free_us)
    return finished_us


def members_of(units: Sequence[Unit], groups: Sequence[Sequence[str]]) -> list[list[Unit]]:
    """Return the units of each group. Raises ConfigurationError for a name that is in no unit."""
    home = {name: unit for unit in units for name in unit.names}
    for group in groups:
        for name in group:
            if name not in home:
                raise ConfigurationError(f"simulate: {name!r} is in a group but in no unit; give the units of all")
    return [list({home[name].names: home[name] for name in group}.values()) for group in groups]


def simulate(units: Sequence[Unit], groups: Sequence[Sequence[str]], strategy: str, costs: Costs) -> Prediction:
    """Predict a step that sends `groups` of whole units, one message each."""
    members = members_of(units, groups)
    ready_us = [max(unit.ready_us for unit in group) for group in members]
    lane_us = [costs.lane_us(sum(unit.nbytes for unit in group), strategy) for group in members]
    finished_us = finish_times_us(ready_us, lane_us)
    compute_us = max(unit.ready_us for unit in units)
    finish_us = max([compute_us, *finished_us])
    return Prediction(compute_us, finish_us, finish_us - compute_us, sum(lane_us), tuple(finished_us))


def mean_step_us(
    average: LocalSGD,
    fragments_us: Sequence[float],
    ready_us: Sequence[float],
    lane_us: Sequence[float],
    compute_us: float,
    optimizer_us: float = 0.0,
) -> float:
    """Return the mean time of a step with local SGD, over the second period: the first one fills the lane.

    A fragment leaves before a forward, on the lane of the gradients.

    fragments_us: for how long the exchange of each fragment keeps the lane busy.
    ready_us: when each bucket of gradients is ready, from the beginning of a step.
    lane_us: for how long each bucket keeps the lane busy.
    compute_us: when the last gradient is ready.
    optimizer_us: when the forward begins; fragments leave, and are waited for, just before.
    """
    first = average.start_step + average.period
    begin_us = free_us = measured_from_us = 0.0
    arrives_us: dict[int, float] = {}
    for steps in range(first, first + 2 * average.period):
        if steps == first + average.period:
            measured_from_us = begin_us
        forward_us = begin_us + optimizer_us
        due = average.due(steps)
        arrived_us = finish_times_us([forward_us] * len(due), [fragments_us[each] for each in due], free_us)
        arrives_us.update(zip(due, arrived_us, strict=True))
        awaited_us = [arrives_us.pop(each, 0.0) for each in average.due(steps - average.delay)]
        begin_us += max(0.0, max(awaited_us, default=0.0) - forward_us)
        free_us = max(arrived_us, default=free_us)
        reduced_us = finish_times_us([begin_us + ready for ready in ready_us], lane_us, free_us)
        free_us = max(reduced_us, default=free_us)
        begin_us = max([begin_us + compute_us, *reduced_us])
    return (begin_us - measured_from_us) / average.period


def largest_sum(average: LocalSGD, fragments: Sequence[int]) -> int:
    """Return the largest amount that leaves in one step. fragments: the amount of each fragment, in bytes say."""
    first = average.start_step + average.period
    return max(sum(fragments[each] for each in average.due(steps)) for steps in range(first, first + average.period))
