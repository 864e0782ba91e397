# SPDX-License-Identifier: Apache-2.0
"""Windows: means over usual steps of the times of the last rank, and what counts as a difference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from commopt.cost import PriceTable
from commopt.schedule import Costs, Measurement, Plan, Unit
from commopt.schedule.measure import StepTable
from commopt.schedule.measurement import Estimate

NAN = float("nan")
UNITS = [Unit((name,), 100, 0.0, "float32") for name in "abcd"]
PLAN = Plan((("a", "b"), ("c", "d")), "flat")
COSTS = Costs({"flat": PriceTable((0, 200), (0.0, 40.0))})


def window_of(rows: list[tuple[float, float, list[float], list[float], list[float]]]) -> Measurement:
    begin, compute_end, ready, started, finished = (np.array(column) for column in zip(*rows, strict=True))
    return Measurement.of(PLAN, UNITS, StepTable(begin, compute_end, started, finished, ready))


def row(begin: float, *, stretch: float = 1.0, transfer: float = 30.0):
    ready = [begin + stretch * at for at in (10.0, 20.0, 60.0, 80.0)]
    started = [begin + stretch * 25.0, begin + stretch * 80.0]
    return begin, begin + stretch * 90.0, ready, started, [time + transfer for time in started]


def test_times_are_relative_to_the_step_and_means_over_usual_steps() -> None:
    window = window_of([row(1000.0), row(2000.0, transfer=31.0), row(5000.0, stretch=7.0, transfer=500.0)])
    assert [unit.ready_us for unit in window.units] == [10.0, 20.0, 60.0, 80.0]
    assert window.step_us == (110.0, 111.0, 1060.0)
    assert window.exposed_us == (20.0, 21.0, 430.0)
    assert window.step.value == 111.0
    assert [took.value for took in window.lane_us] == [30.5, 30.5]  # of two of the three steps
    assert window.exposed.value == 20.5
    assert window.lane_us[0].error == pytest.approx(1.858 / 3**0.5, rel=1e-3)  # MAD 1 of 3
    assert window.message_nbytes == (200, 200)


@pytest.mark.parametrize("steps", [3, 5, 6, 10])
def test_wild_steps_move_nothing_while_they_are_fewer_than_half(steps: int) -> None:
    wild = (steps - 1) // 2
    rows = [row(1e4 * step, stretch=9.0, transfer=700.0) for step in range(wild)]
    window = window_of([*rows, *(row(1e6 + 1e4 * step) for step in range(steps - wild))])
    assert [unit.ready_us for unit in window.units] == [10.0, 20.0, 60.0, 80.0]
    assert [took.value for took in window.lane_us] == [30.0, 30.0]
    assert window.exposed.value == 20.0


def test_messages_late_now_and_then_add_up_to_a_step() -> None:
    """One of ten messages is late in every step, each time another one: a median would know nothing of it."""
    units = [Unit((f"p{number}",), 100, 0.0, "float32") for number in range(10)]
    plan = Plan(tuple(unit.names for unit in units), "flat")
    begin = 1000.0 * np.arange(10, dtype=np.float64)
    finished = begin[:, None] + np.cumsum(10.0 + 50.0 * np.eye(10), axis=1)
    started = np.hstack([begin[:, None], finished[:, :-1]])
    ready = np.repeat(begin[:, None], 10, axis=1)
    window = Measurement.of(plan, units, StepTable(begin, begin, started, finished, ready))
    assert sum(lane.value for lane in window.lane_us) == pytest.approx(window.step.value) == 150.0
    assert window.exposed.value == pytest.approx(150.0)
    assert all(lane.error > 5.0 for lane in window.lane_us if lane.value > 10.0)


def test_a_step_that_was_not_measured_does_not_count() -> None:
    bad = row(2000.0)
    lost = [row(1000.0), (NAN, *bad[1:]), (*bad[:3], [NAN, 2000.0], bad[4])]
    assert window_of(lost).step_us == (110.0,)
    assert window_of(lost[1:]).step_us == ()


def test_estimates() -> None:
    normal = np.random.default_rng(3).normal(100.0, 10.0, (400, 10))
    medians = [Estimate.of(values.tolist()) for values in normal]
    spread = float(np.std([estimate.value for estimate in medians]))
    assert float(np.median([estimate.error for estimate in medians])) == pytest.approx(spread, rel=0.25)
    assert Estimate.of([1.0, 1.0, 1.0, NAN, 900.0]) == Estimate(1.0, 0.0)
    assert Estimate.mean_of([1.0, 3.0, NAN, 900.0], [0, 1, 2]).value == 2.0
    assert Estimate.mean_of([1.0, 1.0, 1.0, 5.0], [0, 1, 2, 3]) == Estimate(2.0, 1.0)  # no deviation but the wild one
    assert Estimate.mean_of([NAN, 7.0], [0]) == Estimate(7.0)


def test_the_error_of_a_mean_of_usual_steps_is_not_too_small() -> None:
    """Where all times of a step move together, usual steps are more alike than two windows are."""
    rng = np.random.default_rng(4)
    windows = [
        window_of([row(1e4 * step, stretch=at) for step, at in enumerate(1 + 0.1 * rng.standard_normal(10))])
        for _ in range(200)
    ]
    spread = float(np.std([window.units[-1].ready_us for window in windows]))
    errors = [window.ready_error_us[-1] for window in windows]
    assert 0.8 * spread < float(np.median(errors)) < 1.6 * spread


def test_what_estimates_say_of_each_other() -> None:
    assert Estimate(103.0, 0.1).differs(Estimate(100.0, 0.1), 2.0)
    assert not Estimate(103.0, 1.0).differs(Estimate(100.0, 0.1), 2.0)  # noise
    assert not Estimate(101.9).differs(Estimate(100.0), 2.0)
    assert Estimate(90.0).differs(Estimate(100.0), 2.0)
    assert Estimate(116.0).drifted(Estimate(100.0), 0.15)
    assert Estimate(100.0).drifted(Estimate(116.0), 0.15)
    assert not Estimate(114.0).drifted(Estimate(100.0), 0.15)


def test_drift_is_named() -> None:
    def conditions(**changes: float) -> Measurement:
        return window_of([row(1000.0 * step, **changes) for step in range(5)])

    before = conditions()
    assert conditions().drift_from(before, COSTS) == ""
    assert conditions(stretch=1.14, transfer=33.0).drift_from(before, COSTS) == ""
    assert "backward takes 0.112 ms from the first gradient on, 0.07 ms before" in conditions(stretch=1.6).drift_from(
        before, COSTS
    )
    assert conditions(transfer=60.0).drift_from(before, COSTS) == "messages take 2.00 times what they took"
    rows = [row(1000.0 * step) for step in range(5)]
    for entry in rows:
        entry[2][1] += 30.0
    moved = window_of(rows)
    assert moved.drift_from(before, COSTS) == "'b' is ready after 57% of backward, 14% before"
    others = Measurement(PLAN, tuple(UNITS[:2]), (0.0, 0.0), (1.0,), (1.0,), (), ())
    assert others.drift_from(before, COSTS) == "other parameters train"


def test_other_messages_are_no_drift_when_their_costs_are_known() -> None:
    """40 us for 200 bytes and 20 us for 100, and 10 us of overhead that was not known at first."""
    first = window_of([row(1000.0 * step, transfer=50.0) for step in range(5)])
    sizes = (100, 100, 200)
    lane_us = tuple(Estimate(nbytes / 5 + 10.0) for nbytes in sizes)
    before, after = first, replace(first, message_nbytes=sizes, lane_us=lane_us)
    assert after.drift_from(before, COSTS) != ""
    assert after.drift_from(before, replace(COSTS, overhead_us=10.0)) == ""
