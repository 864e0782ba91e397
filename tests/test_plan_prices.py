# SPDX-License-Identifier: Apache-2.0
"""Price tables, and what cannot be one."""

from __future__ import annotations

import numpy as np
import pytest

from commopt import ConfigurationError
from commopt.cost import PriceTable
from commopt.schedule import Costs


def test_a_table_is_flat_before_straight_between_and_straight_after() -> None:
    table = PriceTable((100, 200, 400), (10.0, 30.0, 40.0))
    assert [table(nbytes) for nbytes in (0, 100, 150, 200, 300, 400, 600)] == [10, 10, 20, 30, 35, 40, 50]
    assert PriceTable((100, 200), (30.0, 10.0))(1000) == 10  # never falls beyond the last point
    assert PriceTable((100,), (30.0,))(1000) == 30


def test_tabulating_a_straight_line_is_exact_and_a_bend_is_close() -> None:
    table = PriceTable.of(lambda nbytes: 50 + 0.01 * nbytes, 10**8)
    sizes = np.array([1, 100, 5000, 123_456, 10**8, 3 * 10**8])
    assert table.times_us(sizes) == pytest.approx(50 + 0.01 * sizes)
    bent = PriceTable.of(lambda nbytes: max(100.0, 0.01 * nbytes), 10**8)
    sizes = np.unique(np.geomspace(1, 10**8, 1000).astype(int))
    assert bent.times_us(sizes) == pytest.approx(np.maximum(100.0, 0.01 * sizes), rel=0.05)
    assert PriceTable.of(float, 3).nbytes == (1, 3)


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
    with pytest.raises(ConfigurationError, match="overhead_us is -1"):
        Costs({"flat": table}, overhead_us=-1)
