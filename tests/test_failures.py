# SPDX-License-Identifier: Apache-2.0
"""A failure on one rank becomes an error on all within seconds, and a lane never keeps the interpreter alive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import commopt
from commopt import Aggregator, BufferContext, Communicator, Flat, Hierarchical
from commopt.aggregate import Action, Buffer
from commopt.cluster import EmulatedCluster
from commopt.errors import LaneError, TransportError
from commopt.groups import Membership
from commopt.lanes import failure, lane, registry
from tests.ranks import run
from tests.speed import limit

WITHIN_S = limit(5.0)
CAUSE = "disk on fire"


@dataclass(frozen=True)
class Failing(Aggregator):
    """Works on all ranks until `armed`; then raises on one of them, before it sends anything (of `numel` elements)."""

    culprit: int
    inner: Aggregator = field(default_factory=Flat)
    numel: int | None = None
    cause: str = CAUSE

    armed = False  # of this process, hence no field

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, context: BufferContext) -> None:
        if Failing.armed and dist.get_rank() == self.culprit and self.numel in (None, buffer.numel()):
            raise OSError(self.cause)
        self.inner.all_reduce(buffer, team, scale, context)

    def calls(self, buffer: Buffer, team: Any) -> tuple[Action, ...]:
        return self.inner.calls(buffer, team)

    @property
    def lossless(self) -> bool:
        return self.inner.lossless


@dataclass(frozen=True)
class Seen:
    """One rank's error, how long it took, and what a further call said."""

    message: str
    seconds: float
    afterwards: list[str]


def told(call: Callable[[], object]) -> tuple[str, float]:
    """Return what a call raises, and after how many seconds."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return str(error), time.monotonic() - started
    return "no error", time.monotonic() - started


def watch(call: Callable[[], object], folder: str, rank: int, world_size: int) -> Seen:
    """Make a call that fails, then try again; stay alive until all ranks have seen their error."""
    message, seconds = told(call)
    Path(folder, str(rank)).touch()
    deadline = time.monotonic() + 20
    while len(list(Path(folder).iterdir())) < world_size and time.monotonic() < deadline:
        time.sleep(0.02)
    again: list[Callable[[], object]] = [
        lambda: commopt.all_reduce(torch.ones(3)),
        lambda: commopt.all_reduce(torch.ones(3), async_op=True).wait(),
        Communicator,
        commopt.HookState,
    ]
    return Seen(message, seconds, [told(each)[0] for each in again])


def assert_all_know(seen: list[Seen], culprit: int, within_s: float = WITHIN_S) -> None:
    for rank, mine in enumerate(seen):
        for message in (mine.message, *mine.afterwards):
            assert CAUSE in message, f"rank {rank}: {message}"
            assert f"rank {culprit}" in message, f"rank {rank}: {message}"
        assert mine.seconds < within_s, f"rank {rank} took {mine.seconds:.1f} s"


# ------------------------------------------------------------------------------ the process lives on


def fail_in_one_of_two(rank: int, world_size: int, folder: str) -> Seen:
    """Fail among two ranks, while the third one waits for them in the world."""
    everyone, group = Communicator(), dist.new_group([0, 1])
    mine, aggregator = (everyone, Flat()) if rank == 2 else (Communicator(group), Failing(culprit=0))
    everyone.all_reduce(torch.ones(3))
    Failing.armed = True
    return watch(lambda: mine.all_reduce(torch.ones(3), aggregator=aggregator), folder, rank, world_size)


def test_whoever_waits_in_another_group_of_the_world_hears_of_it(tmp_path: Path) -> None:
    assert_all_know(run(fail_in_one_of_two, 3, str(tmp_path)), 0)


def fail_standalone(rank: int, world_size: int, folder: str, aggregator: Aggregator) -> Seen:
    comm = Communicator()
    comm.all_reduce(torch.ones(10), aggregator=aggregator)
    Failing.armed = True
    return watch(lambda: comm.all_reduce(torch.ones(40_000), aggregator=aggregator), folder, rank, world_size)


@pytest.mark.parametrize(
    ("aggregator", "culprit", "nodes"),
    [
        (Failing(0), 0, (3,)),
        (Failing(2), 2, (3,)),
        (Failing(1, Hierarchical()), 1, (2, 2)),  # before the intra leg
        (Hierarchical(inter=Failing(2), form="leader"), 2, (2, 2)),  # ranks 1 and 3 take no part in the inter leg
        (Hierarchical(inter=Failing(3), form="reduce_scatter"), 3, (2, 2)),  # 0 and 2 are in another inter group
    ],
    ids=["first", "last", "before intra", "inter, leader", "inter, reduce_scatter"],
)
def test_standalone(aggregator: Aggregator, culprit: int, nodes: tuple[int, ...], tmp_path: Path) -> None:
    assert_all_know(run(fail_standalone, sum(nodes), str(tmp_path), aggregator, nodes=nodes, fresh=True), culprit)


@pytest.mark.parametrize("secret", [None, "a secret"])
def test_an_error_whose_text_is_no_unicode(secret: str | None, tmp_path: Path) -> None:
    """As of a file whose name is not UTF-8: torch's store takes no such text."""
    environment = {"COMMOPT_SECRET": secret}
    seen = run(fail_standalone, 3, str(tmp_path), Failing(1, cause=f"{CAUSE} \udce9"), fresh=True, env=environment)
    assert_all_know(seen, 1)


def fail_in_flight(rank: int, world_size: int, folder: str) -> Seen:
    """Every handle of an operation at or after the failed one raises; those before it are fine."""
    comm, failing = Communicator(), Failing(1)
    comm.all_reduce(torch.ones(10), aggregator=failing)
    first = comm.all_reduce(torch.ones(10), op="sum", async_op=True)
    assert first.wait().tolist() == [world_size] * 10
    Failing.armed = True
    broken = comm.all_reduce(torch.ones(10), aggregator=failing, async_op=True)
    try:
        behind = [comm.broadcast(torch.ones(10), async_op=True) for _ in range(3)]
    except commopt.LaneError:
        behind = []  # the failure was quicker

    def wait_for_all() -> None:
        for handle in (*behind, broken):
            with pytest.raises(commopt.LaneError, match=CAUSE):
                handle.wait()
        with pytest.raises(Exception, match=CAUSE):
            broken.get_future().wait()
        broken.wait()

    return watch(wait_for_all, folder, rank, world_size)


def test_operations_in_flight(tmp_path: Path) -> None:
    assert_all_know(run(fail_in_flight, 3, str(tmp_path), fresh=True), 1)


def submit_while_the_lane_fails(rank: int, world_size: int, folder: str) -> Seen:
    comm, failing = Communicator(), Failing(1)
    comm.all_reduce(torch.ones(10), aggregator=failing)
    close_at_once, closed = failure._close, threading.Event()

    def close(*arguments: Any) -> None:
        close_at_once(*arguments)
        closed.set()
        time.sleep(0.5)  # the groups are gone, and what went wrong is not yet known to this rank's lane

    Failing.armed = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure, "_close", close)
        broken = comm.all_reduce(torch.ones(10), aggregator=failing, async_op=True)
        assert closed.wait(WITHIN_S)
        assert not broken.is_completed()
        return watch(lambda: comm.all_reduce(torch.ones(10), aggregator=failing), folder, rank, world_size)


def test_whoever_submits_while_the_lane_fails_hears_why(tmp_path: Path) -> None:
    assert_all_know(run(submit_while_the_lane_fails, 3, str(tmp_path), fresh=True), 1)


def fail_after_the_end_of_its_world(rank: int, world_size: int, folder: str) -> None:
    world_ended = threading.Event()

    def fail_late() -> None:
        world_ended.wait(WITHIN_S)
        raise TransportError("a peer that nobody waits for any more")

    before = Communicator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "_CLOSE_TIMEOUT_S", 0.01)
        late = before._client.run(fail_late, "late")
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/next", rank=rank, world_size=world_size)
        comm = Communicator()
    world_ended.set()
    with pytest.raises(LaneError, match="a peer that nobody waits for any more"):
        late.wait()
    assert comm.all_reduce(torch.full((10,), float(rank))).tolist() == [0.5] * 10
    dist.barrier()


def test_a_lane_of_a_destroyed_world_fails_alone(tmp_path: Path) -> None:
    run(fail_after_the_end_of_its_world, 2, str(tmp_path), fresh=True)


def backward(*losses: Tensor) -> None:
    """Call backward of all, which must raise a LaneError as it is."""
    try:
        for loss in losses:
            loss.sum().backward()
    except commopt.LaneError:
        raise
    except RuntimeError as error:
        raise AssertionError("backward raised another error than LaneError") from error


def fail_in_backward(rank: int, world_size: int, folder: str, aggregator: Aggregator) -> Seen:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    ddp = TorchDDP(module, bucket_cap_mb=0.02)
    commopt.attach(ddp, aggregator)
    for _ in range(3):
        backward(ddp(torch.randn(2, 64)))
    Failing.armed = True
    return watch(lambda: backward(ddp(torch.randn(2, 64))), folder, rank, world_size)


@pytest.mark.parametrize(
    ("aggregator", "culprit"), [(Failing(1), 1), (Hierarchical(inter=Failing(0)), 0)], ids=["flat", "inter leg"]
)
def test_backward(aggregator: Aggregator, culprit: int, tmp_path: Path) -> None:
    assert_all_know(run(fail_in_backward, 4, str(tmp_path), aggregator, nodes=(2, 2), fresh=True), culprit)


class TwoTasks(nn.Module):
    """DDP's first bucket, that of `late`, is reduced in another graph task than its last one."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.early, self.late = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.early(x)
        if self.way == "two backwards":
            return x, self.late(x.detach())
        return x, checkpoint(self.late, x, use_reentrant=True)


def fail_in_the_last_task(rank: int, world_size: int, folder: str, way: str) -> Seen:
    ddp = TorchDDP(TwoTasks(way), bucket_cap_mb=0.0001, static_graph=way == "static graph")
    commopt.attach(ddp, Failing(1, numel=ddp.module.early.weight.numel() + 8))

    def step() -> None:
        early, late = ddp(torch.ones(2, 8))
        backward(late, *([early] if way == "two backwards" else []))

    for _ in range(3):
        step()
    Failing.armed = True
    return watch(step, folder, rank, world_size)


@pytest.mark.parametrize("way", ["reentrant checkpoint", "static graph", "two backwards"])
def test_backward_in_several_graph_tasks(way: str, tmp_path: Path) -> None:
    assert_all_know(run(fail_in_the_last_task, 2, str(tmp_path), way, fresh=True), 1)


# ------------------------------------------------------------------------------ processes that die


def lose_a_rank(rank: int, world_size: int, victim: int, aggregator: Aggregator) -> tuple[str, float]:
    comm = Communicator()
    comm.all_reduce(torch.ones(10), aggregator=aggregator)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: [comm.all_reduce(torch.ones(10_000), aggregator=aggregator) for _ in range(100)])


@pytest.mark.parametrize(
    ("victim", "aggregator"), [(0, Flat()), (1, Flat()), (3, Hierarchical()), (2, Hierarchical(form="reduce_scatter"))]
)
def test_a_killed_process(victim: int, aggregator: Aggregator) -> None:
    results = run(lose_a_rank, 4, victim, aggregator, nodes=(2, 2), dies=(victim,), fresh=True)
    for rank, result in enumerate(results):
        if rank != victim:
            message, seconds = result
            assert f"from rank {victim} " in message, f"rank {rank}: {message}"
            assert seconds < 2 * WITHIN_S, f"rank {rank} took {seconds:.1f} s"


class Gathering(Flat):
    """Sends every rank's values round a ring, and leaves the buffer as it was."""

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, context: BufferContext) -> None:
        team.all_gather(buffer.new_empty(team.size * buffer.numel()), buffer)


def lose_a_neighbour(rank: int, world_size: int) -> tuple[str, float, bool]:
    """On rank 0 a connection is broken when the first receive is posted, in a function inside of a function."""
    comm, closed = Communicator(), []
    comm.all_reduce(torch.ones(10), aggregator=Gathering())
    found_out = failure._find_out

    def find_out(membership: Membership, *arguments: Any) -> str:
        group = membership.team._group
        closed.append(group is not None and group() is None)
        return found_out(membership, *arguments)

    irecv = dist.irecv

    def broken(tensor: Tensor, *arguments: Any, **how: Any) -> Any:
        if tensor.numel() == 10:  # and not while the call is compared
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
        return irecv(tensor, *arguments, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure, "_find_out", find_out)
        if rank == 0:
            patch.setattr(dist, "irecv", broken)
        message, seconds = told(lambda: comm.all_reduce(torch.ones(10), aggregator=Gathering()))
    return message, seconds, closed == [True]


def test_connections_are_closed_before_anybody_is_asked_why() -> None:
    """Rank 1 waits for rank 0: what is left of the error on rank 0 must not keep the connection open."""
    for rank, (message, seconds, closed) in enumerate(run(lose_a_neighbour, 3, fresh=True)):
        assert "all_gather over ranks (0, 1, 2) failed" in message, f"rank {rank}: {message}"
        assert closed, f"rank {rank} kept its connections while it asked the others"
        assert seconds < 2 * WITHIN_S, f"rank {rank} took {seconds:.1f} s"


def lose_a_pair(rank: int, world_size: int) -> str:
    comm = Communicator()
    comm.broadcast(torch.ones(10))

    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Application timeout caused pair closure")  # gloo's words, where another operation timed out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", closed)
        message, _ = told(lambda: comm.broadcast(torch.ones(10)))
    return message


def test_a_pair_that_gloo_closes_is_a_lost_peer_and_no_mistake_of_this_rank() -> None:
    for message in run(lose_a_pair, 2, fresh=True):
        assert "lost a peer in" in message, message
        assert "a connection between ranks that are all alive broke" in message, message


def lose_one_and_wait_for_another(rank: int, world_size: int, folder: str) -> str:
    comm = Communicator()
    comm.all_reduce(torch.ones(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        while not Path(folder, "0").exists():
            time.sleep(0.02)
    message, _ = told(lambda: comm.all_reduce(torch.ones(10)))
    Path(folder, str(rank)).touch()
    return message


def test_a_rank_that_is_only_late_is_not_called_dead(tmp_path: Path) -> None:
    results = run(lose_one_and_wait_for_another, 3, str(tmp_path), dies=(1,), fresh=True)
    for rank in (0, 2):
        assert "no sign of life from rank 1 within" in results[rank], results[rank]
        assert "rank 2, to which the connection holds, has not come to this operation" in results[rank]


def stay_away_from_backward(rank: int, world_size: int) -> tuple[str, float]:
    ddp = TorchDDP(nn.Linear(8, 8))
    commopt.attach(ddp, "flat", timeout=2)
    for _ in range(3):  # until then DDP itself talks to the other ranks, to rebuild its buckets
        ddp(torch.ones(1, 8)).sum().backward()
    if rank == 1:
        time.sleep(9)
        return "", 0.0
    return told(lambda: ddp(torch.ones(1, 8)).sum().backward())


def test_a_rank_that_stays_away_from_backward() -> None:
    results = run(stay_away_from_backward, 3, fresh=True)
    for rank in (0, 2):
        message, seconds = results[rank]
        assert "rank 1" in message, message
        assert seconds < 2 + 2 * WITHIN_S, f"rank {rank} took {seconds:.1f} s"


def requests_of_survivors(world_size: int) -> int:
    """Return what the store is asked when all ranks but the last lose a peer that says nothing."""
    store = CountingStore()
    ranks = tuple(range(world_size))
    reports: list[str] = []

    def fail(rank: int) -> None:
        place: Any = SimpleNamespace(ranks=ranks, rank=rank, closed=True, lost_ranks=list)
        nowhere: Any = None
        membership = Membership("commopt/test", lambda: None, lambda: None, nowhere, place, 60, store)  # type: ignore[arg-type]
        reports.append(str(failure.fail(membership, "all_reduce", TransportError("Connection closed by peer"))))

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in ranks[:-1]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(reports) == world_size - 1
    for report in reports:
        assert f"no sign of life from rank {world_size - 1} " in report
    return store.requests


class CountingStore:
    """A store without a limit, which counts what it is asked."""

    def __init__(self) -> None:
        self._store, self._lock, self.requests = dist.HashStore(), threading.Lock(), 0

    def until(self, deadline: float) -> CountingStore:
        return self

    def read(self, key: str) -> str | None:
        return self.get(key).decode() if self.check([key]) else None

    def read_all(self, keys: list[str]) -> list[str | None]:
        return [text.decode() for text in self.multi_get(keys)] if self.check(keys) else [*map(self.read, keys)]

    def __getattr__(self, method: str) -> Any:
        with self._lock:
            self.requests += 1
        return getattr(self._store, method)


def test_finding_out_who_died_asks_the_store_in_proportion_to_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_REPORT_WAIT_S", 0.5)
    monkeypatch.setattr(failure, "_close", lambda memberships, error: None)
    for world_size in (2, 4, 16, 64):
        assert requests_of_survivors(world_size) < 25 * world_size


def run_out_of_memory(rank: int, world_size: int, folder: str, error: Exception) -> Seen:
    comm = Communicator()
    comm.all_reduce(torch.ones(10), aggregator=Flat())
    values = torch.ones(40_000)
    comm.all_reduce(values, aggregator=Flat())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def collective(*arguments: Any, **options: Any) -> None:
                raise error

            patch.setattr(dist, "all_reduce", collective)
        return watch(lambda: comm.all_reduce(values, aggregator=Flat()), folder, rank, world_size)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(CAUSE), RuntimeError(f"DefaultCPUAllocator: can't allocate memory: {CAUSE}")],
    ids=["cuda", "cpu"],
)
def test_a_local_error_in_a_collective_is_no_lost_peer(error: Exception, tmp_path: Path) -> None:
    seen = run(run_out_of_memory, 3, str(tmp_path), error, fresh=True)
    assert_all_know(seen, 1)
    for mine in seen:
        assert "lost a peer" not in mine.message


# ------------------------------------------------------------------------------ a network that is cut

CUT_SCRIPT = """
    import json, os, sys, time
    from pathlib import Path
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    import commopt
    kind, folder, timeout_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if kind == "standalone":
        comm, x = commopt.Communicator(timeout=timeout_s), torch.ones(1000)
        step = lambda: comm.all_reduce(x)
    elif kind == "meeting":  # of ranks that have not been in a collective
        comm = commopt.Communicator(timeout=timeout_s)
        step = lambda: comm._membership.exchange("a meeting")
    else:
        ddp = DDP(nn.Linear(64, 64))
        commopt.attach(ddp, "hierarchical", timeout=timeout_s, plan="ddp")
        step = lambda: ddp(torch.ones(1, 64)).sum().backward()
    for _ in range(3):
        step()
    Path(folder, f"ready{rank}").touch()
    while not Path(folder, "cut").exists():
        time.sleep(0.02)
    message, started = "no error", time.monotonic()
    try:
        while True:
            step()
    except Exception as error:
        message = str(error)
    Path(folder, f"{rank}.tmp").write_text(json.dumps([message, time.monotonic() - started]))
    os.rename(folder / f"{rank}.tmp", folder / f"result{rank}")
    while not Path(folder, "mended").exists():
        time.sleep(0.05)
    os._exit(0)  # torch's own groups are cut too
"""


@pytest.mark.cluster
@pytest.mark.parametrize("kind", ["standalone", "hook", "meeting"])
def test_every_rank_raises_when_the_network_between_nodes_is_cut(kind: str, tmp_path: Path) -> None:
    """Those beside the store see who is gone; those that the store is cut off from have nobody to ask."""
    if missing := EmulatedCluster.missing(rate="none"):
        pytest.skip(missing)
    script, timeout_s = tmp_path / "script.py", 4.0
    script.write_text(textwrap.dedent(CUT_SCRIPT))

    def wait_for(pattern: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(list(tmp_path.glob(pattern))) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)

    with EmulatedCluster(nodes=2, ranks_per_node=2, rate="none") as cluster:

        def cut_and_mend() -> None:
            wait_for("ready?", 90)
            cluster.cut(1)
            (tmp_path / "cut").touch()
            wait_for("result?", 60)
            cluster.mend(1)
            (tmp_path / "mended").touch()

        thread = threading.Thread(target=cut_and_mend)
        thread.start()
        env = {"PYTHONPATH": str(Path(__file__).parents[1])}
        result = cluster.run([str(script), kind, str(tmp_path), str(timeout_s)], timeout_s=limit(300), env=env)
        thread.join()
    for rank in range(4):
        file = tmp_path / f"result{rank}"
        assert file.exists(), f"rank {rank} hangs\n{result.stderr}"
        message, seconds = json.loads(file.read_text())
        told = "did not reach a meeting" if kind == "meeting" else "no sign of life from rank"
        assert (told if rank < 2 else "the rendezvous store has not answered") in message, f"rank {rank}: {message}"
        # A meeting is waited for a few seconds longer, for the sake of rank 0's verdict.
        assert seconds < timeout_s + 2 * WITHIN_S, f"rank {rank} took {seconds:.1f} s"


# ------------------------------------------------------------------------------ COMMOPT_CHECK=1


def swap_two_calls(rank: int, world_size: int, kind: str) -> tuple[str, float]:
    one, two, split = Communicator(), Communicator(), Communicator(ranks_per_node=1)
    for comm in (one, two, split):
        if comm is not split or kind != "groups, first call":
            comm.all_reduce(torch.ones(4))
    calls: dict[str, Callable[[], object]] = {
        "order": lambda: [comm.all_reduce(torch.ones(8)) for comm in ((one, two) if rank else (two, one))],
        "operation": lambda: one.all_reduce(torch.ones(8), op="sum") if rank else one.broadcast(torch.ones(8)),
        "numel": lambda: one.all_reduce(torch.ones(8 + rank // 2)),
        # other process groups: each rank waits in another one
        "groups": lambda: [comm.all_reduce(torch.ones(8)) for comm in ((one, split) if rank else (split, one))],
    }
    return told(calls[kind.partition(",")[0]])


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("order", ("Communicator 0", "Communicator 1")),
        ("operation", ("all_reduce", "broadcast")),
        ("numel", ("8", "9")),
        ("groups", ("Communicator",)),
        ("groups, first call", ("Communicator",)),
    ],
)
def test_check_catches_ranks_that_do_different_things(kind: str, parts: tuple[str, ...]) -> None:
    results = run(swap_two_calls, 3, kind, env={"COMMOPT_CHECK": "1"}, fresh=True, timeout_s=20)
    for rank, (message, seconds) in enumerate(results):
        for part in (*parts, "rank "):
            assert part in message, f"rank {rank} does not say {part!r}: {message}"
        assert seconds < WITHIN_S, f"rank {rank} took {seconds:.1f} s"


def work_as_usual(rank: int, world_size: int) -> None:
    before, comm = Communicator(timeout=25), Communicator()
    before.all_reduce(torch.ones(4))
    before.close()
    time.sleep(0.1 * rank)
    for numel in (0, 1, 1000) * 5:
        assert (comm.all_reduce(torch.ones(numel), op="sum") == world_size).all()
    for _ in range(30):
        comm.broadcast(torch.ones(3))  # its source need not wait for anybody
    works = [comm.all_reduce(torch.ones(5), async_op=True) for _ in range(5)]
    ddp = TorchDDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.02)
    commopt.attach(ddp, "hierarchical")
    for _ in range(3):
        ddp(torch.ones(1, 64)).sum().backward()
    for work in works:
        work.wait()


def test_check_is_silent_when_all_is_well() -> None:
    run(work_as_usual, 4, nodes=(2, 2), env={"COMMOPT_CHECK": "1"})


# ------------------------------------------------------------------------------ calls from the lane


@dataclass(frozen=True)
class Nested(Flat):
    """Makes the mistake of calling the public API on the lane."""

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, context: BufferContext) -> None:
        if Failing.armed:
            commopt.all_reduce(torch.ones(3))
        super().all_reduce(buffer, team, scale, context)


@dataclass(frozen=True)
class Slow(Flat):
    def all_reduce(self, buffer: Tensor, team: Any, scale: float, context: BufferContext) -> None:
        time.sleep(0.5)
        super().all_reduce(buffer, team, scale, context)


def call_from_the_lane(rank: int, world_size: int, caller: str) -> str:
    comm = Communicator()
    commopt.all_reduce(torch.ones(3))
    comm.all_reduce(torch.ones(3), aggregator=Nested())
    Failing.armed = caller == "aggregator"
    slow = comm.all_reduce(torch.ones(3), aggregator=Nested() if Failing.armed else Slow(), async_op=True)
    chained = slow.get_future().then(lambda done: commopt.all_reduce(torch.ones(3)))
    with pytest.raises((RuntimeError, commopt.CommoptError)) as info:
        slow.wait() if Failing.armed else chained.wait()
    return str(info.value)


@pytest.mark.parametrize("caller", ["aggregator", "callback"])
def test_a_collective_inside_lane_work_raises(caller: str) -> None:
    for message in run(call_from_the_lane, 2, caller, fresh=True, timeout_s=20):
        assert "inside lane work" in message
        assert "wait" in message


# ------------------------------------------------------------------------------ interpreter exit

EXIT_SCRIPT = """
    import os, signal, sys, time
    from contextlib import suppress
    from datetime import timedelta
    from types import SimpleNamespace
    import torch, torch.distributed as dist
    import commopt
    rank, folder, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x = torch.ones(100_000)
    commopt.all_reduce(x)
    if kind == "in flight":
        works = [commopt.all_reduce(x, async_op=True) for _ in range(20)]
    if kind == "destroyed":
        dist.destroy_process_group()
    if kind == "in flight, destroyed":
        commopt.all_reduce(x, async_op=True)
        dist.destroy_process_group()
    if kind == "forked":
        child = os.fork()
        if child == 0:
            sys.exit()
        deadline = time.time() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.time() < deadline:
            time.sleep(0.02)
        if ended != (child, 0):
            os.kill(child, signal.SIGKILL)
            raise AssertionError(f"the child ended with {ended}")
    if kind == "watched":  # by a lane's thread, which asks a store for half a second at a time; nothing is on a GPU
        from commopt.lanes import stream
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        def failure():
            with suppress(RuntimeError):
                store.wait(["never"], timedelta(seconds=0.5))
        membership = SimpleNamespace(failure=failure, store=SimpleNamespace(silent_s=0), timeout_s=60)
        stream.joined, stream._WATCH_PERIOD_S = lambda: [membership], 0.01
        torch.cuda.Stream = lambda *arguments, **options: SimpleNamespace(query=lambda: True)
        commopt.lanes.lane_for(torch.device("cuda", 0))
        time.sleep(0.2)
    if kind == "exception":
        commopt.all_reduce(x, async_op=True)
        raise SystemExit("on purpose")
    print("last line", time.time(), flush=True)
"""


@dataclass(frozen=True)
class Exited:
    """What a process printed, and how and when it was seen to have ended."""

    returncode: int
    out: str
    err: str
    ended: float


def run_script(text: str, world_size: int, folder: Path, *arguments: str) -> list[Exited]:
    """Run a script with each rank, a folder and more as its arguments."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    root = str(Path(__file__).parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": root}
    env |= {"COMMOPT_HEARTBEAT": "0.05", "COMMOPT_FLIGHT": str(folder)}  # so that exits meet beats
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder), *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    exited = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)  # of which a busy machine needs most to import torch
            exited.append(Exited(process.returncode, out, err, time.time()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return exited


@pytest.mark.parametrize(
    "kind", ["idle", "destroyed", "in flight", "in flight, destroyed", "forked", "watched", "exception"]
)
def test_the_interpreter_exits_cleanly(kind: str, tmp_path: Path) -> None:
    for outcome in run_script(EXIT_SCRIPT, 2, tmp_path, kind):
        if kind == "exception":
            assert outcome.returncode == 1, outcome.err
            assert outcome.err.strip().splitlines()[-1] == "on purpose"
            continue
        assert outcome.returncode == 0, outcome.err
        assert "Traceback" not in outcome.err
        assert "terminate" not in outcome.err
        assert outcome.ended - float(outcome.out.split()[-1]) < 2 * WITHIN_S


def leave_what_was_destroyed(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    comm = Communicator(group)
    comm.all_reduce(torch.ones(1000))
    dist.destroy_process_group(group)
    membership = comm._membership
    assert not membership.team.closed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(membership.team), "release", None)
        with pytest.raises(TypeError):
            registry._leave()
    with pytest.raises(TransportError, match="is closed"):
        membership.store.read("key")
    registry._leave()
    assert membership.team.closed


def test_nothing_stays_open_at_exit_over_a_subgroup_that_was_destroyed() -> None:
    run(leave_what_was_destroyed, 2, fresh=True)


# ------------------------------------------------------------------------------ errors outside of the lanes

RAISING_SCRIPT = """
    import sys, time
    import torch, torch.distributed as dist
    import commopt
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    class Model(torch.nn.Linear):
        armed = False
        def forward(self, x):
            if self.armed:
                raise ValueError("disk on fire")
            return super().forward(x)
    ddp = commopt.DistributedDataParallel(Model(4, 4))
    ddp.register_comm_hook(commopt.hierarchical)
    for step in range(3):
        ddp(torch.ones(1, 4)).sum().backward()
    ddp.module.armed = rank == 1
    try:
        ddp(torch.ones(1, 4)).sum().backward()
    except commopt.LaneError as error:
        print(error)
"""


def test_an_exception_outside_of_communication_is_told_to_the_others(tmp_path: Path) -> None:
    outcomes = run_script(RAISING_SCRIPT, 2, tmp_path)
    assert outcomes[1].returncode == 1
    assert "ValueError: disk on fire\n" in outcomes[1].err
    assert outcomes[0].out.startswith("rank 1 "), outcomes[0]
    assert 'raise ValueError("disk on fire")' in outcomes[0].out, outcomes[0]


def find_failures(rank: int, world_size: int) -> None:
    own = commopt.MismatchError("ranks disagree")
    wrapped = ValueError("while loading")
    wrapped.__cause__ = own
    assert commopt.failure_of(own) is commopt.failure_of(wrapped) is own
    assert commopt.failure_of(ValueError("nothing to do with it")) is None
    comm = Communicator()
    assert commopt.failure_of(RuntimeError("CUDA out of memory")) is None
    Failing.armed = True
    work = comm.all_reduce(torch.ones(10), aggregator=Failing(1), async_op=True)
    with pytest.raises(RuntimeError, match=CAUSE) as info:
        work.get_future().wait()  # torch's future
    failure = commopt.failure_of(info.value)
    assert isinstance(failure, commopt.LaneError)
    assert str(failure).startswith("rank 1 ")


def test_the_failure_behind_an_error_of_torch() -> None:
    run(find_failures, 2, fresh=True)
