# SPDX-License-Identifier: Apache-2.0
"""The spawn helper itself: results, tracebacks, timeouts, environment, emulated nodes, worker replacement."""

from __future__ import annotations

import os
import signal
import time
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run
from tests.speed import limit


def add_up(rank: int, world_size: int, start: int, *, step: int = 1) -> tuple[int, float]:
    total = torch.tensor(float(start + step * rank))
    dist.all_reduce(total)
    return rank, total.item()


def process_id(rank: int, world_size: int) -> int:
    return os.getpid()


def fail_on(rank: int, world_size: int, culprits: tuple[int, ...]) -> None:
    if rank in culprits:
        raise ZeroDivisionError(f"rank {rank} cannot divide" if len(culprits) == 1 else "cannot divide")


def fail_while_peers_wait(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ZeroDivisionError("rank 0 leaves")
    dist.barrier()


def sleep_soundly(rank: int, world_size: int) -> int:
    if rank == 1:
        time.sleep(600)
    return rank


def read_env(rank: int, world_size: int, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def leave_settings(rank: int, world_size: int) -> None:
    os.environ.update(COMMOPT_RANKS_PER_NODE="7", NCCL_HOSTID="elsewhere")


def die(rank: int, world_size: int, victim: int) -> int:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def unpicklable(rank: int, world_size: int) -> object:
    return lambda: rank


def raise_keyboard_interrupt(rank: int, world_size: int) -> NoReturn:
    raise KeyboardInterrupt("inside a rank")


def test_results_come_in_rank_order() -> None:
    assert run(add_up, 3, 10, step=2) == [(rank, 36.0) for rank in range(3)]


def test_workers_are_kept_and_fresh_ones_are_not() -> None:
    before = run(process_id, 2)
    assert run(process_id, 3)[:2] == before, "old ones, in their old ranks"
    fresh = run(process_id, 2, fresh=True)
    assert not set(fresh) & set(before)
    assert run(process_id, 2) == before


def test_exception_shows_traceback_and_rank_and_replaces_workers() -> None:
    before = run(process_id, 2)
    with pytest.raises(RankError, match=r"(?s)1 of 2 ranks.*rank 1 raised.*fail_on.*rank 1 cannot divide") as info:
        run(fail_on, 2, (1,))
    assert list(info.value.errors) == [1]
    assert not set(run(process_id, 2)) & set(before)


def test_peers_of_a_failed_rank_do_not_cost_the_timeout() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 0 leaves") as info:
        run(fail_while_peers_wait, 2, timeout_s=300)
    assert time.monotonic() - started < limit(30)
    assert list(info.value.errors)[0] == 0, "the cause comes first"  # noqa: RUF015


def test_timeout_names_the_hung_rank_and_where_it_is() -> None:
    pids = run(process_id, 2)
    with pytest.raises(RankError, match=rf"(?s)rank 1 was still running after {limit(1):g} s.*sleep_soundly") as info:
        run(sleep_soundly, 2, timeout_s=1)
    assert list(info.value.errors) == [1]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_env_is_set_unset_and_restored() -> None:
    assert run(read_env, 2, "COLOUR", env={"COLOUR": "red"}) == [["red"], ["red"]]
    before = run(process_id, 2)
    run(leave_settings, 2)
    assert run(read_env, 2, "COLOUR", "OMP_NUM_THREADS", "COMMOPT_RANKS_PER_NODE") == [[None, "1", None]] * 2
    assert run(process_id, 2) == before, "the very same processes"
    assert run(read_env, 2, "OMP_NUM_THREADS", env={"OMP_NUM_THREADS": None}) == [[None]] * 2


def test_nodes_set_nccl_hostid() -> None:
    (a,), (b,), (c,) = run(read_env, 3, "NCCL_HOSTID", nodes=(2, 1))
    assert a == b != c
    (a,), (b,), (c,) = run(read_env, 3, "NCCL_HOSTID", nodes=((0, 2), (1,)))
    assert a == c != b
    assert run(read_env, 2, "NCCL_HOSTID") == [[None]] * 2


@pytest.mark.parametrize(
    ("nodes", "device", "message"),
    [
        ((1, 1), "cpu", "each of the 3 ranks once"),
        (((0, 1), (1, 2)), "cpu", "each of the 3 ranks once"),
        ((2, 1), "cuda", "equal blocks"),  # told by COMMOPT_RANKS_PER_NODE; no GPU is asked for
    ],
)
def test_nodes_that_cannot_be(nodes: tuple[int, ...], device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(process_id, 3, nodes=nodes, device=device)


def look_at_cuda(rank: int, world_size: int) -> tuple[bool, str, str | None, float]:
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    name = dist.get_backend()
    ranks_per_node = os.environ.get("COMMOPT_RANKS_PER_NODE")
    return torch.cuda._is_in_bad_fork(), name, ranks_per_node, total.sum().item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ranks_share_a_gpu_over_nccl() -> None:
    assert run(look_at_cuda, 4, nodes=(2, 2), device="cuda") == [(False, "nccl", "2", 12.0)] * 4
    assert run(look_at_cuda, 2, device="cuda") == [(False, "nccl", "2", 6.0)] * 2
    hosts = run(read_env, 4, "NCCL_HOSTID", device="cuda")
    assert len({host for (host,) in hosts}) == 4, "NCCL refuses a GPU twice on one host"


def test_a_dead_rank_is_an_error_unless_expected() -> None:
    with pytest.raises(RankError, match=r"rank 1 died \(exit code -9\)"):
        run(die, 2, 1)
    assert run(die, 2, 1, dies=(1,)) == [0, None]
    with pytest.raises(RankError, match="expected to die"):
        run(die, 2, 5, dies=(1,))


def test_odd_failures_are_reported() -> None:
    with pytest.raises(RankError, match="rank 0 raised"):
        run(unpicklable, 1)
    with pytest.raises(RankError, match="KeyboardInterrupt: inside a rank"):
        run(raise_keyboard_interrupt, 1)
