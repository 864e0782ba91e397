# SPDX-License-Identifier: Apache-2.0
"""The planner against every partition there is, and against the clock."""

from __future__ import annotations

from itertools import accumulate
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt import ConfigurationError
from commopt.cost import PriceTable
from commopt.schedule import SPARE, Costs, Plan, Unit, best_plan, simulate
from tests.plan_cases import cost_models, finish_of, partitions, unit_lists

# Of this process alone, whatever else is going on. Measured: 0.06-0.25 s.
MOST_SECONDS = 1.5


def ends_of(plan: Plan, units: list[Unit]) -> tuple[int, ...]:
    """Check that a plan holds all units in their order; return where its groups end."""
    assert plan.names == tuple(name for unit in units for name in unit.names)
    return tuple(accumulate(map(len, plan.groups)))


def close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(1.0, abs(other))


@settings(deadline=None, max_examples=100)
@given(
    units=unit_lists(),
    costs=cost_models(),
    max_bytes=st.one_of(st.none(), st.integers(1, 300)),
    spare=st.sampled_from([0.0, 0.01, 0.1, 0.5, 3.0]),
)
def test_the_first_of_all_partitions_that_need_fewest_buckets(
    units: list[Unit], costs: Costs, max_bytes: int | None, spare: float
) -> None:
    plan = best_plan(units, costs, max_bytes, spare)
    ends = ends_of(plan, units)
    choices = list(partitions(units, max_bytes))
    best = min(finish_of(units, choice, costs, strategy) for choice in choices for strategy in costs.prices)
    finish = {choice: finish_of(units, choice, costs, plan.strategy) for choice in choices}
    assert close(min(finish.values()), best)
    latest = (1 + spare) * best
    assert finish[ends] <= latest + 1e-9 * max(1.0, latest)
    assert len(ends) <= min(len(choice) for choice, time in finish.items() if time <= latest)
    assert close(finish[ends], min(time for choice, time in finish.items() if len(choice) <= len(ends)))
    assert plan.predicted is not None
    assert close(plan.predicted.finish_us, max(finish[ends], max(unit.ready_us for unit in units)))


def line(alpha_us: float, us_per_byte: float) -> PriceTable:
    return PriceTable((0, 10**6), (alpha_us, alpha_us + us_per_byte * 10**6))


def test_without_latency_one_bucket_less_is_one_bucket_less() -> None:
    units = [Unit((f"p{number}",), 10, 0.0, "float32") for number in range(4)]
    assert ends_of(best_plan(units, Costs({"flat": line(0.0, 1.0)})), units) == (4,)
    # The last gradient is late, and the lane has long been idle: where to cut the ones before makes no difference.
    late = [*units, Unit(("late",), 10, 500.0, "float32")]
    assert ends_of(best_plan(late, Costs({"flat": line(1.0, 1.0)})), late) == (4, 5)


def test_a_bucket_has_one_dtype_and_respects_the_cap() -> None:
    dtypes = ["float32", "float32", "float16", "float16", "float32"]
    units = [Unit((f"p{number}",), 100, 0.0, dtype) for number, dtype in enumerate(dtypes)]
    costs = Costs({"flat": line(50.0, 0.1)})
    assert ends_of(best_plan(units, costs), units) == (2, 4, 5)
    units = [Unit((f"p{number}",), nbytes, 0.0, "float32") for number, nbytes in enumerate([100, 100, 900, 0, 100])]
    assert ends_of(best_plan(units, costs, max_bytes=250), units) == (2, 3, 5)


def test_the_strategy_that_finishes_first_is_taken_for_all_and_of_equal_ones_the_first_named() -> None:
    units = [Unit(("large",), 10_000, 0.0, "float32"), Unit(("small",), 10, 1e6, "float32")]
    costs = Costs({"flat": line(50.0, 0.5), "hierarchical": line(10.0, 1.0)})
    assert best_plan(units, costs).strategy == "hierarchical"  # what counts is the last message
    for names in (("a", "b"), ("b", "a")):
        assert best_plan(units, Costs(dict.fromkeys(names, line(1.0, 1.0)))).strategy == names[0]


def test_bad_input() -> None:
    costs = Costs({"flat": line(1.0, 1.0)})
    with pytest.raises(ConfigurationError, match="no units"):
        best_plan([], costs)
    with pytest.raises(ConfigurationError, match="max_bytes is 0; it must be a whole number >= 1"):
        best_plan([Unit(("p",), 1, 0.0, "float32")], costs, max_bytes=0)
    with pytest.raises(ConfigurationError, match=r"spare is -0\.1; it must be a finite number >= 0"):
        best_plan([Unit(("p",), 1, 0.0, "float32")], costs, spare=-0.1)


def large_problem(profile: str) -> list[Unit]:
    rng = np.random.default_rng(7)
    gap_us = {"hidden": 3000.0, "balanced": 300.0, "exposed": 3.0, "tied": 400.0}[profile]
    sizes = (rng.lognormal(11.0, 2.0, 2000).astype(int) * 4 + 4).tolist()
    if profile == "tied":
        return [Unit((f"p{number}",), 400_000, number * gap_us, "float32") for number in range(2000)]
    ready = np.cumsum(rng.exponential(gap_us, 2000)).tolist()
    return [Unit((f"p{number}",), sizes[number], ready[number], "float32") for number in range(2000)]


@pytest.mark.parametrize("profile", ["hidden", "balanced", "exposed", "tied"])
def test_two_thousand_units_take_a_moment(profile: str) -> None:
    lines = {"flat": (200.0, 8e-4), "hierarchical": (400.0, 5e-4), "quantized": (700.0, 3e-4)}
    costs = Costs({name: PriceTable.of(lambda n, of=of: of[0] + of[1] * n, 4 * 10**9) for name, of in lines.items()})  # type: ignore[misc]
    if profile == "tied":  # no latency, and messages just as fast as backward
        costs = Costs({"flat": PriceTable((0, 10**9), (0.0, 10**6))})
    units = large_problem(profile)
    begun = process_time()
    plan = best_plan(units, costs, max_bytes=100 * 2**20, spare=SPARE)
    assert process_time() - begun < MOST_SECONDS
    assert plan.predicted == simulate(units, plan.groups, plan.strategy, costs)
