"""Simulated lanes, and the order in which buckets are launched."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt import ConfigurationError
from commopt.plan import (
    Bucket,
    Costs,
    PriceTable,
    Unit,
    best_plan,
    first_needed_first,
    prioritized,
    simulate,
)

COSTS = Costs({("flat", 1): PriceTable((0, 1000), (10.0, 1010.0))}, overhead_us=5.0, pack_us_per_byte=0.5)


def units_of(*rows: tuple[int, float]) -> list[Unit]:
    return [Unit((f"p{place}",), nbytes, ready, "float32") for place, (nbytes, ready) in enumerate(rows)]


def test_a_step_by_hand() -> None:
    units = units_of((100, 50.0), (20, 60.0), (20, 500.0))
    buckets = [Bucket.of(units[:2], "flat"), Bucket.of(units[2:], "flat")]
    prediction = simulate(units, buckets, COSTS)
    # 5 + 10 + 120 + 60 for packing, from 60 on; then 5 + 10 + 20 from 500 on.
    assert prediction.bucket_finish_us == (255.0, 535.0)
    assert (prediction.compute_us, prediction.finish_us, prediction.exposed_us) == (500.0, 535.0, 35.0)
    assert prediction.communication_us == 195.0 + 35.0
    assert simulate(units, buckets, COSTS, order=(1, 0)).bucket_finish_us == (730.0, 535.0)


def test_buckets_may_cut_units_and_must_be_of_known_parameters() -> None:
    unit = Unit(("a", "b"), 100, 70.0, "float32")
    assert simulate([unit], [Bucket(("a",), 40, "flat")], COSTS).finish_us == 70.0 + 5 + 10 + 40
    with pytest.raises(ConfigurationError, match="'c' is in a bucket but in no unit"):
        simulate([unit], [Bucket(("c",), 40, "flat")], COSTS)


def finishes(ready: list[float], lane: list[float], order: tuple[int, ...]) -> list[float]:
    free, finish = 0.0, [0.0] * len(order)
    for place in order:
        finish[place] = free = max(free, ready[place]) + lane[place]
    return finish


rows_of_buckets = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 60)), min_size=1, max_size=7)


@given(rows=rows_of_buckets, sort=st.booleans())
@settings(deadline=None)
def test_no_order_ends_earlier_and_the_lane_never_waits(rows: list[tuple[int, int]], sort: bool) -> None:
    """Whole numbers, so that sums are exact."""
    rows = sorted(rows) if sort else rows
    ready, lane = [float(at) for at, _ in rows], [float(time) for _, time in rows]
    order = first_needed_first(ready, lane)
    assert sorted(order) == list(range(len(rows)))
    end = max(finishes(ready, lane, order))
    assert end <= max(finishes(ready, lane, tuple(range(len(rows)))))  # FIFO
    if len(rows) <= 5:
        assert end == min(max(finishes(ready, lane, other)) for other in permutations(range(len(rows))))
    free = 0.0
    for place, bucket in enumerate(order):
        begin = max(free, ready[bucket])
        rest = order[place:]
        assert begin == max(free, min(ready[other] for other in rest))
        assert bucket == max(other for other in rest if ready[other] <= begin)
        free = begin + lane[bucket]


def test_the_first_needed_go_before_those_that_wait() -> None:
    # While bucket 0 is sent the others become ready; the forward needs the last of them first.
    assert first_needed_first([0.0, 1.0, 2.0, 90.0], [10.0, 5.0, 5.0, 5.0]) == (0, 2, 1, 3)
    assert first_needed_first([3.0, 3.0, 3.0], [1.0, 1.0, 1.0]) == (2, 1, 0)
    units = units_of(*((100, 10.0 * place) for place in range(6)))
    plan = best_plan(units, COSTS, max_bytes=100)
    ordered = prioritized(plan, units, COSTS)
    assert ordered.order == (0, 5, 4, 3, 2, 1)
    assert ordered.buckets == plan.buckets
    assert plan.predicted is not None
    assert ordered.predicted is not None
    assert ordered.predicted.finish_us == pytest.approx(plan.predicted.finish_us)
    needed = ordered.predicted.bucket_finish_us[-1], plan.predicted.bucket_finish_us[-1]
    assert needed[0] < needed[1]
