# SPDX-License-Identifier: Apache-2.0
"""The probe: which sizes it measures in how much time, and who measures what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from commopt.compress import Cast, Quantize
from commopt.cost import WorkKey
from commopt.errors import ConfigurationError
from commopt.groups import Team, TeamShape
from commopt.probe import ProbeOptions
from commopt.probe.collectives import COLLECTIVES
from commopt.probe.operations import TimedWork, groups_of, known_compressors, work_of
from commopt.probe.timing import Measured, Repeats, repeats, sweep

WANTED = Repeats(5, 20)
MIB = 2**20

# ------------------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"min_nbytes": 8}, "--min-bytes 8 must be at least 64"),
        ({"min_nbytes": 4096, "max_nbytes": 1024}, "no more than --max-bytes 1024"),
        ({"max_nbytes": 2**34}, "pass 8G or less"),
        ({"factor": float("nan")}, "--factor nan must be between"),
        ({"budget_s": float("nan")}, "--budget nan must be a number of seconds above 0"),
        ({"parts": ("inter", "outer")}, "--only inter,outer must name some of sites, intra, inter, world, work"),
        ({"iterations": 2}, "needed for a median"),
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ProbeOptions(**wrong)


def test_messages_grow_by_the_factor() -> None:
    assert ProbeOptions(1024, 16384, 4).sizes() == (1024, 4096, 16384)
    assert ProbeOptions(1024, 16384, 4).sizes(5000) == (1024, 4096)
    assert len(ProbeOptions().sizes()) == 19
    assert ProbeOptions().sizes()[-1] == 256 * MIB


def test_messages_can_be_cut_for_all_ranks() -> None:
    options = ProbeOptions(100, 4096, 8)
    assert options.sizes_of(COLLECTIVES["all_reduce"], 3) == (100, 800)
    assert options.sizes_of(COLLECTIVES["reduce_scatter"], 3) == (108, 804)
    # Its result, a block from each rank, is what must not grow too large; and one size makes no curve.
    assert options.sizes_of(COLLECTIVES["all_gather"], 8) == (100, 200)
    assert {name for name, each in COLLECTIVES.items() if not each.closed} == {"reduce", "broadcast"}


def test_work_that_is_never_done_on_less_is_not_timed_on_less() -> None:
    job = TimedWork(WorkKey("copy"), lambda numel, device: lambda: None, least_nbytes=5000)
    assert job.sizes(ProbeOptions(1024, 2**15, 2)) == (8192, 16384, 32768)
    assert job.sizes(ProbeOptions(1024, 8192, 2)) == (5000, 10000)  # one size makes no curve


# ------------------------------------------------------------------------------ time


@pytest.mark.parametrize(
    ("predicted_us", "left_us", "expected"),
    [
        (1.0, 1e6, Repeats(5, 200)),  # short calls more often
        (1000.0, 1e6, Repeats(5, 30)),
        (1000.0, 136e3, Repeats(1, 30)),  # a warm-up less
        (1000.0, 80e3, Repeats(1, 19)),  # a quarter of what is left
        (1000.0, 17e3, Repeats(1, 3)),
        (1000.0, 5e3, Repeats(1, 3)),  # the last one may take all
        (1000.0, 3.9e3, None),
        (1000.0, -1.0, None),
    ],
)
def test_how_often_a_call_is_repeated(predicted_us: float, left_us: float, expected: Repeats | None) -> None:
    assert repeats(predicted_us, left_us, WANTED) == expected


class Link:
    """A link of one latency and bandwidth; `calls` are what was measured on it."""

    def __init__(self, alpha_us: float, bytes_per_us: float, disturbance: Callable[[int], float] = lambda _: 1) -> None:
        self.alpha_us, self.bytes_per_us, self.disturbance = alpha_us, bytes_per_us, disturbance
        self.calls: list[tuple[int, Repeats]] = []

    def measure(self, nbytes: int, often: Repeats) -> Measured:
        self.calls.append((nbytes, often))
        time_us = (self.alpha_us + nbytes / self.bytes_per_us) * self.disturbance(len(self.calls))
        return Measured(time_us, time_us * (often.warm_up + often.iterations))


@pytest.mark.parametrize(("bytes_per_us", "share_us"), [(1.0, 4e6), (25.0, 5e5), (1e3, 1e8)])
def test_a_sweep_keeps_to_its_time(bytes_per_us: float, share_us: float) -> None:
    link, sizes = Link(100.0, bytes_per_us), ProbeOptions().sizes()
    found = sweep(sizes, share_us, WANTED, link.measure)
    assert found.spent_us <= share_us
    assert [nbytes for nbytes, _ in found.points] + list(found.skipped) == list(sizes)
    assert all(often.iterations >= 3 and often.warm_up >= 1 for _, often in link.calls)
    assert all(time_us == link.alpha_us + nbytes / bytes_per_us for nbytes, time_us in found.points)
    if found.skipped:  # it stopped no earlier than it had to: four calls of the next would not have fitted
        assert 4 * found.skipped[0] / found.points[-1][0] * found.points[-1][1] > 0.85 * share_us - found.spent_us


def test_a_fast_link_is_measured_to_the_end_and_a_slow_one_has_a_curve() -> None:
    assert sweep(ProbeOptions().sizes(), 1e7, WANTED, Link(20.0, 1e5).measure).skipped == ()
    assert len(sweep(ProbeOptions().sizes(), 1.0, WANTED, Link(1e6, 1.0).measure).points) == 4


@pytest.mark.parametrize(
    ("disturbance", "measured"),
    [
        ({3: 2.0}, [1024, 1024, 2048, 4096, 2048]),  # longer than a larger one: in the end
        ({4: 30.0}, [1024, 1024, 2048, 4096, 4096]),  # far longer than predicted: at once, or the curve would end here
        ({}, [1024, 1024, 2048, 4096]),
    ],
)
def test_what_was_disturbed_is_measured_again(disturbance: dict[int, float], measured: list[int]) -> None:
    link = Link(1000.0, 2.0, lambda call: disturbance.get(call, 1.0))
    found = sweep((1024, 2048, 4096), 1e7, WANTED, link.measure)
    assert [time_us for _, time_us in found.points] == [1000 + nbytes / 2 for nbytes in (1024, 2048, 4096)]
    assert [nbytes for nbytes, _ in link.calls] == measured


def test_what_stays_disturbed_is_measured_three_times_more_and_counts_with_its_least_time() -> None:
    link = Link(1000.0, 2.0, lambda call: {3: 2.0, 5: 3.0, 6: 1.9, 7: 3.0}.get(call, 1.0))
    found = sweep((1024, 2048, 4096), 1e7, WANTED, link.measure)
    assert [nbytes for nbytes, _ in link.calls] == [1024, 1024, 2048, 4096, 2048, 2048, 2048]
    assert found.points[1] == (2048, 1.9 * 2024)
    busy = Link(1000.0, 2.0, lambda call: 1 + 2 * (call % 2))
    assert sweep((1024, 2048, 4096, 8192), 3e5, WANTED, busy.measure).spent_us <= 3e5  # but not beyond its time


# ------------------------------------------------------------------------------ who measures what


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((1,), []),
        ((3,), [("world", 3, 1, {0, 1, 2})]),
        ((1, 1), [("world", 2, 1, {0, 1})]),
        (
            (2, 2),
            [
                ("intra", 2, 1, {0, 1}),
                ("intra", 2, 2, {0, 1, 2, 3}),
                ("inter", 2, 1, {0, 2}),
                ("inter", 2, 2, {0, 1, 2, 3}),
                ("world", 4, 1, {0, 1, 2, 3}),
            ],
        ),
        (
            (2, 1, 2),
            [
                ("intra", 2, 1, {0, 1}),
                ("intra", 2, 2, {0, 1, 3, 4}),
                ("inter", 3, 1, {0, 2, 3}),
                ("world", 5, 1, {0, 1, 2, 3, 4}),
            ],
        ),
        ((1, 2), [("intra", 2, 1, {1, 2}), ("inter", 2, 1, {0, 1}), ("world", 3, 1, {0, 1, 2})]),
    ],
)
def test_who_is_at_work_when(nodes: tuple[int, ...], expected: list[tuple[str, int, int, set[int]]]) -> None:
    plans = [groups_of(cast(Team, TeamShape.of(nodes, rank))) for rank in range(sum(nodes))]
    for place, (level, ranks, groups, workers) in enumerate(expected):
        mine = [plan[place] for plan in plans]
        assert {(each.level, each.ranks, each.groups) for each in mine} == {(level, ranks, groups)}
        assert {rank for rank, each in enumerate(mine) if each.team is not None} == workers
    assert all(len(plan) == len(expected) for plan in plans)


def test_all_work_has_a_key_and_does_something() -> None:
    jobs = work_of([Cast(), Quantize(4)])
    keys = {job.key for job in jobs}
    assert {WorkKey(kind, "Quantize(bits=4)") for kind in ("encode", "decode", "recode")} < keys
    assert {WorkKey("copy"), *(WorkKey(kind, "PowerSGD(4)") for kind in ("factor", "refresh"))} < keys
    for job in jobs:
        sizes = job.sizes(ProbeOptions(256, 4096, factor=16))
        assert len(sizes) > 1
        job.prepare(sizes[0] // 4, torch.device("cpu"))()
    assert {repr(each) for each in known_compressors()} >= {"Exact()", "Quantize(bits=8)", "OneBit(block=512)"}
