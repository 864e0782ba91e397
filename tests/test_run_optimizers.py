# SPDX-License-Identifier: Apache-2.0
"""`commopt run` with adam=: the script's AdamW becomes what comm.optimizer() makes, or training does not begin."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import commopt
from commopt import ConfigurationError
from commopt.attached.optimizers import adam_in, optimizers_of
from commopt.run.models import Models, watching
from commopt.run.script import Choice
from tests.hook_training import SMALL_BUCKET, Tower, batch_of, digest_of, loss_of, seeded
from tests.ranks import run

STRATEGY = "hierarchical_onebit:adam=True"
BETAS = (0.8, 0.98)
STEPS = 5


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return groups of biases, with their own rate and no decay, and of all else."""
    biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
    others = [p for name, p in module.named_parameters() if not name.endswith("bias")]
    return [{"params": others, "name": "matrices"}, {"params": biases, "lr": 0.004, "weight_decay": 0.0}]


def train(ddp: TorchDDP, optimizer: Optimizer, scheduler: LambdaLR, rank: int) -> str:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
        optimizer.step()
        scheduler.step()
    return digest_of(ddp.module)


def faster(step: int) -> float:
    return 1.0 + step


def by_hand_and_by_run(rank: int, world_size: int, fused: bool, before_ddp: bool) -> tuple[str, str, str]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    comm = commopt.attach(ddp, "hierarchical_onebit", adam=commopt.Adam(betas=BETAS, eps=1e-6))
    behind = comm.optimizer(groups_of(ddp.module), lr=0.002, weight_decay=0.1)
    expected = train(ddp, behind, LambdaLR(behind, faster), rank)

    def script() -> tuple[TorchDDP, Optimizer, LambdaLR]:
        module = seeded(Tower)
        options: dict[str, Any] = {"lr": 0.002, "weight_decay": 0.1, "betas": BETAS, "eps": 1e-6, "fused": fused}
        if before_ddp:
            optimizer = AdamW(groups_of(module), **options)
            return TorchDDP(module, **SMALL_BUCKET), optimizer, LambdaLR(optimizer, faster)
        ddp = TorchDDP(module, **SMALL_BUCKET)
        optimizer = AdamW(groups_of(ddp.module), **options)
        return ddp, optimizer, LambdaLR(optimizer, faster)

    stock = train(*script(), rank)
    with watching(Models(Choice(STRATEGY))):
        ddp, optimizer, scheduler = script()
        groups = optimizer.param_groups
        found = train(ddp, optimizer, scheduler, rank)
    assert type(optimizer) is SGD
    assert optimizer.param_groups is groups
    assert scheduler.optimizer is optimizer
    assert groups[0]["name"] == "matrices"
    assert [group["lr"] for group in groups] == [0.002 * (1 + STEPS), 0.004 * (1 + STEPS)]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert not {"betas", "eps"} & {*groups[0], *optimizer.defaults}
    assert getattr(optimizer, "_opt_called", False), "the scheduler would warn"
    optimizer.load_state_dict(optimizer.state_dict())
    return expected, found, stock


@pytest.mark.parametrize(("fused", "before_ddp"), [(False, True), (True, False)])
@pytest.mark.filterwarnings("error:Detected call of")
def test_it_trains_as_with_the_optimizer_of_the_state(fused: bool, before_ddp: bool) -> None:
    for expected, found, stock in run(by_hand_and_by_run, 2, fused, before_ddp, nodes=(1, 1)):
        assert found == expected
        assert found != stock


def amsgrad(module: nn.Module) -> Optimizer:
    return AdamW(module.parameters(), amsgrad=True)


def decaying_adam(module: nn.Module) -> Optimizer:
    return Adam(module.parameters(), weight_decay=0.1)


def momentum(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.1, momentum=0.9)


def one_cycle(module: nn.Module) -> Optimizer:
    optimizer = AdamW(module.parameters())
    vars(optimizer)["kept"] = OneCycleLR(optimizer, 0.1, total_steps=9)
    return optimizer


def resumed(module: nn.Module) -> Optimizer:
    optimizer = AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def two_pairs_of_betas(module: nn.Module) -> Optimizer:
    first, *others = module.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "betas": (0.5, 0.9)}, {"params": others}]
    return AdamW(groups)


def replaced(module: nn.Module) -> Optimizer:
    optimizer = AdamW(module.parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


REFUSED: dict[Callable[[nn.Module], Optimizer], str] = {
    amsgrad: "amsgrad=True",
    decaying_adam: r"Adam\(weight_decay=0.1\) adds the decay to gradients",
    momentum: "SGD is none that it can stand for",
    one_cycle: "OneCycleLR changes the betas .* cycle_momentum=False",
    resumed: "has moments already",
    two_pairs_of_betas: r"betas=\(0.5, 0.9\), eps=1e-08 and betas=\(0.9, 0.999\)",
    replaced: "replaced the method step",
}


def refuse(rank: int, world_size: int) -> None:
    for make, says in REFUSED.items():
        ddp = TorchDDP(seeded(Tower))
        optimizer = make(ddp.module)
        before = digest_of(ddp.module)
        with watching(Models(Choice(STRATEGY))), pytest.raises(ConfigurationError, match=says) as caught:
            ddp(batch_of(rank, 0))
        assert "comm.optimizer()" in str(caught.value)
        assert digest_of(ddp.module) == before
        del optimizer, ddp, caught
        gc.collect()


def test_what_it_cannot_stand_for_is_refused_before_the_first_backward() -> None:
    run(refuse, 2, nodes=(1, 1))


def test_optimizers_are_found_by_their_parameters() -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    ours, plain, theirs = Adam(model.parameters()), SGD([model.bias], lr=1.0), AdamW(other.parameters())
    assert set(optimizers_of(model.parameters())) == {ours, plain}
    assert adam_in([plain]) is None
    assert adam_in([ours, plain, theirs]) == commopt.Adam(betas=(0.9, 0.999), eps=1e-8)

    class Wrapper(Optimizer):
        """As Accelerate's: everything is the wrapped one's."""

        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

    wrapper = Wrapper(theirs)
    assert optimizers_of(other.parameters()) == [theirs]
    del wrapper
