"""What given buckets take on one lane, and which buckets DDP would make."""

from __future__ import annotations

from collections.abc import Sequence

from commopt.errors import ConfigurationError
from commopt.plan.document import require_whole
from commopt.plan.plan import Bucket, Prediction, Unit
from commopt.plan.prices import Costs

DDP_CAP_BYTES = 25 * 2**20
DDP_FIRST_CAP_BYTES = 2**20


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


def ddp_buckets(
    units: Sequence[Unit],
    strategy: str,
    cap_bytes: int = DDP_CAP_BYTES,
    first_cap_bytes: int = DDP_FIRST_CAP_BYTES,
) -> tuple[Bucket, ...]:
    """Return the buckets that DDP makes of units in the order in which they became ready.

    torch's rule (compute_bucket_assignment_by_size): of each dtype one bucket is open, closed when its bytes reach the
    cap, the first of a dtype at `first_cap_bytes` (1 MiB, unless bucket_cap_mb was given: then that).
    """
    require_whole(cap_bytes, 1, "cap_bytes")
    require_whole(first_cap_bytes, 1, "first_cap_bytes")
    open_units: dict[str, list[Unit]] = {}
    cap: dict[str, int] = {}
    closed = []
    for unit in units:
        members = open_units.setdefault(unit.dtype, [])
        members.append(unit)
        if sum(member.nbytes for member in members) >= cap.get(unit.dtype, first_cap_bytes):
            closed.append(open_units.pop(unit.dtype))
            cap[unit.dtype] = cap_bytes
    return tuple(Bucket.of(members, strategy) for members in [*closed, *open_units.values()])
