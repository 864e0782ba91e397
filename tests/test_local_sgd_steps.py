# SPDX-License-Identifier: Apache-2.0
"""LocalSGD counts optimizer steps, whatever a loop accumulates and drops; what would undo it is refused or told of."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import CommoptError, ConfigurationError, LocalSGD
from tests.hook_training import Tower, batch_of, digest_of, loss_of, seeded
from tests.plan_changes import heard
from tests.ranks import run
from tests.sharded_training import hsdp_mesh, local

PERIOD, MICROS, STEPS = 2, 3, 5
NODES = (2, 2)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def sharded() -> nn.Module:
    model = seeded(Tower)
    assert isinstance(model, Tower)
    for layer in model.layers[2:]:  # the root has the first two
        fully_shard(layer, mesh=hsdp_mesh())
    fully_shard(model, mesh=hsdp_mesh())
    return model


# ------------------------------------------------------------------------------ what counts


def accumulate(rank: int, world_size: int, kind: str) -> tuple[list[int], int]:
    """Return the rounds before each micro-batch, and the bytes between nodes that only the rounds can have sent."""
    model: Any = sharded() if kind == "hsdp" else TorchDDP(seeded(Tower))
    state = commopt.attach(model, LocalSGD(period=PERIOD))
    optimizer, rounds = sgd(model), list[int]()
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICROS):
            quiet = kind == "no_sync" and micro + 1 < MICROS
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss = loss_of(model, batch_of(rank, step, micro))
                rounds.append(state.stats()["parameter_averages"])
                loss.backward()
        optimizer.step()
    return rounds, state.stats()["inter_bytes"]


@pytest.mark.parametrize("kind", ["ddp", "no_sync", "hsdp"])
def test_rounds_come_every_so_many_optimizer_steps_and_never_in_an_accumulation(kind: str) -> None:
    expected = [step // PERIOD for step in range(STEPS) for _ in range(MICROS)]
    results = run(accumulate, 4, kind, nodes=NODES)
    assert [rounds for rounds, _ in results] == [expected] * 4
    numel = sum(parameter.numel() for parameter in seeded(Tower).parameters())
    assert sum(sent for _, sent in results) == 2 * 2 * 4 * numel  # two rounds, all to and from one node each


DROPPED = {"dropped on one node": 2, "dropped at first": 0}


def unusual_loops(rank: int, world_size: int, kind: str) -> int:
    ddp = TorchDDP(seeded(Tower))
    state = commopt.attach(ddp, LocalSGD(period=PERIOD))
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.01, max_iter=3) if kind == "closure" else sgd(ddp)
    if kind == "by hand":
        del optimizer
    for step in range(STEPS):

        def closure(step: int = step) -> Any:
            ddp.zero_grad()
            loss = loss_of(ddp, batch_of(rank, step))
            loss.backward()
            return loss

        if kind == "closure":
            optimizer.step(closure)
            continue
        closure()
        if kind == "by hand":
            with torch.no_grad():
                for parameter in ddp.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.01 * parameter.grad)
        elif kind == "two" or not (rank < 2 and step == DROPPED[kind]):  # by the first node alone
            optimizer.step()
            if kind == "two":
                optimizer.step()
    state.average_parameters()
    return int(state.stats()["parameter_averages"])


@pytest.mark.parametrize("kind", ["by hand", "closure", "two", *DROPPED])
def test_loops_by_hand_with_closures_and_with_steps_that_one_node_drops(kind: str) -> None:
    assert run(unusual_loops, 4, kind, nodes=NODES) == [3] * 4  # after 2 and 4 steps, and in the end


def accumulate_longer(rank: int, world_size: int, clears: str) -> int:
    """Return how many steps are counted of ten, the first five of one backward and then of three."""
    ddp = TorchDDP(seeded(Tower))
    state, optimizer = commopt.attach(ddp, LocalSGD(period=100)), sgd(ddp)
    for step in range(10):
        for micro in range(1 if step < 5 else 3):
            loss = loss_of(ddp, batch_of(rank, step, micro))
            if micro == 0 and clears == "behind the forward":
                optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        if clears == "in place":
            optimizer.zero_grad(set_to_none=False)
    loss_of(ddp, batch_of(rank, 0))
    assert state._registration.averages is not None
    return state._registration.averages.steps


@pytest.mark.parametrize("clears", ["in place", "behind the forward"])
def test_a_longer_accumulation_is_taken_for_dropped_steps_once(clears: str) -> None:
    assert run(accumulate_longer, 2, clears, nodes=(1, 1)) == [10 + 2] * 2


def resume_while_accumulating(rank: int, world_size: int) -> list[int]:
    """Save after three steps of two averaged backwards; the round after four comes at its time."""

    def made() -> tuple[TorchDDP, commopt.HookState, torch.optim.Optimizer]:
        ddp = TorchDDP(seeded(Tower))
        return ddp, commopt.attach(ddp, LocalSGD(period=4)), sgd(ddp)

    def train(ddp: TorchDDP, optimizer: torch.optim.Optimizer, state: commopt.HookState, steps: range) -> list[int]:
        rounds = []
        for step in steps:
            for micro in range(2):
                loss_of(ddp, batch_of(rank, step, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds.append(state.stats()["parameter_averages"])
        return rounds

    ddp, state, optimizer = made()
    train(ddp, optimizer, state, range(3))
    model, saved = ddp.module.state_dict(), state.state_dict()
    ddp, state, optimizer = made()
    ddp.module.load_state_dict(model)
    state.load_state_dict(saved)
    return train(ddp, optimizer, state, range(3, 7))


def save_behind_a_dropped_step(rank: int, world_size: int) -> tuple[bool, int]:
    """The first node drops a step behind an average; the state that is saved then is loaded on all ranks."""
    ddp = TorchDDP(seeded(Tower))
    state, optimizer = commopt.attach(ddp, LocalSGD(period=4)), sgd(ddp)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
        if rank > 0 or step < 2:
            optimizer.step()
        if step == 1:
            state.average_parameters()
    differ, saved = state.nodes_differ, state.state_dict()
    ddp = TorchDDP(ddp.module)
    state = commopt.attach(ddp, LocalSGD(period=4))
    state.load_state_dict(saved)
    assert state._registration.averages is not None
    return differ, state._registration.averages.steps


def test_a_state_saved_behind_a_step_that_one_node_dropped_is_loaded() -> None:
    assert run(save_behind_a_dropped_step, 2, nodes=(1, 1)) == [(True, 3)] * 2


def test_a_resumed_run_has_its_rounds_after_the_same_optimizer_steps() -> None:
    assert run(resume_while_accumulating, 2, nodes=(1, 1)) == [[0, 1, 1, 1]] * 2


# ------------------------------------------------------------------------------ what is refused


class SendsParameters(torch.optim.SGD):
    """Known to nobody by its name."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.broadcast(parameter.data, 0)


def wrapped(module: nn.Module) -> Any:
    averager = PeriodicModelAverager(period=4, warmup_steps=100)
    return PostLocalSGDOptimizer(torch.optim.SGD(module.parameters(), lr=0.01), averager)


def zero(module: nn.Module, group: Any = None) -> Any:
    kind = torch.optim.Adam
    return ZeroRedundancyOptimizer(module.parameters(), kind, process_group=group, lr=0.01)


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "ZeroRedundancyOptimizer": zero,
    "PostLocalSGDOptimizer": wrapped,
    "SendsParameters": lambda module: SendsParameters(module.parameters(), lr=0.01),
}


def step_once(rank: int, world_size: int, name: str) -> str:
    ddp = TorchDDP(seeded(Tower))
    commopt.attach(ddp, LocalSGD(period=PERIOD))
    if name == "in backward":
        optimizer = sgd(ddp)
        next(ddp.parameters()).register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    else:
        optimizer = REFUSED[name](ddp)

    def step() -> None:
        loss_of(ddp, batch_of(rank, 0)).backward()
        optimizer.step()

    with pytest.raises(ConfigurationError) as info:
        step()
    return str(info.value)


@pytest.mark.parametrize("name", [*REFUSED, "in backward"])
def test_an_optimizer_that_communicates_is_refused_by_name_in_its_first_step(name: str) -> None:
    for message in run(step_once, 2, name, nodes=(1, 1)):
        assert message.startswith("SGD steps in backward" if name == "in backward" else f"{name} communicates")
        assert "LocalSGD(period=2)" in message


def train_what_no_round_averages(rank: int, world_size: int, kind: str, average: LocalSGD) -> str:
    module = seeded(Tower)
    assert isinstance(module, Tower)
    ddp = TorchDDP(module, find_unused_parameters=True)
    first = module.layers[0]
    first.requires_grad_(kind == "on one rank" and rank == 0)
    if kind == "another module":
        first.requires_grad_(True)
        ddp.register_comm_hook(commopt.HookState(average, module=seeded(Tower)), commopt.hook)
    else:
        commopt.attach(ddp, average)
    optimizer = sgd(ddp)

    def trained() -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, batch_of(rank, step)).backward()
            optimizer.step()
            if kind == "thawed":
                first.requires_grad_(True)

    with pytest.raises(CommoptError) as info:
        trained()
    return f"{type(info.value).__name__}: {info.value}"


@pytest.mark.parametrize("average", [LocalSGD(PERIOD), LocalSGD(PERIOD, compressor=commopt.OneBit())], ids=str)
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("thawed", "ConfigurationError: parameter 'layers.0.weight' (2 in all) is trained, and was frozen at attach"),
        ("another module", "ConfigurationError: parameter 'parameter "),
        ("on one rank", "20800 elements of 10 tensors"),
    ],
)
def test_nodes_that_would_part_without_a_word_are_stopped(kind: str, named: str, average: LocalSGD) -> None:
    for message in run(train_what_no_round_averages, 2, kind, average, nodes=(1, 1), timeout_s=30.0):
        assert named in message


def freeze_on_the_way(rank: int, world_size: int, anew: bool) -> float:
    """Return how far a layer moves once it is frozen."""
    average = LocalSGD(PERIOD, outer=commopt.Outer(0.7, 0.9), compressor=commopt.OneBit())
    module = seeded(Tower)
    assert isinstance(module, Tower)
    ddp, first = TorchDDP(module, find_unused_parameters=True), module.layers[0]
    state, optimizer = commopt.attach(ddp, average), sgd(ddp)

    def train(steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(ddp, batch_of(rank, step)).backward()
            optimizer.step()

    train(range(4))
    state.average_parameters()
    first.requires_grad_(False)
    before = digest_of(first), next(first.parameters()).detach().clone()
    if anew:
        state.close()
        ddp = TorchDDP(module)
        commopt.attach(ddp, average)
    train(range(4, 12))
    moved = float((next(first.parameters()).detach() - before[1]).abs().max())
    assert (moved == 0) == (digest_of(first) == before[0])
    return moved


def test_a_layer_that_is_frozen_stands_still_once_it_is_attached_anew() -> None:
    assert run(freeze_on_the_way, 3, True, nodes=(2, 1)) == [0.0] * 3
    assert min(run(freeze_on_the_way, 2, False, nodes=(1, 1))) > 0  # as docs/periodic.md says


def share_inside_the_node(rank: int, world_size: int) -> int:
    node = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    ddp = TorchDDP(seeded(Tower))
    state = commopt.attach(ddp, LocalSGD(period=PERIOD))
    optimizer = zero(ddp, node)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
        optimizer.step()
    return int(state.stats()["parameter_averages"])


def test_one_that_communicates_inside_the_node_alone_is_welcome() -> None:
    assert run(share_inside_the_node, 4, nodes=NODES) == [2] * 4


def hold_the_same(rank: int, world_size: int, batches_differ: bool) -> list[str]:
    ddp = TorchDDP(seeded(Tower))
    commopt.attach(ddp, LocalSGD(period=PERIOD, outer=commopt.Outer(lr=0.7)))  # which begins with what all hold
    optimizer = sgd(ddp)
    with heard() as said:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(ddp, batch_of(rank if batches_differ else 0, step)).backward()
            optimizer.step()
            if batches_differ and world_size == 3:  # a wrapper that nobody knows
                for parameter in ddp.parameters():
                    dist.broadcast(parameter.data, 0)
    return [text for _, text in said if "the same parameters" in text]


def test_nodes_that_hold_the_same_where_they_should_not_are_told_of_once_on_every_rank() -> None:
    assert [len(texts) for texts in run(hold_the_same, 2, False, nodes=(1, 1))] == [1, 1]
    assert [len(texts) for texts in run(hold_the_same, 2, True, nodes=(1, 1))] == [0, 0]
    assert [len(texts) for texts in run(hold_the_same, 3, True, nodes=(1, 1, 1))] == [1, 1, 1]


# ------------------------------------------------------------------------------ other parameters than there were


def resume_with_another_model(rank: int, world_size: int, averaged: bool) -> list[str]:
    """Do as frameworks do: the model of the first rank for all, and each rank's own state."""
    ddp = TorchDDP(seeded(Tower))
    state, optimizer = commopt.attach(ddp, LocalSGD(period=8)), sgd(ddp)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
        optimizer.step()
    if averaged:
        state.average_parameters()
    saved, model = state.state_dict(), [ddp.module.state_dict()]
    dist.broadcast_object_list(model, 0)
    ddp = TorchDDP(seeded(Tower))
    state = commopt.attach(ddp, LocalSGD(period=8))
    state.load_state_dict(saved)
    ddp.module.load_state_dict(model[0])  # after the state: it is the first step that counts
    with heard() as said:
        loss_of(ddp, batch_of(rank, 3)).backward()
    return [text for _, text in said if "other parameters" in text]


def test_a_state_that_goes_on_with_other_parameters_is_told_of_with_the_remedy() -> None:
    for texts in run(resume_with_another_model, 2, False, nodes=(1, 1)):
        (text,) = texts
        assert text.startswith("rank 1 goes on with other parameters")
        assert "average_parameters()" in text
    assert run(resume_with_another_model, 2, True, nodes=(1, 1)) == [[], []]


# ------------------------------------------------------------------------------ HSDP


def evaluate_between(rank: int, world_size: int) -> tuple[list[list[Tensor]], list[float], str]:
    """Evaluate, average, evaluate, train: FSDP's root keeps its parameters gathered after an evaluation."""
    model = sharded()
    state, optimizer = commopt.attach(model, LocalSGD(period=PERIOD)), sgd(model)

    def evaluated() -> float:
        with torch.no_grad():
            return float(loss_of(model, batch_of(0, 99)))

    held, losses = [], []
    for step in range(STEPS):
        loss_of(model, batch_of(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(evaluated())  # the rounds after 2 and 4 steps begin behind one
    state.average_parameters()
    held.append([parameter.detach().clone() for parameter in local(model)])
    losses.append(evaluated())
    loss_of(model, batch_of(rank, STEPS)).backward()
    whole = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
    return held, losses, digest_of(nn.ParameterList(whole))


def test_hsdp_evaluates_and_trains_with_what_an_average_has_left() -> None:
    results = run(evaluate_between, 4, nodes=NODES)
    assert len({digest for *_, digest in results}) == 1  # read after an evaluation, between nodes too
    assert len({losses[-1] for _, losses, _ in results}) == 1
    assert len({losses[-2] for _, losses, _ in results}) == 2  # and before, each node its own
