"""What given buckets take on one lane."""

from __future__ import annotations

from collections.abc import Sequence

from commopt.errors import ConfigurationError
from commopt.plan.plan import Bucket, Prediction, Unit
from commopt.plan.prices import Costs


def simulate(
    units: Sequence[Unit], buckets: Sequence[Bucket], costs: Costs, order: Sequence[int] | None = None
) -> Prediction:
    """Predict a step in which a lane takes these buckets one after the other, in their order or in `order`.

    A bucket starts when the lane is free and all its units are ready. The buckets need not hold whole units.
    """
    ready, lane = ready_and_lane_us(units, buckets, costs)
    finish, free_us = [0.0] * len(buckets), 0.0
    for place in range(len(buckets)) if order is None else order:
        finish[place] = free_us = max(free_us, ready[place]) + lane[place]
    compute_us = max(unit.ready_us for unit in units)
    return Prediction(
        compute_us=compute_us,
        finish_us=max(free_us, compute_us),
        exposed_us=max(0.0, free_us - compute_us),
        communication_us=sum(lane),
        bucket_finish_us=tuple(finish),
    )


def ready_and_lane_us(
    units: Sequence[Unit], buckets: Sequence[Bucket], costs: Costs
) -> tuple[list[float], list[float]]:
    """Return for every bucket when it is ready, and how long it keeps the lane busy."""
    home = {name: unit for unit in units for name in unit.names}
    ready, lane = [], []
    for bucket in buckets:
        unknown = [name for name in bucket.names if name not in home]
        if unknown:
            raise ConfigurationError(f"simulate: {unknown[0]!r} is in a bucket but in no unit; give the units of all")
        members = {home[name].names: home[name].ready_us for name in bucket.names}
        ready.append(max(members.values()))
        lane.append(costs.lane_us(bucket.nbytes, bucket.strategy, bucket.chunks, len(members)))
    return ready, lane
