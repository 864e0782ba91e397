# SPDX-License-Identifier: Apache-2.0
"""Loops that would use Adam's directions wrongly are told so, by name: accumulated, clipped, with momentum again."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import ConfigurationError
from tests.feedback_training import Records
from tests.ranks import run

STEPS = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def loss_of(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(16, 32, generator=generator), torch.randn(16, 8, generator=generator)
    loss: Tensor = (model(x) - y).square().mean()
    return loss


class Loop:
    """A model of DDP or HSDP, and what a user would write around it."""

    def __init__(self, kind: str, preset: str, *, scaled: bool = False, **options: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
        self.model = net()
        if kind == "ddp":
            self.model = TorchDDP(self.model)
        else:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
        self.comm = commopt.attach(self.model, preset, scaler=self.scaler if scaled else None, **options)
        self.optimizer = (
            self.comm.optimizer(self.model.parameters(), lr=1e-3)
            if "adam" in options
            else torch.optim.SGD(self.model.parameters(), lr=1e-3)
        )

    def backward(self, number: int, factor: float = 1.0) -> None:
        self.scaler.scale(loss_of(self.model, number) * factor).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


# ------------------------------------------------------------------------------------ accumulated averages


def accumulate(rank: int, world_size: int, kind: str, scaled: bool, sound: int) -> str:
    """Return what is said of a second average without a step between, after `sound` steps of one backward each."""
    loop = Loop(kind, "hierarchical_onebit", scaled=scaled, adam=True)
    for step in range(sound):
        loop.backward(step)
        loop.step()
    loop.backward(sound)
    with pytest.raises(ConfigurationError) as caught:
        loop.backward(sound + 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "scaled", "sound"), [("ddp", False, 0), ("ddp", True, 2), ("hsdp", False, 0), ("hsdp", True, 2)]
)
def test_a_second_average_without_a_step_is_refused(kind: str, scaled: bool, sound: int) -> None:
    for message in run(accumulate, 2, kind, scaled, sound, nodes=(1, 1)):
        assert "without an optimizer step between" in message
        assert ("no_sync()" if kind == "ddp" else "set_requires_gradient_sync(False)") in message


def drop_steps(rank: int, world_size: int, kind: str, scaled: bool) -> list[int]:
    """Train with steps that are dropped as they are not finite, the first one too; return steps and drops."""
    loop = Loop(kind, "hierarchical_onebit", scaled=scaled, adam=True)
    for step in range(6):
        loop.backward(step, float("inf") if step in (0, 3, 4) and rank == 0 else 1.0)
        found = [each.grad for each in loop.model.parameters()]
        if scaled or all(bool(torch.as_tensor(each.sum()).isfinite()) for each in found if each is not None):
            loop.step()
        else:
            loop.optimizer.zero_grad()
    stats = loop.comm.stats()
    return [stats["steps"], int(stats["dropped_commits"] > 0)]


@pytest.mark.parametrize(("kind", "scaled"), [("ddp", False), ("ddp", True), ("hsdp", True)])
def test_a_step_that_is_dropped_is_no_accumulation(kind: str, scaled: bool) -> None:
    assert run(drop_steps, 2, kind, scaled, nodes=(1, 1)) == [[6, 1]] * 2


def drop_for_another(rank: int, world_size: int) -> int:
    """Train beside a second model that makes the scaler drop a step, though all averages are finite."""
    loop = Loop("ddp", "hierarchical_onebit", scaled=True, adam=True)
    other = nn.Parameter(torch.ones(()))
    loop.optimizer.add_param_group({"params": [other]})
    for step in range(4):
        loop.backward(step)
        other.grad = torch.tensor(float("inf") if step in (0, 2) else 0.0)
        loop.step()
    steps: int = loop.comm.stats()["steps"]
    return steps


def test_a_step_that_others_make_the_scaler_drop_is_no_accumulation() -> None:
    assert run(drop_for_another, 2, nodes=(1, 1)) == [4, 4]


def accumulate_gradients(rank: int, world_size: int, scaled: bool, backwards: int) -> list[str]:
    """Return what is warned about plain error feedback with so many averaged backwards for each step."""
    records = Records()
    logging.getLogger("commopt").addHandler(records)
    loop = Loop("ddp", "hierarchical_onebit", scaled=scaled)
    for step in range(STEPS):
        for micro in range(backwards):
            loop.backward(step * backwards + micro, float("inf") if scaled and step == 1 and micro == 0 else 1.0)
        loop.step()
    logging.getLogger("commopt").removeHandler(records)
    return [each for each in records.messages if "two backwards in a row" in each]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
def test_error_feedback_warns_of_accumulation_with_a_scaler_too(scaled: bool, backwards: int) -> None:
    for messages in run(accumulate_gradients, 2, scaled, backwards, nodes=(1, 1)):
        assert len(messages) == backwards - 1


# ------------------------------------------------------------------------------------ clipping and momentum


def clip(rank: int, world_size: int, kind: str, scaled: bool, first: int, limit: float) -> tuple[int, str, list[str]]:
    """Clip from step `first` on; return steps made, the error and the warnings."""
    records = Records()
    logging.getLogger("commopt").addHandler(records)
    loop = Loop(kind, "hierarchical_onebit", scaled=scaled, adam=True)
    error, step = "", 0
    try:
        while step < first + STEPS:
            loop.backward(step)
            loop.scaler.unscale_(loop.optimizer)
            if step >= first:
                torch.nn.utils.clip_grad_norm_(loop.model.parameters(), limit)
            loop.step()
            step += 1
    except ConfigurationError as caught:
        error = str(caught)
    logging.getLogger("commopt").removeHandler(records)
    return step, error, [each for each in records.messages if "clip_grad_norm_" in each]


@pytest.mark.parametrize(("kind", "scaled"), [("ddp", False), ("ddp", True), ("hsdp", False), ("hsdp", True)])
def test_clipped_directions_are_refused_in_the_first_steps(kind: str, scaled: bool) -> None:
    for steps, error, _ in run(clip, 2, kind, scaled, 2, 1.0, nodes=(1, 1)):
        assert steps == 2
        assert "max_grad_norm=0" in error
        assert "Adam(clip_norm" in error


def test_later_clipping_is_warned_about_once() -> None:
    """An error would end a long training by one step."""
    for steps, error, warnings in run(clip, 2, "ddp", False, 12, 1.0, nodes=(1, 1)):
        assert (steps, error, len(warnings)) == (12 + STEPS, "", 1)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_limit_that_clips_nothing_is_let_be(scaled: bool) -> None:
    assert run(clip, 2, "ddp", scaled, 0, 1e9, nodes=(1, 1)) == [(STEPS, "", [])] * 2


def schedule(rank: int, world_size: int, made_after: int, cycled: bool) -> tuple[int, str]:
    """Return how many steps were made with a scheduler of torch's that cycles momentum by default, and the error."""
    loop = Loop("ddp", "hierarchical_onebit", adam=True)
    scheduler: Any = None
    for step in range(made_after + STEPS):
        if step == made_after:
            how: dict[str, Any] = {} if cycled else {"cycle_momentum": False}
            scheduler = torch.optim.lr_scheduler.OneCycleLR(loop.optimizer, 1e-3, total_steps=20, **how)
        loop.backward(step)
        try:
            loop.step()
        except ConfigurationError as caught:
            return step, str(caught)
        if scheduler is not None:
            scheduler.step()
    return made_after + STEPS, ""


@pytest.mark.parametrize("made_after", [0, 2])
def test_cycled_momentum_is_refused_in_whichever_step_it_comes(made_after: int) -> None:
    for steps, error in run(schedule, 2, made_after, True, nodes=(1, 1)):
        assert steps == made_after
        assert "cycle_momentum=False" in error
    assert run(schedule, 2, made_after, False, nodes=(1, 1)) == [(made_after + STEPS, "")] * 2
