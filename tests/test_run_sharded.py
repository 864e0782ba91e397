# SPDX-License-Identifier: Apache-2.0
"""`commopt run` and FSDP: models of fully_shard get the hook as by hand, FSDP1's are refused before training begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import SGD, AdamW

import commopt
from commopt import ConfigurationError
from commopt.run.models import Models, watching
from commopt.run.script import Choice
from tests.plan_changes import heard
from tests.ranks import run
from tests.sharded_training import NODES, Made, Net, batch, over_all_ranks

STRATEGY = "hierarchical_quantized:bits=4"
STEPS = 3


def net_of(mesh: str) -> Net:
    return Made(mesh=over_all_ranks())() if mesh == "1-D" else Made()()


def weights(net: Net) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in net.parameters()]  # type: ignore[attr-defined]


def train(net: Net, rank: int, make: Any) -> list[torch.Tensor]:
    optimizer = make(net.parameters())
    with torch.no_grad():
        net(batch(rank))  # an evaluation before training
    for step in range(STEPS):
        optimizer.zero_grad()
        net(batch(10 * step + rank)).square().mean().backward()
        optimizer.step()
    return weights(net)


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.05)


def adamw(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.01)


def both(rank: int, world_size: int, mesh: str) -> tuple[bool, bool, int]:
    by_hand = net_of(mesh)
    commopt.attach(by_hand, STRATEGY)
    expected = train(by_hand, rank, sgd)
    stock = train(net_of(mesh), rank, sgd)
    models = Models(Choice(STRATEGY))
    with watching(models):
        found = train(net_of(mesh), rank, sgd)
    models.close()
    assert [(each.name, each.stats["steps"]) for each in models.trained] == [("FSDPNet", STEPS)]
    return all(map(torch.equal, found, expected)), all(map(torch.equal, found, stock)), models.trained[0].rank


@pytest.mark.parametrize("mesh", ["2-D", "1-D"])
def test_models_of_fully_shard_train_as_if_attached_by_hand(mesh: str) -> None:
    assert run(both, 4, mesh, nodes=NODES) == [(True, False, rank) for rank in range(4)]


def with_adam(rank: int, world_size: int) -> bool:
    by_hand = Made()()
    comm = commopt.attach(by_hand, "hierarchical_onebit", adam=commopt.Adam(betas=(0.9, 0.999)))
    expected = train(by_hand, rank, lambda parameters: comm.optimizer(parameters, lr=0.01))
    with watching(Models(Choice("hierarchical_onebit:adam=True"))):
        found = train(Made()(), rank, adamw)
    return all(map(torch.equal, found, expected))


def test_their_optimizer_changes_with_adam() -> None:
    assert run(with_adam, 4, nodes=NODES) == [True] * 4


def not_begun(rank: int, world_size: int) -> list[str]:
    said = []
    net = Made()()
    with watching(Models(Choice("auto"))), pytest.raises(ConfigurationError, match="for DDP models only") as caught:
        net(batch(0))
    said.append(str(caught.value))
    old = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"))
    with watching(Models(Choice("flat"))), pytest.raises(ConfigurationError, match="FSDP1 is not supported") as caught:
        old(torch.ones(2, 4))
    said.append(str(caught.value))
    return said


def test_what_cannot_be_averaged_is_refused_with_the_remedy() -> None:
    for auto, fsdp1 in run(not_begun, 4, nodes=NODES, fresh=True):
        assert "'hierarchical_quantized'" in auto
        assert "use torch.distributed.fsdp.fully_shard" in fsdp1


def left_alone(rank: int, world_size: int) -> list[str]:
    theirs, models = Made()(), Models(Choice(STRATEGY))
    comm = commopt.attach(theirs, "flat")
    with watching(models), heard() as said:
        train(theirs, rank, sgd)
    assert comm.stats()["steps"] == STEPS
    assert models.seen
    assert not models.trained
    assert "__call__" not in vars(type(fully_shard(torch.nn.Linear(2, 2))).__mro__[1])
    return [line for _, line in said]


def test_a_model_that_the_script_has_attached_is_left_alone() -> None:
    for (line,) in run(left_alone, 4, nodes=NODES):
        assert "the FSDP2 model of FSDPNet is left alone: the script has set an all-reduce hook in it" in line
