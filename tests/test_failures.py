"""A failure on one rank becomes an error on all within seconds, and a lane never keeps the interpreter alive."""

from __future__ import annotations

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
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Account, Aggregator, Communicator, Flat, Hierarchical, Layout
from commopt.aggregate.calls import Step
from commopt.lanes import failure
from tests.ranks import run

WITHIN_S = 5.0
CAUSE = "disk on fire"


@dataclass(frozen=True)
class Failing(Aggregator):
    """Works on all ranks until `armed`; then raises on one of them, before it sends anything."""

    culprit: int
    inner: Aggregator = field(default_factory=Flat)

    armed = False  # of this process, hence no field

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, account: Account) -> None:
        if Failing.armed and dist.get_rank() == self.culprit:
            raise OSError(CAUSE)
        self.inner.all_reduce(buffer, team, scale, account)

    def calls(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: Any,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> tuple[Step, ...]:
        return self.inner.calls(layout, dtype, team, device, step)

    @property
    def lossless(self) -> bool:
        return self.inner.lossless


@dataclass(frozen=True)
class Seen:
    """One rank's error, how long it took, and what a further call said."""

    message: str
    seconds: float
    afterwards: list[str]


def watch(call: Callable[[], object], folder: str, rank: int, world_size: int) -> Seen:
    """Make a call that fails, then try again; stay alive until all ranks have seen their error."""
    started = time.monotonic()
    message = "no error"
    try:
        call()
    except Exception as error:
        message = str(error)
    seconds = time.monotonic() - started
    Path(folder, str(rank)).touch()
    deadline = time.monotonic() + 20
    while len(list(Path(folder).iterdir())) < world_size and time.monotonic() < deadline:
        time.sleep(0.02)
    afterwards = []
    for again in (
        lambda: commopt.all_reduce(torch.ones(3)),
        lambda: commopt.all_reduce(torch.ones(3), async_op=True).wait(),
        Communicator,
        commopt.HookState,
    ):
        try:
            again()
        except commopt.LaneError as error:
            afterwards.append(str(error))
        else:
            afterwards.append("no error")
    return Seen(message, seconds, afterwards)


def assert_all_know(seen: list[Seen], culprit: int) -> None:
    for rank, mine in enumerate(seen):
        for message in (mine.message, *mine.afterwards):
            assert CAUSE in message, f"rank {rank}: {message}"
            assert f"rank {culprit}" in message, f"rank {rank}: {message}"
        assert mine.seconds < WITHIN_S, f"rank {rank} took {mine.seconds:.1f} s"


# ------------------------------------------------------------------------------ the process lives on


def fail_standalone(rank: int, world_size: int, folder: str, aggregator: Aggregator) -> Seen:
    comm = Communicator()
    comm.all_reduce(torch.ones(10), aggregator=aggregator)
    Failing.armed = True
    return watch(lambda: comm.all_reduce(torch.ones(40_000), aggregator=aggregator), folder, rank, world_size)


@pytest.mark.parametrize("culprit", [0, 2])
def test_standalone(culprit: int, tmp_path: Path) -> None:
    assert_all_know(run(fail_standalone, 3, str(tmp_path), Failing(culprit), fresh=True), culprit)


@pytest.mark.parametrize(
    ("aggregator", "culprit"),
    [
        (Failing(1, Hierarchical()), 1),  # before the intra leg
        (Hierarchical(inter=Failing(2), form="leader"), 2),  # in the inter leg: ranks 1 and 3 take no part in it
        (Hierarchical(inter=Failing(3), form="all_reduce"), 3),  # ranks 0 and 2 are in another inter group
    ],
    ids=["before intra", "inter, leader", "inter, all_reduce"],
)
def test_between_two_nodes(aggregator: Aggregator, culprit: int, tmp_path: Path) -> None:
    assert_all_know(run(fail_standalone, 4, str(tmp_path), aggregator, nodes=(2, 2), fresh=True), culprit)


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


def fail_in_backward(rank: int, world_size: int, folder: str, aggregator: Aggregator) -> Seen:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    ddp = TorchDDP(module, bucket_cap_mb=0.02)
    commopt.attach(ddp, aggregator)
    for _ in range(3):
        ddp(torch.randn(2, 64)).sum().backward()
    Failing.armed = True

    def step() -> None:
        loss = ddp(torch.randn(2, 64)).sum()
        try:
            loss.backward()
        except commopt.LaneError:
            raise
        except RuntimeError as error:
            raise AssertionError("backward raised another error than LaneError") from error

    return watch(step, folder, rank, world_size)


@pytest.mark.parametrize(
    ("aggregator", "culprit"), [(Failing(1), 1), (Hierarchical(inter=Failing(0)), 0)], ids=["flat", "inter leg"]
)
def test_backward(aggregator: Aggregator, culprit: int, tmp_path: Path) -> None:
    assert_all_know(run(fail_in_backward, 4, str(tmp_path), aggregator, nodes=(2, 2), fresh=True), culprit)


# ------------------------------------------------------------------------------ processes that die


def lose_a_rank(rank: int, world_size: int, victim: int, aggregator: Aggregator) -> tuple[str, float]:
    comm = Communicator()
    comm.all_reduce(torch.ones(10), aggregator=aggregator)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in range(100):
            comm.all_reduce(torch.ones(10_000), aggregator=aggregator)
    except commopt.LaneError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


@pytest.mark.parametrize(
    ("victim", "aggregator"), [(0, Flat()), (1, Flat()), (3, Hierarchical()), (2, Hierarchical(form="all_reduce"))]
)
def test_a_killed_process(victim: int, aggregator: Aggregator) -> None:
    results = run(lose_a_rank, 4, victim, aggregator, nodes=(2, 2), dies=(victim,), fresh=True)
    for rank, result in enumerate(results):
        if rank != victim:
            message, seconds = result
            assert f"from rank {victim} " in message, f"rank {rank}: {message}"
            assert seconds < 2 * WITHIN_S, f"rank {rank} took {seconds:.1f} s"


def stay_away_from_backward(rank: int, world_size: int) -> tuple[str, float]:
    ddp = TorchDDP(nn.Linear(8, 8))
    commopt.attach(ddp, "flat", timeout=2)
    for _ in range(3):  # until then DDP itself talks to the other ranks, to rebuild its buckets
        ddp(torch.ones(1, 8)).sum().backward()
    if rank == 1:
        time.sleep(9)
        return "", 0.0
    started = time.monotonic()
    try:
        ddp(torch.ones(1, 8)).sum().backward()
    except Exception as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_a_rank_that_stays_away_from_backward() -> None:
    results = run(stay_away_from_backward, 3, fresh=True)
    for rank in (0, 2):
        message, seconds = results[rank]
        assert "rank 1" in message, message
        assert seconds < 2 + 2 * WITHIN_S, f"rank {rank} took {seconds:.1f} s"


# ------------------------------------------------------------------------------ COMMOPT_CHECK=1


def swap_two_calls(rank: int, world_size: int, kind: str) -> tuple[str, float]:
    one, two, split = Communicator(), Communicator(), Communicator(ranks_per_node=1)
    for comm in (one, two, split):
        if comm is not split or kind != "groups, first call":
            comm.all_reduce(torch.ones(4))
    started = time.monotonic()
    try:
        if kind == "order":
            for comm in (one, two) if rank else (two, one):
                comm.all_reduce(torch.ones(8))
        elif kind == "operation":
            if rank:
                one.all_reduce(torch.ones(8), op="sum")
            else:
                one.broadcast(torch.ones(8))
        elif kind == "numel":
            one.all_reduce(torch.ones(8 + rank // 2))
        else:  # other process groups: each rank waits in another one
            for comm in (one, split) if rank else (split, one):
                comm.all_reduce(torch.ones(8))
    except commopt.CommoptError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


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
    comm = Communicator()
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

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, account: Account) -> None:
        if Failing.armed:
            commopt.all_reduce(torch.ones(3))
        super().all_reduce(buffer, team, scale, account)


@dataclass(frozen=True)
class Slow(Flat):
    def all_reduce(self, buffer: Tensor, team: Any, scale: float, account: Account) -> None:
        time.sleep(0.5)
        super().all_reduce(buffer, team, scale, account)


def call_from_aggregator(rank: int, world_size: int) -> str:
    comm = Communicator()
    commopt.all_reduce(torch.ones(3))
    comm.all_reduce(torch.ones(3), aggregator=Nested())
    Failing.armed = True
    try:
        comm.all_reduce(torch.ones(3), aggregator=Nested())
    except commopt.CommoptError as error:
        return str(error)
    return "no error"


def test_a_collective_inside_an_aggregator_raises() -> None:
    for message in run(call_from_aggregator, 2, fresh=True, timeout_s=20):
        assert "inside lane work" in message
        assert "wait" in message


def call_from_callback(rank: int, world_size: int) -> str:
    comm = Communicator()
    commopt.all_reduce(torch.ones(3))
    slow = comm.all_reduce(torch.ones(3), aggregator=Slow(), async_op=True)
    chained = slow.get_future().then(lambda done: commopt.all_reduce(torch.ones(3)))
    try:
        chained.wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_collective_inside_a_callback_raises() -> None:
    for message in run(call_from_callback, 2, fresh=True, timeout_s=20):
        assert "CommoptError" in message or "lane" in message, message


# ------------------------------------------------------------------------------ interpreter exit

EXIT_SCRIPT = """
    import sys, time
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
            out, err = process.communicate(timeout=150)  # of which a busy machine needs most to import torch
            exited.append(Exited(process.returncode, out, err, time.time()))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return exited


@pytest.mark.parametrize("kind", ["idle", "destroyed", "in flight", "in flight, destroyed", "exception"])
def test_the_interpreter_exits_cleanly(kind: str, tmp_path: Path) -> None:
    for outcome in run_script(EXIT_SCRIPT, 2, tmp_path, kind):
        if kind == "exception":
            assert outcome.returncode == 1, outcome.err
            assert outcome.err.strip().splitlines()[-1] == "on purpose"
            continue
        assert outcome.returncode == 0, outcome.err
        assert "Traceback" not in outcome.err
        assert "terminate" not in outcome.err
        assert outcome.ended - float(outcome.out.split()[-1]) < WITHIN_S


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
