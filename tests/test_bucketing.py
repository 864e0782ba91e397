# SPDX-License-Identifier: Apache-2.0
"""The input of planning: units, strategies, samples to time, and times put together from records."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.aggregate import Aggregator, Flat
from commopt.attached.layouts import Layouts
from commopt.cost import Curve
from commopt.feedback import Layout
from commopt.groups import Team, join
from commopt.recording import BucketRecord, MessageRecord, StepRecord
from commopt.schedule import Unit, calibration, sync
from commopt.schedule.calibration import HURRIED_NBYTES, LARGEST_NBYTES, calibrate, prices_from_points, samples_of
from commopt.schedule.measure import StepTable, latest, own_times
from tests.plan_changes import heard
from tests.ranks import run

# --------------------------------------------------------------------- what is tried out


def test_samples_are_beginnings_of_the_model() -> None:
    layout = Layout.of_parameters([("a", (8, 100)), ("b", (300,)), ("c", (50, 2000)), ("d", (7,))])
    samples = samples_of(layout, 4)
    assert [sample.numel for sample in samples] == [1100, 4096, 16 * 1024, layout.numel]
    assert samples[0].names == {"a", "b"}
    assert samples[0].pieces[0].shape == (8, 100)
    assert samples[-1] == layout
    assert samples_of(Layout.anonymous(100), 4) == [Layout.anonymous(100)]


def test_where_time_is_short_samples_begin_later_and_are_called_twice_only() -> None:
    layout = Layout.anonymous(8 * 2**20)
    samples = samples_of(layout, 4, HURRIED_NBYTES)
    assert [sample.numel for sample in samples] == [2**16, 2**18, 2**20, 2**22, layout.numel]
    calls = []

    def sender(aggregator: Aggregator, layout: Layout, dtype: torch.dtype, team: Team) -> Callable[[int], float]:
        def mean_us(count: int) -> float:
            calls.append((layout.numel, count))
            return float(layout.numel)  # 65 ms and more

        return mean_us

    with patch.object(calibration, "_sender", sender):
        team: Any = Mock(default_device=torch.device("cpu"))
        points = calibrate({"flat": Flat()}, samples, torch.float32, team, 0.15, hurried=True)
    assert [nbytes for nbytes, _ in points["flat"]] == [2**18, 2**20], "two make a line, and there is no time for more"
    assert calls == [(2**16, 1), (2**16, 1), (2**18, 1), (2**18, 1)]


@pytest.mark.parametrize(("last_us", "calls"), [(90_000.0, 3), (700_000.0, 1)], ids=["as expected", "much longer"])
def test_samples_go_on_to_long_ones_while_latency_is_most_of_what_they_take(last_us: float, calls: int) -> None:
    """Ways that differ for long messages may be alike for short ones; one call is the most that is spent too much."""
    samples = [Layout.anonymous(numel) for numel in (2**10, 2**12, 2**14, 2**16, 2**18)]
    counts: list[int] = []

    def sender(aggregator: Aggregator, layout: Layout, dtype: torch.dtype, team: Team) -> Callable[[int], float]:
        def mean_us(count: int) -> float:
            if layout.numel == 2**18:
                counts.append(count)
            return last_us if layout.numel == 2**18 else 40_000.0 + layout.numel / 10

        return mean_us

    with patch.object(calibration, "_sender", sender):
        team: Any = Mock(default_device=torch.device("cpu"))
        points = calibrate({"flat": Flat()}, samples, torch.float32, team, 1.2)
    assert [nbytes for nbytes, _ in points["flat"]] == [4 * each.numel for each in samples]
    assert points["flat"][-1][1] == last_us
    assert sum(counts) == (1 + calls if calls > 1 else 1)


def test_no_sample_is_so_large_that_it_could_exhaust_the_memory() -> None:
    layout = Layout.of_parameters([("a", (7 * 10**9,)), ("b", (5,))])
    numels = [sample.numel for sample in samples_of(layout, 2)]
    assert numels == sorted(numels)
    assert numels[-1] == LARGEST_NBYTES // 2


def test_prices_follow_from_points() -> None:
    layout = Layout.anonymous(10**6)
    points = [(4 * 10**k, 50.0 + 0.01 * 4 * 10**k) for k in range(1, 7)]
    prices = prices_from_points({"flat": points, "tiny": [(400, 7.0)]}, layout, torch.float32)
    fitted = Curve.fit(points)
    for nbytes in (1, 10**4, 4 * 10**6):
        assert prices["flat"](nbytes) == pytest.approx(fitted.time_us(nbytes))
        assert prices["tiny"](nbytes) == 7.0


# --------------------------------------------------------------------- what was measured


def record(step: int, begin_us: float, *, buckets: tuple[int, ...] = (0, 1), label: str = "w") -> StepRecord:
    """Buckets are ready every 10 us from `begin_us` on, and all go in one message that takes 50 us."""
    ready = tuple(BucketRecord(n, f"{label}{n}", 4, begin_us + 10 * n) for n in buckets)
    end_us = begin_us + 10 * len(buckets)
    message = MessageRecord(buckets, label, 8, end_us, end_us + 1, end_us + 51, ())
    return StepRecord(step, None, end_us, ready, (message,))


def own_of(records: list[StepRecord], steps: range = range(3, 6), messages: int = 1) -> StepTable:
    ready = {step: {"a": 1.0 * step, "b": 2.0 * step} for step in steps}
    units = [Unit(names, 0, 0.0, "f") for names in (("a", "b"), ("c",))]
    return own_times({each.step: each for each in records}, ready, steps, units, messages)


def test_times_of_this_rank() -> None:
    own = own_of([record(step, 1000.0 * step) for step in range(2, 6)])
    assert own.begin_us.tolist() == [2071.0, 3071.0, 4071.0]  # when the step before was reduced
    assert own.compute_end_us.tolist() == [3020.0, 4020.0, 5020.0]
    assert own.started_us.tolist() == [[3010.0], [4010.0], [5010.0]]  # when it could
    assert own.finished_us.tolist() == [[3071.0], [4071.0], [5071.0]]
    assert own.ready_us[:, 0].tolist() == [6.0, 8.0, 10.0]  # with the last of its parameters
    assert np.isnan(own.ready_us[:, 1]).all()


def test_steps_that_went_otherwise_than_the_last_do_not_count() -> None:
    usual = {step: record(step, 1000.0 * step) for step in range(2, 6)}
    odd = [record(4, 4000.0, buckets=(0, 1, 2)), record(4, 4000.0, label="v")]
    for other in odd:
        own = own_of(list((usual | {4: other}).values()))
        assert np.isnan(own.begin_us).tolist() == [False, True, False]
        assert np.isnan(own.finished_us[1]).all()
    assert np.isnan(own_of([usual[2], usual[3], usual[4]]).begin_us).all()  # the last was not recorded
    assert np.isnan(own_of(list(usual.values()), messages=2).begin_us).all()
    assert np.isnan(own_of([usual[3], usual[4], usual[5]]).begin_us).tolist() == [True, False, False]


def put_together(rank: int, world_size: int) -> tuple[list[float], list[float], list[float]]:
    team = join(None).team
    here = float(team.rank)
    nan = float("nan")
    column = np.array([[1e9 + 1e6 * here], [nan if team.rank else 5e9]])
    unknown = np.array([[nan, 7e9 - 1e6 * here], [nan, nan]])
    times = latest(team, StepTable(column[:, 0], 2 * column[:, 0], column, 3 * column, unknown))
    return times.begin_us.tolist(), times.finished_us[:, 0].tolist(), times.ready_us[0].tolist()


def test_the_latest_of_all_ranks_counts_on_one_clock() -> None:
    begin_us, finished_us, ready_us = run(put_together, 4, nodes=(2, 2))[0]
    # Emulated nodes share a clock, which is known to a few microseconds; a rank is a second later than the one before.
    assert begin_us == pytest.approx([1e9 + 3e6, 5e9], abs=2e5)
    assert finished_us == pytest.approx([3e9 + 9e6, 15e9], abs=2e5)
    assert ready_us == pytest.approx([1e9 + 3e6, 7e9], abs=2e5)  # what nobody knows was there from the start


# --------------------------------------------------------------------- names


class Shared(nn.Module):
    """A head that shares its weight with an embedding, as language models have it; `frozen` is never averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.frozen(self.embed(x)))
        return y


def test_compiled_modules_keep_the_names_of_plain_ones() -> None:
    module = Shared()
    outside = Layouts(torch.compile(module))  # type: ignore[arg-type]
    module.head = torch.compile(module.head)  # type: ignore[assignment]
    for layouts in (outside, Layouts(module)):
        assert layouts.numels == {"embed.weight": 64 * 64}
        wrapped = commopt.Compressed(commopt.Quantize(), dense=("head._orig_mod.weight",))
        assert layouts.resolved(wrapped) in (
            wrapped,
            replace(wrapped, dense=(*wrapped.dense, "embed.weight")),
        )


@pytest.mark.parametrize("inner", [commopt.Compressed(commopt.Quantize()), commopt.PowerSGD(), commopt.Auto()], ids=str)
def test_patterns_find_a_shared_parameter_by_each_of_its_names(inner: commopt.Aggregator) -> None:
    layouts = Layouts(Shared())
    for pattern, expected in (("head.*", ("head.*", "embed.weight")), ("embed.*", ("embed.*",)), ("x", ("x",))):
        given = replace(inner, dense=(pattern,))  # type: ignore[type-var]
        assert layouts.resolved(given) == replace(inner, dense=expected)  # type: ignore[type-var]
    if not isinstance(inner, commopt.Auto):
        nested = commopt.Hierarchical(inter=replace(inner, dense=("head.*",)))  # type: ignore[type-var]
        assert layouts.resolved(nested).inter.dense == ("head.*", "embed.weight")  # type: ignore[attr-defined]


def test_patterns_that_match_nothing_are_named_with_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    dense = ("haed.*", "*.weight", "frozen.*", "zzz")
    with caplog.at_level(logging.WARNING, logger="commopt"):
        Layouts(Shared()).resolved(commopt.Compressed(commopt.Quantize(), dense=dense))
        Layouts(None).resolved(commopt.Compressed(commopt.Quantize(), dense=("*", "head.*")))
    first, second, unknown = caplog.messages
    assert first.startswith("dense='haed.*' matches no parameter; there are for example head.weight")
    assert second == "dense='zzz' matches no parameter; there are for example embed.weight, frozen.weight, frozen.bias"
    assert unknown.startswith("dense='head.*': the names of the parameters are unknown")


def train_with(rank: int, world_size: int, compiled: bool) -> tuple[set[str], list[str], int]:
    """Return what residuals are kept for, what this rank says, and the steps of a state that goes on from this one."""

    def attached(module: nn.Module) -> tuple[TorchDDP, commopt.HookState]:
        ddp = TorchDDP(module)
        return ddp, commopt.attach(ddp, "quantized", dense=("head.weight", "typo"), plan="ddp")

    plain = nn.ModuleDict({"body": nn.Linear(64, 64), "tie": nn.Linear(64, 64), "head": nn.Linear(64, 64)})
    plain["head"].weight = plain["tie"].weight
    plain.forward = lambda x: plain["head"](plain["tie"](plain["body"](x)))
    with heard() as said:
        ddp, state = attached(torch.compile(plain, backend="eager") if compiled else plain)  # type: ignore[arg-type]
        ddp(torch.randn(2, 64)).sum().backward()
        saved = state.state_dict()
        _, other = attached(copy.deepcopy(plain) if compiled else torch.compile(copy.deepcopy(plain)))  # type: ignore[arg-type]
        other.load_state_dict(saved)
    kept = {piece[0] for layouts in saved["layouts"].values() for pieces in layouts for piece in pieces}
    return kept, [text for _, text in said], other.stats()["steps"]


@pytest.mark.parametrize("compiled", [False, True])
def test_training_with_shared_and_compiled_parameters(compiled: bool) -> None:
    for kept, said, steps in run(train_with, 2, compiled):
        assert kept == {"body.weight"}
        assert steps == 1
        assert [message.split(";")[0] for message in said] == ["dense='typo' matches no parameter"] * 2


# --------------------------------------------------------------------- what it keeps a training from


def train_aloud(rank: int, world_size: int) -> list[tuple[str, str]]:
    ddp = TorchDDP(nn.Linear(256, 256))
    commopt.attach(ddp, "hierarchical", plan="adaptive")
    with pytest.MonkeyPatch.context() as patch, heard(logging.INFO) as said:
        patch.setattr(sync, "_NOTICED_S", 0.0)
        for _ in range(16):
            ddp(torch.ones(1, 256)).sum().backward()
    return said


def test_a_training_that_waits_for_trials_says_so_before_and_after() -> None:
    said, silent = run(train_aloud, 2, fresh=True)
    assert silent == []
    before, after = [place for place, (_, text) in enumerate(said) if "messages here" in text]
    assert re.fullmatch(r"training waits for up to [\d.]+ s: timing messages here", said[before][1])
    assert re.fullmatch(r"timed messages here in [\d.]+ s; training continues", said[after][1])
    assert said[before][0] == "WARNING"  # what Python shows when nobody has set up logging
