# SPDX-License-Identifier: Apache-2.0
"""Prices corrected by what was observed: a factor and an overhead, and neither absurd for the sake of the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt.cost import PriceTable
from commopt.schedule import Costs
from commopt.schedule.measurement import Estimate

TRUE = PriceTable((0, 10**9), (100.0, 100.0 + 10**6))
SIZES = [10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7, 10**8]
ALIKE = [10**6, 11 * 10**5, 12 * 10**5, 15 * 10**5]


def observed(
    strategy: str, factor: float, overhead_us: float = 0.0, sizes: list[int] = SIZES, noise: float = 0.0, seed: int = 0
) -> tuple[str, list[int], list[Estimate]]:
    rng = np.random.default_rng(seed)
    times = [(factor * TRUE(size) + overhead_us) * float(np.exp(noise * rng.standard_normal())) for size in sizes]
    return strategy, sizes, [Estimate(time_us) for time_us in times]


def calibrated(*strategies: str, overhead_us: float = 0.0) -> Costs:
    return Costs(dict.fromkeys(strategies, TRUE), overhead_us)


@settings(deadline=None, max_examples=60)
@given(
    factor=st.floats(0.3, 3.5),
    overhead_us=st.floats(0, 5000),
    wild=st.lists(st.tuples(st.integers(0, 20), st.floats(0.001, 1000)), max_size=3),
)
def test_both_terms_are_found_whatever_a_few_wild_messages_say(
    factor: float, overhead_us: float, wild: list[tuple[int, float]]
) -> None:
    strategy, sizes, lane_us = observed("flat", factor, overhead_us, SIZES * 3)
    for place, times in wild:
        lane_us[place] = Estimate(times * lane_us[place].value)
    costs = calibrated("flat")
    costs = costs.learned(strategy, sizes, lane_us)
    for size in (10**4, 10**6, 10**8):
        assert costs.lane_us(size, "flat") == pytest.approx(factor * TRUE(size) + overhead_us, rel=0.02)


def test_two_large_messages_of_one_plan_and_small_ones_of_the_next() -> None:
    costs = calibrated("flat")
    costs = costs.learned(*observed("flat", 1.1, 3500.0, [2 * 10**7, 35 * 10**6]))
    factor, overhead_us = costs.correction("flat")
    assert overhead_us == 0.0  # too much alike
    assert factor == pytest.approx(1.24, abs=0.05)
    costs = costs.learned(*observed("flat", 1.1, 3500.0, [56 * 10**5] * 24))
    assert costs.correction("flat") == pytest.approx((1.1, 3500.0), rel=1e-3)
    # A third plan, all of one size: the overhead is still known, and now counts.
    for _ in range(5):
        costs = costs.learned(*observed("flat", 1.15, 3500.0, ALIKE))
    assert costs.correction("flat") == pytest.approx((1.15, 3500.0), rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_a_factor_alone_does_where_sizes_are_alike(seed: int) -> None:
    costs = calibrated("flat", overhead_us=80.0)
    assert costs.lane_us(10**6, "flat") == pytest.approx(1100 + 80)
    costs = costs.learned(*observed("flat", 1.5, 80.0, ALIKE, noise=0.05, seed=seed))
    assert costs.correction("flat") == pytest.approx((1.5, 80.0), rel=0.1)


@pytest.mark.parametrize(("factor", "taken"), [(100.0, 4.0), (0.001, 0.25)])
@pytest.mark.parametrize("sizes", [SIZES, ALIKE])
def test_factors_are_limited(factor: float, taken: float, sizes: list[int]) -> None:
    costs = calibrated("flat")
    costs = costs.learned(*observed("flat", factor, sizes=sizes))
    assert costs.correction("flat") == (taken, 0.0)


def test_what_slows_one_strategy_slows_those_not_seen() -> None:
    costs = calibrated("flat", "tree")
    costs = costs.learned(*observed("flat", 2.0))
    assert costs.correction("tree") == pytest.approx((2.0, 0.0), abs=1e-6)
    costs = costs.learned(*observed("flat", 2.0, 300.0))
    costs = costs.learned(*observed("tree", 1.0))  # that was a guess; that it was wrong is no news of flat
    assert costs.correction("tree") == pytest.approx((1.0, 0.0), abs=1e-6)
    assert costs.correction("flat") == pytest.approx((2.0, 300.0))


def test_what_every_message_seems_to_wait_for_is_not_charged_to_those_of_others() -> None:
    """As when the first message of a step was late on one rank: all together took what they should."""
    price = PriceTable((0, 1_000_000), (0.0, 1_000_000.0))
    costs = Costs({"flat": price, "short": PriceTable((0, 1_000_000), (0.0, 50_000.0))})
    costs = costs.learned("flat", [80_000, 1_100_000], [Estimate(230_000.0), Estimate(1_000_000.0)])
    _, overhead_us = costs.correction("flat")
    assert overhead_us > 100_000, "one step does not tell it from an overhead"
    assert costs.lane_us(1_000_000, "short") == pytest.approx(50_000, rel=0.1)


def test_messages_that_cost_nothing_teach_nothing() -> None:
    costs = Costs({"flat": PriceTable((0, 100), (0.0, 100.0))})
    costs = costs.learned("flat", [0, 50], [Estimate(5.0), Estimate(0.0)])
    assert costs.correction("flat") == (1.0, 0.0)
