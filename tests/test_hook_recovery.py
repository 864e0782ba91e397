# SPDX-License-Identifier: Apache-2.0
"""Training goes on after an exception, after saving and loading, and after the process group is made again."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from tests.hook_training import (
    REPRESENTATIVES,
    SMALL_BUCKET,
    WAYS,
    Tower,
    assert_identical,
    attach_preset,
    batch_of,
    digest_of,
    loss_of,
    seeded,
    train,
)
from tests.ranks import run


class Explode(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if Explode.armed:
            raise ArithmeticError("the loss exploded")
        return gradients[0]


class Explosive(Tower):
    def __init__(self, fuse: int) -> None:
        super().__init__()
        self.fuse = fuse

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == self.fuse:
                x = Explode.apply(x)
        return x


def explode(ddp: TorchDDP, rank: int) -> None:
    Explode.armed = True
    with pytest.raises(ArithmeticError, match="the loss exploded"):
        loss_of(ddp, batch_of(rank, 99)).backward()
    Explode.armed = False


def survive_explosion(rank: int, world_size: int, preset: str) -> str:
    aggregator = commopt.PRESETS[preset].build()
    module = seeded(Explosive, 5)  # explodes before any bucket is full: torch's DDP can go on
    ddp = attach_preset(module, preset, **SMALL_BUCKET)
    train(ddp, rank, world_size, aggregator, steps=2)
    explode(ddp, rank)
    train(ddp, rank, world_size, aggregator, steps=2)

    module = seeded(Explosive, 2)  # three buckets are under way: torch's DDP demands to be made again
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.attach(ddp, preset)
    train(ddp, rank, world_size, aggregator, steps=2)
    explode(ddp, rank)
    del ddp
    gc.collect()  # the old reducer's hooks sit on the parameters until it is gone
    ddp = attach_preset(module, preset, **SMALL_BUCKET)
    digest = train(ddp, rank, world_size, aggregator, steps=3)
    del ddp
    gc.collect()
    ddp = TorchDDP(module, **SMALL_BUCKET)
    ddp.register_comm_hook(state, commopt.hook)  # the state is as good as new
    return digest + train(ddp, rank, world_size, aggregator, steps=3)


@pytest.mark.parametrize("preset", REPRESENTATIVES)
def test_training_goes_on_after_an_exception_in_backward(preset: str) -> None:
    assert_identical(run(survive_explosion, 4, preset, nodes=(2, 2)))


def reloaded(ddp: TorchDDP) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def save_and_load(rank: int, world_size: int, preset: str) -> str:
    aggregator = commopt.PRESETS[preset].build()
    digests = ""
    for way in ("register_preset", "register_torch_convention", "attach_aggregator"):
        ddp = WAYS[way](seeded(Tower), preset, **SMALL_BUCKET)
        train(ddp, rank, world_size, aggregator, steps=2)
        loaded = reloaded(ddp)
        assert digest_of(loaded.module) == digest_of(ddp.module)
        hook, state = loaded._comm_hooks[0]
        assert isinstance(state, commopt.HookState)
        again = TorchDDP(copy.deepcopy(loaded.module), **SMALL_BUCKET)
        again.register_comm_hook(state, hook)  # the loaded hook and state work, on groups made anew
        digests += train(again, rank, world_size, aggregator, steps=2)
        assert state.stats()["buckets"] > 2
        digests += train(ddp, rank, world_size, aggregator, steps=2)  # and the saved one still does
    return digests


@pytest.mark.parametrize("preset", REPRESENTATIVES)
def test_hook_and_state_can_be_saved(preset: str) -> None:
    assert_identical(run(save_and_load, 4, preset, nodes=(2, 2)))


def use_loaded_model(rank: int, world_size: int) -> None:
    ddp = commopt.DistributedDataParallel(seeded(Tower), **SMALL_BUCKET)
    ddp.register_comm_hook(commopt.hierarchical_bf16)
    train(ddp, rank, world_size, commopt.hierarchical_bf16.build(), steps=2)
    loaded = reloaded(ddp)
    train(loaded, rank, world_size, commopt.hierarchical_bf16.build(), steps=3)
    assert loaded._comm_hooks[0][1].stats()["buckets"] > 3, "training runs on, but without the hook"


def test_a_loaded_model_communicates_through_its_hook() -> None:
    run(use_loaded_model, 2, nodes=(1, 1))


def attach_to_loaded_stock_model(rank: int, world_size: int) -> None:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    commopt.attach(ddp, commopt.hierarchical)
    loaded = reloaded(ddp)  # torch drops the hook, and keeps saying it is there
    state = commopt.attach(loaded, commopt.hierarchical)
    train(loaded, rank, world_size, commopt.hierarchical.build(), steps=3)
    assert state.stats()["buckets"] > 3
    with pytest.raises(commopt.ConfigurationError, match="has a communication hook already"):
        commopt.attach(loaded, commopt.hierarchical)


def test_a_loaded_stock_model_takes_a_hook_again_but_only_one() -> None:
    run(attach_to_loaded_stock_model, 2, nodes=(1, 1))


def start_again(rank: int, world_size: int, preset: str, folder: str) -> str:
    digests = []
    for attempt in range(3):
        ddp = attach_preset(seeded(Tower), preset, **SMALL_BUCKET)
        digests.append(train(ddp, rank, world_size, commopt.PRESETS[preset].build(), steps=3))
        del ddp
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=world_size)
        dist.barrier()  # after the last, a rank that is done would close the connections its peers are still making
    assert len(set(digests)) == 1
    return digests[0]


@pytest.mark.parametrize("preset", REPRESENTATIVES[:2])
def test_the_process_group_can_be_destroyed_and_made_again(preset: str, tmp_path: Path) -> None:
    assert_identical(run(start_again, 4, preset, str(tmp_path), nodes=(2, 2)))
