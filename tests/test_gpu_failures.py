# SPDX-License-Identifier: Apache-2.0
"""A failure on one rank becomes an error on all within seconds over NCCL too, where kernels run ahead of the host.

A rank whose kernels wait for the failed one has no error yet: its step may end with what was never reduced, and its
next call raises. So the others go on, as a training loop does, until they are told.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Aggregator, Communicator, Hierarchical
from commopt.groups import levels as level_groups
from commopt.groups import team
from commopt.lanes import stream
from tests.ranks import run
from tests.speed import limit
from tests.test_failures import Failing, Seen, assert_all_know, watch

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# The lane's watcher looks twice a second; the rest is for the abort of communicators whose ranks share a GPU.
WITHIN_S = limit(15.0)


def over_nccl(*case: object) -> Any:
    """Return a case that needs a GPU."""
    return pytest.param("cuda", *case, marks=MARKS)


def as_with_nccl() -> Any:
    """Let commopt take gloo's groups for NCCL's too."""
    return patch.object(level_groups, "_backends", lambda parent: {"cpu": "gloo", "cuda": "nccl"})


def go_on(step: Callable[[], object], device: str) -> None:
    """Take steps until one raises; the host waits for each, as it does to print a loss."""
    deadline = time.monotonic() + 2 * WITHIN_S
    while time.monotonic() < deadline:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        time.sleep(0.01)


def seen_by(step: Callable[[], object], folder: str, rank: int, world_size: int, device: str) -> Seen:
    """Go on until there is an error, then end the world."""
    seen = watch(lambda: go_on(step, device), folder, rank, world_size)
    end_the_world(device)
    return seen


def end_the_world(device: str) -> None:
    """Abort what is left of NCCL, which is not freed: that waits for threads of torch that have seen the error."""
    if device == "cuda":
        team._abort(c10d._get_default_group())


def fail_standalone(rank: int, world_size: int, folder: str, aggregator: Aggregator, device: str) -> Seen:
    comm = Communicator()
    comm.all_reduce(torch.ones(40_000, device=device), aggregator=aggregator)
    Failing.armed = True
    values = torch.ones(40_000, device=device)
    return seen_by(lambda: comm.all_reduce(values, aggregator=aggregator), folder, rank, world_size, device)


@pytest.mark.parametrize(
    ("device", "aggregator", "culprit"),
    [
        ("cpu", Hierarchical(inter=Failing(3), form="reduce_scatter"), 3),
        over_nccl(Failing(0), 0),
        over_nccl(Hierarchical(inter=Failing(3), form="reduce_scatter"), 3),  # ranks 0, 2 are in another inter group
        over_nccl(Hierarchical(inter=Failing(2), form="leader"), 2),  # ranks 1 and 3 take no part in it
    ],
    ids=["cpu", "flat", "inter, reduce_scatter", "inter, leader"],
)
def test_standalone(device: str, aggregator: Aggregator, culprit: int, tmp_path: Path) -> None:
    arguments = (str(tmp_path), aggregator, device)
    seen = run(fail_standalone, 4, *arguments, nodes=(2, 2), device=device, fresh=True)
    assert_all_know(seen, culprit, WITHIN_S)


def fail_in_backward(rank: int, world_size: int, folder: str, aggregator: Aggregator, device: str) -> Seen:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).to(device)
    ddp = TorchDDP(module, bucket_cap_mb=0.02)
    commopt.attach(ddp, aggregator)
    values = torch.randn(2, 64, device=device)
    for _ in range(3):
        ddp(values).sum().backward()
    Failing.armed = True
    return seen_by(lambda: ddp(values).sum().backward(), folder, rank, world_size, device)


@pytest.mark.parametrize(
    ("device", "aggregator", "culprit"),
    [
        ("cpu", Failing(1), 1),
        over_nccl(Hierarchical(inter=Failing(0), form="reduce_scatter"), 0),
    ],
    ids=["cpu", "inter leg"],
)
def test_backward(device: str, aggregator: Aggregator, culprit: int, tmp_path: Path) -> None:
    arguments = (str(tmp_path), aggregator, device)
    seen = run(fail_in_backward, 4, *arguments, nodes=(2, 2), device=device, fresh=True)
    assert_all_know(seen, culprit, WITHIN_S)


# ------------------------------------------------------------------------------ processes that die


def lose_a_rank(rank: int, world_size: int, victim: int, device: str) -> tuple[str, float]:
    """Kill one rank; the others never wait for the GPU, where a kernel may wait for the dead for ever."""
    comm = Communicator()
    values = torch.ones(10_000, device=device)
    comm.all_reduce(values)
    if device == "cuda":
        torch.cuda.synchronize()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started, message = time.monotonic(), "no error"
    while time.monotonic() < started + 2 * WITHIN_S:
        try:
            comm.all_reduce(values)
        except commopt.LaneError as error:
            message = str(error)
            break
        time.sleep(0.1)
    seconds = time.monotonic() - started
    time.sleep(3)  # a rank that went at once would be taken for another dead one
    end_the_world(device)
    return message, seconds


@pytest.mark.parametrize(
    ("device", "victim", "nodes"),
    [("cpu", 1, (2,)), over_nccl(1, (2,)), over_nccl(3, (2, 2))],
    ids=["cpu", "one level", "two levels"],
)
def test_a_killed_process(device: str, victim: int, nodes: tuple[int, ...]) -> None:
    """Survivors that wait for their GPU instead are ended by torch, a minute after the loss."""
    arguments = (lose_a_rank, sum(nodes), victim, device)
    results: list[Any] = run(*arguments, nodes=nodes, device=device, dies=(victim,), fresh=True)
    for rank, result in enumerate(results):
        if rank != victim:
            message, seconds = result
            assert f"from rank {victim} " in message, f"rank {rank}: {message}"
            assert seconds < WITHIN_S, f"rank {rank} took {seconds:.1f} s"


# ------------------------------------------------------------------------------ how groups end, without a GPU


def abort_at_once(rank: int, world_size: int) -> None:
    """Have every abort wait for those of the other levels, as one does whose kernels are queued behind theirs."""
    together = threading.Barrier(3)
    pinned: list[str] = []
    gone: list[str] = []

    def abort(group: dist.ProcessGroup) -> None:
        together.wait(timeout=10)
        gone.append(group.group_name)
        dist.destroy_process_group(group)

    with as_with_nccl():
        levels = Communicator()._membership.team
    pin = patch.object(team, "_keep_forever", lambda group: pinned.append(group.group_name))
    with patch.object(c10d, "_abort_process_group", abort), pin:
        levels.close()
    assert levels.closed
    assert len(gone) == 3
    assert sorted(pinned) == sorted(gone), "to free one may take a minute"
    levels.close()
    assert len(gone) == 3


def test_all_levels_are_aborted_at_once_and_never_freed() -> None:
    run(abort_at_once, 4, nodes=(2, 2), fresh=True)


def give_up_on_an_abort(rank: int, world_size: int) -> None:
    never = threading.Event()
    with as_with_nccl():
        levels = Communicator()._membership.team
    pin, limit = patch.object(team, "_keep_forever", lambda group: None), patch.object(team, "_ABORT_LIMIT_S", 0.3)
    started = time.monotonic()
    with patch.object(c10d, "_abort_process_group", lambda group: never.wait(60)), pin, limit:
        levels.close()
    assert levels.closed
    assert time.monotonic() - started < 30
    never.set()


def test_an_abort_that_does_not_end_is_left_to_itself() -> None:
    run(give_up_on_an_abort, 4, nodes=(2, 2), fresh=True)


def be_cut_off_from_the_store(rank: int, world_size: int) -> None:
    """Work is queued on the stream, whose kernels would wait for ever, and nobody can be asked why."""
    membership, never = Communicator(timeout=1)._membership, threading.Event()
    membership.store._connection._requests.put((Future(), lambda: never.wait(60)))
    with patch.object(torch.cuda, "Stream", lambda *arguments, **options: SimpleNamespace(query=lambda: False)):
        lane = stream.StreamLane(torch.device("cuda", 0))
    deadline = time.monotonic() + 30
    while not membership.team.closed and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(commopt.LaneError, match="the rendezvous store has not answered"):
        lane.require_healthy()
    assert membership.team.closed
    with patch.object(stream, "_CLOSE_TIMEOUT_S", 0.1):
        lane.close()
    never.set()


def test_a_rank_cut_off_from_the_store_ends_its_kernels_itself() -> None:
    run(be_cut_off_from_the_store, 2, fresh=True)
