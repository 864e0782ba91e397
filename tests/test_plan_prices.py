"""Price tables, and the cheapest strategy by size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from commopt import ConfigurationError
from commopt.plan import Costs, PriceTable
from commopt.plan.cheapest import Cheapest
from tests.plan_cases import cost_models


def test_a_table_is_flat_before_straight_between_and_straight_after() -> None:
    table = PriceTable((100, 200, 400), (10.0, 30.0, 40.0))
    assert [table(nbytes) for nbytes in (0, 100, 150, 200, 300, 400, 600)] == [10, 10, 20, 30, 35, 40, 50]
    assert PriceTable((100, 200), (30.0, 10.0))(1000) == 10  # never falls beyond the last point
    assert PriceTable((100,), (30.0,))(1000) == 30


def test_a_table_along_a_line() -> None:
    table = PriceTable((100, 200, 400), (10.0, 30.0, 40.0)).along(2.0, 5.0)
    assert [table(nbytes) for nbytes in (0, 100, 150, 400, 600)] == [25, 25, 45, 85, 105]


def test_tabulating_a_straight_line_is_exact_and_a_bend_is_close() -> None:
    table = PriceTable.of(lambda nbytes: 50 + 0.01 * nbytes, 10**8)
    sizes = np.array([1, 100, 5000, 123_456, 10**8, 3 * 10**8])
    assert table.times_us(sizes) == pytest.approx(50 + 0.01 * sizes)
    bent = PriceTable.of(lambda nbytes: max(100.0, 0.01 * nbytes), 10**8)
    sizes = np.unique(np.geomspace(1, 10**8, 1000).astype(int))
    assert bent.times_us(sizes) == pytest.approx(np.maximum(100.0, 0.01 * sizes), rel=0.05)
    assert PriceTable.of(float, 3).nbytes == (1, 3)


@settings(deadline=None, max_examples=60)
@given(costs=cost_models())
def test_the_cheapest_is_the_minimum_for_every_size(costs: Costs) -> None:
    cheapest = Cheapest(costs.prices)
    sizes = np.arange(600)
    times = cheapest.times_us(sizes)
    plain = np.min([table.times_us(sizes) for (_, chunks), table in costs.prices.items() if chunks == 1], axis=0)
    chunked = [table.times_us(sizes) for (_, chunks), table in costs.prices.items() if chunks > 1]
    best = np.min(chunked, axis=0) if chunked else np.full(600, np.inf)
    # At the very border of three percent rounding decides, and either is right.
    assert np.all((np.abs(times - plain) < 1e-9) | (np.abs(times - best) < 1e-9))
    assert np.all((np.abs(times - plain) < 1e-9) | (best <= 0.97 * plain * (1 + 1e-9)))
    assert np.all((np.abs(times - best) < 1e-9) | (best > 0.97 * plain * (1 - 1e-9)))
    for nbytes in (0, 7, 250, 599):
        assert costs.transfer_us(nbytes, *cheapest.key(nbytes)) == pytest.approx(times[nbytes], abs=1e-9)


def test_equal_prices_go_to_the_first_named() -> None:
    table = PriceTable((0, 100), (5.0, 10.0))
    for names in (("a", "b"), ("b", "a")):
        assert Cheapest({(name, 1): table for name in names}).key(50) == (names[0], 1)


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ((), (), "at least 1"),
        ((1, 2), (1.0,), "2 sizes and 1 times"),
        ((2, 2), (1.0, 1.0), "must increase"),
        ((-1,), (1.0,), "a size is -1"),
        ((1,), (float("inf"),), "the time of 1 bytes is inf"),
        ((1,), (-1.0,), "must be a finite number >= 0"),
    ],
)
def test_tables_that_cannot_be(sizes, times, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PriceTable(sizes, times)


def test_costs_that_cannot_be() -> None:
    table = PriceTable((1,), (1.0,))
    with pytest.raises(ConfigurationError, match="no prices"):
        Costs({})
    with pytest.raises(ConfigurationError, match=r"'flat' has a price for 2 chunks but none for 1; give \('flat', 1\)"):
        Costs({("flat", 2): table})
    with pytest.raises(ConfigurationError, match="overhead_us is -1"):
        Costs({("flat", 1): table}, overhead_us=-1)
