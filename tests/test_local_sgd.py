# SPDX-License-Identifier: Apache-2.0
"""LocalSGD itself: its options, its calendar, what it sends, and the mean of arbitrary parameters."""

from __future__ import annotations

import copy
import logging
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import (
    Compressed,
    ConfigurationError,
    Flat,
    Hierarchical,
    Layout,
    LocalSGD,
    OneBit,
    Outer,
    Quantize,
)
from commopt.aggregate import Buffer, Call
from commopt.compress import Cast
from commopt.feedback import parameter_buckets
from commopt.groups import TeamShape
from tests.feedback_training import Records
from tests.ranks import run

BFLOAT16 = Hierarchical(inter=Compressed(Cast(torch.bfloat16), feedback=None))


# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"period": 0}, "period=0"),
        ({"period": 2.0}, "period=2.0"),
        ({"period": True}, "period=True"),
        ({"start_step": -1}, "start_step=-1"),
        ({"gradients": "hierarchical"}, "'hierarchical'"),
        ({"gradients": LocalSGD()}, "over all ranks"),
        ({"gradients": Hierarchical(Compressed(Quantize()))}, "residuals"),
        ({"buffers": 1}, "buffers=1"),
        ({"offload": 1, "compressor": OneBit()}, "offload=1"),
        ({"offload": True}, "keeps nothing between rounds"),
        ({"outer": 0.7}, "outer=0.7"),
        ({"compressor": "onebit"}, "'onebit'"),
        ({"decay": 0.9}, "decay=0.9"),
        ({"decay": 0, "compressor": OneBit()}, "decay=0"),
        ({"merge": 0}, "merge=0"),
        ({"delay": 8}, "delay=8, period=8"),
        ({"fragments": 0}, "fragments=0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        LocalSGD(**options)


@pytest.mark.parametrize("options", [{"lr": 0}, {"lr": True}, {"momentum": 1.0}, {"nesterov": 1}, {"nesterov": True}])
def test_wrong_options_of_the_outer_optimizer_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Outer(**options)


def test_it_is_no_part_of_another_aggregator() -> None:
    with pytest.raises(ConfigurationError, match="attach LocalSGD"):
        Hierarchical(inter=LocalSGD())
    assert LocalSGD not in commopt.AGGREGATORS.values()
    assert LocalSGD().error_bound == inf


def test_the_calendar_begins_with_the_start_step() -> None:
    average = LocalSGD(period=3, start_step=2)
    assert [steps for steps in range(12) if average.due(steps)] == [5, 8, 11]
    assert [steps for steps in range(4) if LocalSGD(period=1).due(steps)] == [1, 2, 3]


def test_gradients_stay_inside_the_node_from_the_start_step_on() -> None:
    average, shape = LocalSGD(start_step=2), TeamShape.of((2, 2))
    for step, levels in ((1, {"intra", "inter"}), (2, {"intra"}), (None, {"intra"})):
        steps = average.calls(Buffer(Layout.anonymous(1000), torch.float32, step=step), shape)
        assert {each.level for each in steps if isinstance(each, Call)} == levels


def test_phases_stand_for_steps_with_equal_messages() -> None:
    warmed = Compressed(Quantize(start_step=4), feedback=None)
    for average in (LocalSGD(start_step=s, gradients=g) for s in (0, 2, 6) for g in (Flat(), warmed)):
        for step in range(9):
            phase = average.phase(step)
            assert phase <= step
            assert (phase >= average.start_step) == (step >= average.start_step)
            assert average.gradients.phase(phase) == average.gradients.phase(step)
        # As few as there are kinds of messages, or stats() would keep one count per step.
        assert len({average.phase(step) for step in range(9)}) <= 3


# ------------------------------------------------------------------------------------------- any parameters


class Mixed(nn.Module):
    """Parameters and buffers of many kinds, different on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        made = partial(torch.randn, generator=torch.Generator().manual_seed(rank))
        self.large = nn.Parameter(made(30, 10))
        self.small = nn.ParameterList(nn.Parameter(made(length)) for length in (1, 7, 40))
        self.last_channels_first = nn.Parameter(made(4, 3, 5, 5).to(memory_format=torch.channels_last))
        self.in_bfloat16 = nn.Parameter(made(33).bfloat16())
        self.in_float64 = nn.Parameter(made(9).double())
        self.frozen = nn.Parameter(made(6), requires_grad=False)
        self.own = nn.Parameter(made(6))
        self.mean = nn.Buffer(made(5))
        self.own_mean = nn.Buffer(made(5))
        self.count = nn.Buffer(torch.tensor(rank))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.large.sum()


def average_mixed(rank: int, world_size: int, buffers: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    module = Mixed(rank)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, [".own", "own_mean"])  # as DDP has them
    ddp = TorchDDP(module, broadcast_buffers=False)
    module.register_buffer("shape_only", torch.empty(3, device="meta"), persistent=False)  # has no values to average
    state = commopt.attach(ddp, LocalSGD(gradients=BFLOAT16, buffers=buffers))
    before = Mixed(rank).state_dict()
    module.load_state_dict(before)  # DDP has taken rank 0's
    parameter_buckets.BUCKET_NBYTES = 1024  # `large` is longer: it travels alone, from where it is
    try:
        state.average_parameters()
    finally:
        parameter_buckets.BUCKET_NBYTES = 25 * 2**20
    assert module.last_channels_first.is_contiguous(memory_format=torch.channels_last)
    return before, copy.deepcopy(module.state_dict()), state.stats()


@pytest.mark.parametrize(
    ("nodes", "buffers"), [((2, 2), True), ((2, 1), False)], ids=["2x2-and buffers", "2+1-parameters"]
)
def test_the_mean_is_over_ranks_whatever_they_hold(nodes: tuple[int, ...], buffers: bool) -> None:
    results = run(average_mixed, sum(nodes), buffers, nodes=nodes)
    left_alone = {"frozen", "own", "own_mean", "count"} | (set() if buffers else {"mean"})
    for name, value in results[0][1].items():
        if name in left_alone:
            assert all(torch.equal(after[name], before[name]) for before, after, _ in results), name
            continue
        mean = torch.stack([before[name].double() for before, _, _ in results]).mean(0)
        largest = max(float(before[name].abs().max()) for before, _, _ in results)
        assert (value.double() - mean).abs().max() <= 2 * torch.finfo(value.dtype).eps * largest, name
        if value.dtype == torch.bfloat16:  # rounded once: sums in bfloat16 would be off by more
            assert torch.equal(value, mean.float().bfloat16())
        assert all(torch.equal(after[name], value) for _, after, _ in results), name
    exchanged = [value for name, value in results[0][1].items() if name not in left_alone]
    nbytes = sum(value.numel() * max(value.element_size(), 4) for value in exchanged)
    assert sum(stats["inter_bytes"] for *_, stats in results) == 2 * nbytes  # between two nodes, both ways


# ------------------------------------------------------------------------------------------- registration


def register(rank: int, world_size: int) -> list[str]:
    records, logger = Records(), logging.getLogger("commopt")
    logger.addHandler(records)
    with pytest.raises(ConfigurationError, match="for DDP models"):
        commopt.all_reduce(torch.ones(3), aggregator=LocalSGD())
    ddp = TorchDDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    commopt.attach(ddp, LocalSGD())
    ddp(torch.randn(4, 3)).sum().backward()
    blind = TorchDDP(nn.Linear(3, 3))
    blind.register_comm_hook(commopt.HookState(LocalSGD()), commopt.hook)
    with pytest.raises(ConfigurationError, match="does not know the model"):
        blind(torch.ones(3)).sum().backward()
    logger.removeHandler(records)
    return records.messages


def test_what_cannot_work_is_said() -> None:
    first, other = run(register, 2)
    assert sum("on one node" in message for message in first) == 2  # two states
    assert not any("on one node" in message for message in other)
    assert all(any("broadcast_buffers=False" in message for message in messages) for messages in (first, other))


def copy_model(rank: int, world_size: int) -> list[int]:
    """Return how often parameters were averaged after forwards of a copied model and of the model itself."""
    ddp = TorchDDP(nn.Linear(3, 3))
    state = commopt.attach(ddp, LocalSGD(period=1))
    ddp(torch.randn(4, 3)).sum().backward()
    counts = []
    for module in (copy.deepcopy(ddp.module), ddp.module):
        module(torch.randn(4, 3))
        counts.append(state.stats()["parameter_averages"])
    return counts


def test_a_copy_of_the_model_averages_nothing() -> None:
    assert run(copy_model, 2, nodes=(1, 1)) == [[0, 1]] * 2
