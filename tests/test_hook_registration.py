# SPDX-License-Identifier: Apache-2.0
"""Every way to put a preset on a DDP model trains alike, and the hook tells what it did."""

from __future__ import annotations

import copy
import pickle
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import ConfigurationError
from tests.hook_training import REPRESENTATIVES, SMALL_BUCKET, WAYS, Tower, batch_of, loss_of, seeded, train
from tests.ranks import run


def train_each_way(rank: int, world_size: int, preset: str) -> dict[str, str]:
    aggregator = commopt.PRESETS[preset].build()
    digests = {}
    for name, register in WAYS.items():
        ddp = register(seeded(Tower), preset, **SMALL_BUCKET)
        digests[name] = train(ddp, rank, world_size, aggregator, steps=3)
    return digests


@pytest.mark.parametrize("preset", REPRESENTATIVES)
def test_every_way_to_register_trains_alike(preset: str) -> None:
    digests = run(train_each_way, 4, preset, nodes=(2, 2))
    assert len({digest for mine in digests for digest in mine.values()}) == 1, digests


def register_before_there_is_a_group(rank: int, world_size: int, folder: str) -> list[str]:
    """As frameworks do, which take a state and a hook when they are configured and register them themselves."""
    dist.destroy_process_group()
    states = [commopt.HookState(), pickle.loads(pickle.dumps(commopt.HookState()))]
    assert states[0].stats()["cluster"] == "not joined yet"
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world_size)
    assert vars(commopt.hierarchical)["__qualname__"] == "hierarchical"
    digests = []
    for kind in (TorchDDP, commopt.DistributedDataParallel):
        for state in copy.deepcopy(states):
            ddp = kind(seeded(Tower), **SMALL_BUCKET)
            ddp.register_comm_hook(state=state, hook=commopt.hierarchical)
            digests.append(train(ddp, rank, world_size, commopt.Hierarchical(), steps=3))
            assert state.stats()["steps"] == 3
    return digests


def test_a_state_made_before_the_process_group(tmp_path: Path) -> None:
    results = run(register_before_there_is_a_group, 2, str(tmp_path), nodes=(1, 1))
    assert len({digest for mine in results for digest in mine}) == 1


def register_on_a_subgroup(rank: int, world_size: int) -> tuple[int, ...]:
    state = pickle.loads(pickle.dumps(commopt.HookState()))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = commopt.DistributedDataParallel(seeded(Tower), process_group=pairs[rank // 2])
    ddp.register_comm_hook(state, commopt.flat)
    return tuple(state.membership.ranks)


def test_a_state_that_has_not_joined_takes_the_group_of_its_model() -> None:
    assert run(register_on_a_subgroup, 4) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def close_a_state(rank: int, world_size: int) -> None:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "hierarchical")
    train(ddp, rank, world_size, commopt.Hierarchical(), steps=3)
    state.close()
    assert state.membership.team.closed
    assert state.stats()["steps"] == 3
    with pytest.raises(ConfigurationError, match="HookState 0 was closed"):
        loss_of(ddp, batch_of(rank, 0)).backward()
    saved = state.state_dict()
    with pytest.raises(ConfigurationError, match=r"HookState 0 was closed, and this is its gathered_state_dict; make"):
        state.gathered_state_dict()
    with pytest.raises(ConfigurationError, match=r"HookState 0 was closed, and this is its load_state_dict; make"):
        state.load_state_dict(saved)
    state = commopt.HookState()
    state.close()
    with pytest.raises(ConfigurationError, match="HookState 0 was closed, and this is its first bucket; make"):
        state._registration.decide(commopt.Flat(), "flat")


def test_a_closed_state() -> None:
    run(close_a_state, 2, fresh=True)


def attach_in_vain(rank: int, world_size: int) -> None:
    singles = [dist.new_group([each]) for each in range(world_size)]
    ddp = TorchDDP(seeded(Tower), process_group=singles[rank])
    with pytest.raises(ConfigurationError, match="the HookState spans ranks"):
        commopt.attach(ddp, "flat", process_group=dist.group.WORLD)
    last = commopt.Communicator()
    last.close()
    assert last._membership.team.closed, "the state that no model got still counts"
    state = commopt.attach(ddp, "flat")
    loss_of(ddp, batch_of(rank, 0)).backward()
    assert state.stats()["steps"] == 1


def test_a_state_that_no_model_got_holds_no_groups() -> None:
    run(attach_in_vain, 2)


def look_at_statistics(rank: int, world_size: int) -> dict[str, Any]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "hierarchical")
    train(ddp, rank, world_size, commopt.Hierarchical(), steps=3)
    return state.stats()


def test_statistics_count_steps_buckets_and_bytes() -> None:
    stats = run(look_at_statistics, 4, nodes=(2, 2))
    numel = sum(parameter.numel() for parameter in Tower().parameters())
    for mine in stats:
        assert mine["steps"] == 3
        assert mine["buckets"] >= 1 + 3 * 2, "the first step is one bucket, later ones have several"
    # 2 (N-1)/N of the gradient leaves each of two nodes
    assert sum(mine["inter_bytes"] for mine in stats) == 3 * 2 * numel * 4


def refuse_what_skips_buckets(rank: int, world_size: int) -> str:
    ddp = TorchDDP(seeded(Tower), find_unused_parameters=True, skip_all_reduce_unused_params=True)
    with pytest.raises(ConfigurationError) as info:
        commopt.attach(ddp, "flat")
    return str(info.value)


@pytest.mark.skipif("skip_all_reduce_unused_params" not in signature(TorchDDP).parameters, reason="torch 2.10")
def test_buckets_that_ddp_skips_would_move_the_ends_of_steps() -> None:
    (message,) = run(refuse_what_skips_buckets, 1)
    assert "skip_all_reduce_unused_params=True" in message


def delay_some(rank: int, world_size: int) -> tuple[str, list[float]]:
    """Return what is said where DDP averages some gradients past the hook, and the mean magnitudes of the others."""
    module = seeded(Tower)
    (first, weight), (second, bias), *others = module.named_parameters()
    delayed: dict[str, Any] = {
        "delay_all_reduce_named_params": [(first, weight), (second, bias)],
        "param_to_hook_all_reduce": bias,
    }
    ddp = TorchDDP(module, **delayed)
    state = commopt.attach(ddp, "hierarchical_onebit", adam=True)
    with pytest.raises(ConfigurationError) as info:
        state.optimizer(ddp.parameters(), 0.001)
    optimizer = state.optimizer([each for _, each in others], 0.001)
    for step in range(2):
        ddp.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
        optimizer.step()
    return str(info.value), [float(each.grad.abs().mean()) for _, each in others if each.grad is not None]


def test_gradients_that_ddp_averages_past_the_hook_are_no_directions() -> None:
    for message, magnitudes in run(delay_some, 2, nodes=(1, 1)):
        assert "2 of 12 parameters" in message
        assert all(0.3 < each < 3 for each in magnitudes)
