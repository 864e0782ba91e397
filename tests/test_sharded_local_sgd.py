# SPDX-License-Identifier: Apache-2.0
"""LocalSGD of a model that FSDP2 shards inside the nodes: as under DDP, each rank for its own shard."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import commopt
from commopt import LocalSGD
from tests.hook_training import Tower, seeded
from tests.ranks import run
from tests.sharded_training import hsdp_mesh, local
from tests.test_local_sgd_deltas import EVERYTHING, NESTEROV, STEPS, Reference, optimizer_of, train

NODES = (2, 2)
Attached = tuple[nn.Module, commopt.CommState, torch.optim.Optimizer]


def attached(average: LocalSGD) -> Attached:
    model = seeded(Tower)
    assert isinstance(model, Tower)
    for layer in model.layers:
        fully_shard(layer, mesh=hsdp_mesh())
    fully_shard(model, mesh=hsdp_mesh())
    return model, commopt.attach(model, average), optimizer_of(model)


def beside_reference(rank: int, world_size: int, average: LocalSGD) -> float:
    model, _, optimizer = attached(average)
    reference = Reference(average, NODES)
    train(model, optimizer, rank, range(STEPS))
    reference.train(STEPS)
    expected = (each.chunk(2)[rank % 2] for each in reference.replicas[rank // 2].parameters())
    return max(float((got - want).detach().abs().max()) for got, want in zip(local(model), expected, strict=True))


def test_it_is_diloco() -> None:
    for average in (LocalSGD(period=3, outer=NESTEROV, delay=2, merge=0.5), LocalSGD(period=1)):
        assert max(run(beside_reference, 4, average, nodes=NODES)) < 3e-4


def resume(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    model, state, optimizer = attached(EVERYTHING)
    train(model, optimizer, rank, range(7))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "comm": state.state_dict()}
    saved = copy.deepcopy(saved)
    train(model, optimizer, rank, range(7, STEPS))
    went_on = local(model)
    state.average_parameters()
    together = local(model)
    model, state, optimizer = attached(EVERYTHING)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["comm"])
    train(model, optimizer, rank, range(7, STEPS))
    assert state.stats()["parameter_averages"] > 0
    return went_on, local(model), together


def test_resuming_in_the_middle_of_a_period_changes_no_bit() -> None:
    results = run(resume, 4, nodes=NODES)
    for went_on, resumed, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(went_on, resumed, strict=True))
    for shard in (0, 1):
        one, other = results[shard], results[2 + shard]
        assert not all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


def attach_over_unlike_nodes(rank: int, world_size: int) -> str:
    with pytest.raises(commopt.ConfigurationError) as raised:
        attached(LocalSGD(period=4))
    return str(raised.value)


def test_replicas_of_some_shards_inside_a_node_are_refused_on_every_rank() -> None:
    for message in run(attach_over_unlike_nodes, 4, nodes=((0, 1, 2), (3,))):
        assert "the replicas of some shards are on 1 and of others on 2 nodes; shard inside nodes" in message


def load_others(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model, state, optimizer = attached(LocalSGD(period=3, outer=NESTEROV, delay=2))
    start = copy.deepcopy(model.state_dict())
    train(model, optimizer, rank, range(4))
    assert state.state_dict()["rounds"]["underway"]
    model.load_state_dict(start)
    loaded = local(model)
    state.average_parameters()
    return loaded, local(model)


def test_a_round_under_way_does_not_change_what_the_model_has_loaded_since() -> None:
    for loaded, there in run(load_others, 4, nodes=NODES):
        assert all(torch.equal(a, b) for a, b in zip(loaded, there, strict=True))
