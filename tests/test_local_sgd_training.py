# SPDX-License-Identifier: Apache-2.0
"""LocalSGD in training loops: what the nodes hold, step by step, and when they meet."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import LocalSGD
from commopt.groups import Team
from tests.hook_training import SMALL_BUCKET, WIDTH, Tower, batch_of, digest_of, loss_of, seeded
from tests.local_sgd_reference import Reference, optimizer_of
from tests.ranks import run

AVERAGE = LocalSGD(period=3, start_step=2)
STEPS = 9
# Forwards, by the steps before them, that see the same parameters on all nodes.
TOGETHER = {0, 1, 2, 5, 8}


class Watched(Tower):
    """Notes what every forward with gradients begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen.append(digest_of(self))
        return super().forward(x)


def attached(**options: Any) -> tuple[Watched, TorchDDP, commopt.HookState]:
    module = seeded(Watched)
    assert isinstance(module, Watched)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    return module, ddp, commopt.attach(ddp, AVERAGE, **options)


def step_on(ddp: TorchDDP, optimizer: torch.optim.Optimizer, rank: int, step: int, micros: int = 1) -> None:
    optimizer.zero_grad()
    for micro in range(micros - 1):
        with ddp.no_sync():
            loss_of(ddp, batch_of(rank, step, micro)).backward()
    loss_of(ddp, batch_of(rank, step, micros - 1)).backward()
    optimizer.step()


# ---------------------------------------------------------------------------------- against a reference


def beside_reference(rank: int, world_size: int, nodes: Sequence[int], micros: int) -> tuple[list[str], dict[str, Any]]:
    module, ddp, state = attached()
    optimizer = optimizer_of(ddp)
    reference = Reference(module, nodes, AVERAGE)
    # After commopt's own: it runs when the parameters are averaged.
    module.register_forward_pre_hook(
        lambda module, inputs: reference.assert_alike(module, rank) if torch.is_grad_enabled() else None
    )
    for step in range(STEPS):
        step_on(ddp, optimizer, rank, step, micros)
        reference.step(micros)
        if rank == 0:  # one rank evaluates alone: no average may wait in there
            with torch.no_grad():
                module(*batch_of(rank, step))
        dist.barrier()
    state.average_parameters()
    return [*module.seen[::micros], digest_of(module)], state.stats()


@pytest.mark.parametrize(
    ("nodes", "micros", "check"),
    [((2, 2), 2, "1"), ((2, 1), 1, "0"), ((1, 1), 1, "0")],
    ids=["2x2 accumulating", "2+1", "1+1"],
)
def test_nodes_learn_by_themselves_and_meet(nodes: Sequence[int], micros: int, check: str) -> None:
    results = run(beside_reference, sum(nodes), nodes, micros, nodes=nodes, env={"COMMOPT_CHECK": check})
    digests = [seen for seen, _ in results]
    node_of = [node for node, count in enumerate(nodes) for _ in range(count)]
    for steps, held in enumerate(zip(*digests, strict=True)):
        by_node = {node: {held[rank] for rank, its in enumerate(node_of) if its == node} for node in node_of}
        assert all(len(digests) == 1 for digests in by_node.values()), f"ranks of a node differ after {steps} steps"
        together = steps in TOGETHER or steps == STEPS  # average_parameters() at the end
        assert (len(set(held)) == 1) == together, f"after {steps} steps"

    # Between the nodes: gradients in the first steps, then the parameters, each time an all_reduce between two.
    numel = sum(parameter.numel() for parameter in seeded(Tower).parameters())
    stats = [stats for _, stats in results]
    assert {each["parameter_averages"] for each in stats} == {3}
    assert sum(each["inter_bytes"] for each in stats) == (AVERAGE.start_step + 3) * 2 * 4 * numel
    assert {each["steps"] for each in stats} == {STEPS}
    if max(nodes) == 1:
        assert not any(each["intra_bytes"] for each in stats)


def on_one_node(rank: int, world_size: int) -> tuple[str, str, dict[str, Any]]:
    module, ddp, state = attached()
    usual = seeded(Tower)
    usual_ddp = TorchDDP(usual, **SMALL_BUCKET)
    commopt.attach(usual_ddp, commopt.Hierarchical())
    for each in (ddp, usual_ddp):
        optimizer = optimizer_of(each)
        for step in range(STEPS):
            step_on(each, optimizer, rank, step)
    state.average_parameters()
    return digest_of(module), digest_of(usual), state.stats()


def test_on_one_node_nothing_changes() -> None:
    results = run(on_one_node, 2)
    assert len({digest for *digests, _ in results for digest in digests}) == 1
    assert all(stats["parameter_averages"] == stats["inter_bytes"] == 0 for *_, stats in results)


# ------------------------------------------------------------------------------ what training loops do


def resume(rank: int, world_size: int, stop_after: int) -> tuple[str, str]:
    """Train and go back by one forward, which may average; and begin anew. Every rank saves and loads its own."""
    module, ddp, state = attached()
    optimizer = optimizer_of(ddp)
    for step in range(stop_after):
        step_on(ddp, optimizer, rank, step)
    saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "comm": state.state_dict()}
    saved = copy.deepcopy(saved)
    ddp(*batch_of(rank, stop_after))
    module.load_state_dict(saved["model"])
    state.load_state_dict(saved["comm"])
    for step in range(stop_after, STEPS):
        step_on(ddp, optimizer, rank, step)
    resumed, ddp, state = attached()
    resumed.load_state_dict(saved["model"])  # after DDP was made, which takes rank 0's parameters
    optimizer = optimizer_of(ddp)
    optimizer.load_state_dict(saved["optimizer"])
    state.load_state_dict(saved["comm"])
    for step in range(stop_after, STEPS):
        step_on(ddp, optimizer, rank, step)
    assert state.stats()["parameter_averages"] == sum(steps >= stop_after for steps in (5, 8))
    return digest_of(module), digest_of(resumed)


@pytest.mark.parametrize("stop_after", [4, 5], ids=["between averages", "before an average"])
def test_a_resumed_run_averages_at_the_same_steps(stop_after: int) -> None:
    for went_back, resumed in run(resume, 4, stop_after, nodes=(2, 2)):
        assert went_back == resumed


def loss_scaling(rank: int, world_size: int) -> tuple[list[str], list[float], list[bool]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    module, ddp, _ = attached(scaler=scaler)
    optimizer = optimizer_of(ddp)
    scales, stepped = [], []
    for step in range(STEPS):
        batch = batch_of(rank, step)
        if step == 3 and rank == 0:
            batch = (torch.full((4, WIDTH), float("nan")),)
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, batch)).backward()
        before = digest_of(module)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(digest_of(module) != before)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    return module.seen, scales, stepped


def test_a_node_drops_a_step_alone_and_the_others_wait_for_nothing() -> None:
    results = run(loss_scaling, 4, nodes=(2, 2))
    assert [scales[3] for _, scales, _ in results] == [512, 512, 1024, 1024]
    assert [stepped.index(False) if False in stepped else None for _, _, stepped in results] == [3, 3, None, None]
    for steps, held in enumerate(zip(*(seen for seen, *_ in results), strict=True)):
        assert held[0] == held[1]
        assert held[2] == held[3]
        assert (len(set(held)) == 1) == (steps in TOGETHER)


def uneven_inputs(rank: int, world_size: int) -> tuple[str, dict[str, Any]]:
    module, ddp, state = attached()
    optimizer = optimizer_of(ddp)
    with ddp.join():
        for step in range(4 + rank):
            step_on(ddp, optimizer, rank, step)
    return digest_of(module), state.stats()


def test_ranks_that_ran_out_of_data_take_part() -> None:
    results = run(uneven_inputs, 4, nodes=(2, 2))
    assert len({digest for digest, _ in results}) == 1  # join() ends with one rank's model everywhere
    assert {stats["parameter_averages"] for _, stats in results} == {1}


def compiled(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    module = seeded(Tower)
    ddp = TorchDDP(module)
    commopt.attach(ddp, AVERAGE)
    optimizer = optimizer_of(ddp)
    forward = torch.compile(ddp, backend="eager")
    seen, frames = [], []
    for step in range(STEPS):
        loss = forward(*batch_of(rank, step)).square().sum()
        seen.append(digest_of(module))
        frames.append(counters["frames"]["total"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return seen, frames


def test_under_torch_compile_the_calendar_is_not_compiled_in() -> None:
    results = run(compiled, 2, nodes=(1, 1))
    for steps, held in enumerate(zip(*(seen for seen, _ in results), strict=True)):
        assert (len(set(held)) == 1) == (steps in TOGETHER)
    for _, frames in results:
        assert 0 < frames[4] == frames[-1], f"compiled anew as steps were counted: {frames}"


def fail_in_a_round(rank: int, world_size: int, average: LocalSGD, call: str) -> tuple[str, bool]:
    """Return the error of a round in which the last rank fails, and whether the parameters are as before it."""
    module = torch.nn.Linear(40, 30, bias=False)  # a parameter that is a message by itself
    ddp = TorchDDP(module)
    comm = commopt.attach(ddp, average)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.5)
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.full((2, 40), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
    before = module.weight.detach().clone()
    broken = patch.object(Team, "all_reduce", side_effect=RuntimeError("a cable was pulled"))
    started = patch.object(Team, "start_all_reduce", side_effect=RuntimeError("a cable was pulled"))
    with broken if rank == world_size - 1 else nullcontext(), started if rank == world_size - 1 else nullcontext():
        try:
            comm.average_parameters() if call else ddp(torch.ones(2, 40))
        except commopt.LaneError as error:
            return str(error), torch.equal(module.weight, before)
    return "", False


@pytest.mark.parametrize("call", ["", "average_parameters"])
@pytest.mark.parametrize(
    "average", [LocalSGD(period=3), LocalSGD(period=3, outer=commopt.Outer(0.7, 0.9, True))], ids=str
)
def test_a_round_that_fails_leaves_the_parameters_as_they_were(average: LocalSGD, call: str) -> None:
    for error, same in run(fail_in_a_round, 3, average, call, nodes=(1, 1, 1), fresh=True):
        assert "a cable was pulled" in error
        assert same
