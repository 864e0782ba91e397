# SPDX-License-Identifier: Apache-2.0
"""Who is stopped, cut off or missing in a task is named on every rank long before the timeout, and nothing else is."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.util import _run_finalizers  # type: ignore[attr-defined]
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, Dataset

import commopt
from commopt.__main__ import main
from commopt.errors import TransportError
from commopt.groups import store as groups_store
from commopt.lanes import activity, heartbeat
from commopt.lanes.lane import Place
from tests.ranks import run
from tests.speed import limit

BEAT_S = 0.25
FAST = {"COMMOPT_HEARTBEAT": str(BEAT_S)}
NAMED_S = 30.0  # promised for the default interval, of 5 s
BY_DEFAULT_S = 5.0


class Heard(logging.Handler):
    """What commopt has warned of on this rank, with the time of each message."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []
        logging.getLogger("commopt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((time.monotonic(), record.getMessage()))

    def first(self, part: str) -> tuple[float, str] | None:
        return next((line for line in self.lines if part in line[1]), None)

    def wait_for(self, part: str, seconds: float) -> tuple[float, str]:
        deadline = time.monotonic() + limit(seconds)
        while (found := self.first(part)) is None:
            assert time.monotonic() < deadline, f"{part!r} is not in {self.lines}"
            time.sleep(0.02)
        return found


def model(**options: Any) -> TorchDDP:
    ddp = TorchDDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), bucket_cap_mb=0.02)
    commopt.attach(ddp, "hierarchical", **options)
    return ddp


def train(ddp: TorchDDP, steps: int) -> None:
    for _ in range(steps):
        ddp(torch.ones(1, 64)).sum().backward()


def wait_until(what: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + limit(seconds)
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ------------------------------------------------------------------------------ a rank that is stopped


@dataclass(frozen=True)
class Stopped:
    """What one of the others heard: how long after the stop, and the error at the end."""

    silent_s: float
    silent: str
    missing: str
    error: str


def stop_one(rank: int, world_size: int, folder: str, victim: int) -> Stopped | None:
    heard, mark = Heard(), Path(folder, "stopped")
    ddp = model(timeout=15 * BEAT_S)
    train(ddp, 7)
    time.sleep(3 * BEAT_S)  # each has shown its seven steps
    if rank == victim:
        mark.with_suffix(".tmp").write_text(json.dumps([os.getpid(), time.monotonic()]))
        mark.with_suffix(".tmp").rename(mark)
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_until(mark.exists)
    pid, stopped_s = json.loads(mark.read_text())
    try:
        train(ddp, 1)
        error = "no error"
    except commopt.LaneError as failure:
        error = str(failure)
    silent = heard.wait_for(f"no heartbeat from rank {victim} ", 1)
    missing = heard.wait_for("still missing: ", 1)
    Path(folder, f"done{rank}").touch()
    if rank == (victim + 1) % world_size:
        wait_until(lambda: len(list(Path(folder).glob("done*"))) == world_size - 1)
        os.kill(pid, signal.SIGKILL)
    return Stopped(silent[0] - stopped_s, silent[1], missing[1], error)


def test_a_stopped_rank_is_named_on_every_other_one_and_by_the_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "records"
    records.mkdir()
    env = {**FAST, "COMMOPT_FLIGHT": str(records)}
    results = run(stop_one, 4, str(tmp_path), 2, nodes=(2, 2), dies=(2,), fresh=True, env=env)
    for rank in (0, 1, 3):
        mine = results[rank]
        assert mine is not None
        # As many intervals as the default has in 30 s; and a second for what a busy machine adds.
        assert mine.silent_s < limit(NAMED_S * BEAT_S / BY_DEFAULT_S + 1.0), f"rank {rank}: {mine.silent_s:.1f} s"
        for part in ("step 6, bucket ", "phase ", "stop_one (tests/test_heartbeat.py:", "nothing has failed yet"):
            assert part in mine.silent, f"rank {rank}: {mine.silent}"
        assert "rank 2 (" in mine.missing
        assert "operation 7)" in mine.missing, mine.missing
        assert "rank 2" in mine.error

    files = sorted(records.glob("commopt_flight_*.json"))
    read = {content["rank"]: content for content in (json.loads(file.read_text()) for file in files)}
    assert sorted(read) == [0, 1, 3]
    for rank, content in read.items():
        assert len(files) == 3, "one a rank and failure"
        assert content["phase"] == "backward"
        assert any("stop_one" in call for call in content["stacks"]["MainThread"])
        assert "commopt-lane" in content["stacks"]
        assert any("no heartbeat from rank 2 " in reason for reason in content["reasons"])
        assert any("lost a peer" in reason or "no sign of life" in reason for reason in content["reasons"])
        (task,) = content["lanes"].values()
        assert (task["sequence"], task["title"].split()[:2]) == (7, ["bucket", "0"]), f"rank {rank}"
        assert content["clients"][f"{task['membership']} {task['owner']}"][1] == 7
        assert content["past"][-1]["at"] <= time.time()
        assert files[0].stat().st_mode & 0o077 == 0
    assert main(["doctor", "--flight", *map(str, files)]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "rank 0, 1, 3 waits in SeqNum 7 bucket 0 by Hierarchical" in told
    assert "rank 2 is behind, and has not called SeqNum 7" in told
    assert "rank 2: phase " in told
    assert "last beat" in told


def stop_the_holder_of_the_store(rank: int, world_size: int, folder: str) -> str:
    dist.destroy_process_group()
    mark, port_file = Path(folder, "stopped"), Path(folder, "port")
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port_file.with_suffix(".tmp").write_text(str(free.getsockname()[1]))
        port_file.with_suffix(".tmp").rename(port_file)
    wait_until(port_file.exists)
    address = f"tcp://127.0.0.1:{port_file.read_text()}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    heard = Heard()
    ddp = model(timeout=60)
    train(ddp, 3)
    if rank == 0:
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_until(mark.exists)
    told = heard.wait_for("gets no answer from the store of rank 0", 20)[1]
    Path(folder, f"done{rank}").touch()
    wait_until(lambda: len(list(Path(folder).glob("done*"))) == world_size - 1)
    if rank == 1:
        os.kill(int(mark.read_text()), signal.SIGKILL)
    return told


def test_whoever_is_cut_off_from_the_store_says_so(tmp_path: Path) -> None:
    results = run(stop_the_holder_of_the_store, 3, str(tmp_path), dies=(0,), fresh=True, env=FAST)
    assert "rank 1 gets no answer" in results[1]
    assert "rank 2 gets no answer" in results[2]


# ------------------------------------------------------------------------------ no false alarm


def evaluate(seconds: float) -> None:
    time.sleep(seconds)


def evaluate_on_one(rank: int, world_size: int) -> list[str]:
    heard, ddp = Heard(), model(timeout=60)
    train(ddp, 3)
    if rank == 1:
        evaluate(12 * BEAT_S)
    train(ddp, 3)
    wait_until(lambda: heard.first("over: ") is not None)
    dist.barrier()
    return [line for _, line in heard.lines]


def test_a_rank_that_evaluates_is_named_with_its_stack_and_nothing_fails(tmp_path: Path) -> None:
    results = run(evaluate_on_one, 3, env={**FAST, "COMMOPT_FLIGHT": str(tmp_path)}, fresh=True)
    for rank, lines in enumerate(results):
        (named, *_) = [line for line in lines if "still missing: " in line]
        assert "rank 1 (" in named, f"rank {rank}"
        assert "phase evaluation, at evaluate (tests/test_heartbeat.py:" in named
        assert "nothing has failed yet" in named
        assert not [line for line in lines if "no heartbeat" in line]
        assert len(lines) <= 4, "a wait that doubles between warnings"
    assert list(tmp_path.iterdir()) == [], "what ended well leaves no record"


def work_and_leave(rank: int, world_size: int, way: str) -> list[str]:
    heard, ddp = Heard(), model(timeout=60)
    train(ddp, 40)
    if rank == 1:  # it is done before the others
        dist.destroy_process_group() if way == "destroys its group" else _run_finalizers(0)
        wait_until(lambda: not any(each.name == "commopt-heartbeat" for each in threading.enumerate()))
    time.sleep(8 * BEAT_S)
    return [line for _, line in heard.lines]


@pytest.mark.parametrize("way", ["destroys its group", "ends as a process of multiprocessing"])
def test_nothing_is_said_while_all_is_well_nor_of_a_rank_that_has_left(way: str) -> None:
    assert run(work_and_leave, 3, way, env=FAST, fresh=True) == [[], [], []]


# ------------------------------------------------------------------------------ what it costs


def count_requests(rank: int, world_size: int, interval: float) -> tuple[int, int, float]:
    """Return the requests in 40 steps, those while only the heartbeat goes on, and for how long it did."""
    ddp = model(timeout=60)
    train(ddp, 3)
    dist.barrier()
    time.sleep(0.5)  # the first beats are over
    asked: Counter[str] = Counter()
    call = groups_store._StoreConnection.call

    def counting(self: Any, method: str, *arguments: Any) -> Any:
        asked[method] += 1
        return call(self, method, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups_store._StoreConnection, "call", counting)
        train(ddp, 40)
        dist.barrier()
        in_steps, started = asked.total(), time.monotonic()
        time.sleep(8 * BEAT_S)
        return in_steps, asked.total() - in_steps, time.monotonic() - started


def test_steps_ask_the_store_nothing_and_a_beat_three_things() -> None:
    for in_steps, _, _ in run(count_requests, 3, 600.0, env={"COMMOPT_HEARTBEAT": "600"}):
        assert in_steps == 0
    for _, requests, seconds in run(count_requests, 3, BEAT_S, env=FAST):
        assert 0 < requests <= 3 * (seconds / BEAT_S + 1)


def threads_of(rank: int, world_size: int) -> list[str]:
    model(timeout=60)
    commopt.Communicator(ranks_per_node=1)
    return [each.name for each in threading.enumerate() if each.name.startswith("commopt-heartbeat")]


@pytest.mark.parametrize(("setting", "threads"), [("0", 0), ("5", 1), ("", 1)])
def test_one_thread_a_process_or_none(setting: str, threads: int) -> None:
    names = run(threads_of, 2, env={"COMMOPT_HEARTBEAT": setting}, fresh=True)
    assert [len(mine) for mine in names] == [threads] * 2


# ------------------------------------------------------------------------------ bad input


def set_on_one(rank: int, world_size: int, name: str, value: str) -> str:
    if rank == 1:
        os.environ[name] = value
    with pytest.raises(commopt.CommoptError) as info:
        model(timeout=20)
    os.environ.pop(name, None)
    return str(info.value)


@pytest.mark.parametrize("value", ["often", "-1", "nan", "0.001", "1e9"])
def test_another_interval_than_seconds_is_refused_on_every_rank(value: str) -> None:
    for message in run(set_on_one, 2, "COMMOPT_HEARTBEAT", value, fresh=True):
        assert f"COMMOPT_HEARTBEAT={value!r} is neither 0 (off) nor from 0.05 to 600 seconds" in message


def test_ranks_with_different_intervals_are_told() -> None:
    for message in run(set_on_one, 2, "COMMOPT_HEARTBEAT", "7", fresh=True, env={"COMMOPT_HEARTBEAT": None}):
        assert "ranks disagree about COMMOPT_HEARTBEAT: rank 1 has 7.0, rank 0 has 5.0" in message


def test_a_folder_for_records_that_is_not_there_is_refused_on_every_rank() -> None:
    beating = {"COMMOPT_HEARTBEAT": None}
    for message in run(set_on_one, 2, "COMMOPT_FLIGHT", "/no/such/folder", fresh=True, env=beating):
        assert "COMMOPT_FLIGHT='/no/such/folder' is no folder that can be written to" in message


FULL = """
import resource, signal, sys
from pathlib import Path
from commopt.lanes.flight import FlightFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
record = FlightFile(0, Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
for number in range(3):
    assert record.add(str(number), "a reason", [0], {}, []) is None
"""


def test_a_full_disk_has_no_part_of_a_record(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=Path(__file__).parents[1], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ many ranks, in one process


class Shared(SimpleNamespace):
    """The part of a membership that is asked."""


class Ranks:
    """The heartbeats of many ranks that share a store, beating when they are told to."""

    def __init__(self, nodes: int, ranks_per_node: int, interval_s: float) -> None:
        self.requests = 0
        size = nodes * ranks_per_node
        wire = SimpleNamespace(nodes=tuple(rank // ranks_per_node for rank in range(size)))
        keys = dist.HashStore()
        self.beats: list[heartbeat.Heartbeat] = []
        self.memberships = []
        for rank in range(size):
            membership: Any = Shared(
                name="m",
                ranks=tuple(range(size)),
                global_rank=rank,
                alive=True,
                heartbeat_s=interval_s,
                team=SimpleNamespace(ranks=tuple(range(size)), wire=wire),
                store=Counted(self, keys),
            )
            self.memberships.append(membership)
            beat = heartbeat.Heartbeat()
            beat._watches = (heartbeat._Watch(membership),)
            self.beats.append(beat)


class Counted:
    """The part of LimitedStore that is asked, with a count."""

    silent_s = 0.0

    def __init__(self, ranks: Ranks, keys: Any) -> None:
        self._ranks, self._keys = ranks, keys

    def within(self, room: str) -> Counted:
        return self

    def until(self, deadline: float) -> Counted:
        return self

    def __getattr__(self, method: str) -> Any:
        self._ranks.requests += 1
        return getattr(self._keys, method)


@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_requests_do_not_grow_with_the_world(nodes: int) -> None:
    ranks = Ranks(nodes, 4, 600.0)
    for _ in range(3):  # until each has seen its neighbour
        ranks.requests = 0
        for beat in ranks.beats:
            beat._beat()
    assert ranks.requests <= 3 * len(ranks.beats) + 1


def test_all_ranks_of_a_node_that_is_gone_are_named_at_the_same_time() -> None:
    interval_s = 0.1
    ranks, heard = Ranks(4, 4, interval_s), Heard()
    gone = range(4, 8)

    def beat_all(alive: list[int]) -> None:
        for rank in alive:
            ranks.beats[rank]._beat()
        time.sleep(interval_s)

    for _ in range(2):
        beat_all(list(range(16)))
    assert heard.lines == []
    for _ in range(5):
        beat_all([rank for rank in range(16) if rank not in gone])
    named = {rank for rank in range(16) if heard.first(f"no heartbeat from rank {rank} ")}
    assert named == set(gone)
    for rank in gone:
        told = sum(f"no heartbeat from rank {rank} " in line for _, line in heard.lines)
        assert told >= 12, "on every rank that beats"


def test_a_rank_that_has_come_is_not_missing_and_one_asks_for_all() -> None:
    ranks, heard = Ranks(2, 2, 0.05), Heard()
    place = Place("m", (0, 1, 2, 3), "HookState 0", 5, "bucket 0", 10)
    for rank, beat in enumerate(ranks.beats):
        (watch,) = beat._watches
        mine = {"number": 1, "phase": "backward", "stack": ["f (a.py:1)"], "host": "a", "pid": rank, "lanes": {}}
        watch.brief_store().set(
            f"beat/{rank}", json.dumps({**mine, "clients": {"m HookState 0": [5 - (rank == 3), 2, 0]}})
        )
    for rank in (1, 0, 2):
        beat = ranks.beats[rank]
        beat._ask_who_is_missing(beat._watches[0], place, 15.0, 0)
    ranks.beats[2]._exchange(ranks.beats[2]._watches[0], activity.beat())
    assert len(heard.lines) == 1
    told = heard.lines[0][1]
    assert "3 rank(s) wait for 15 s in bucket 0 of 10 elements (HookState 0, operation 5)" in told
    assert "still missing: rank 3 (a, process 3), in step 2, bucket 0, phase backward" in told
    assert not any(f"rank {rank} (" in told for rank in range(3))


def test_an_alarm_that_was_not_written_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a rank that ends, or finds the store silent, in the middle of it."""
    ranks, heard = Ranks(2, 2, 600.0), Heard()
    first, second = (beat._watches[0] for beat in ranks.beats[:2])

    def silent(key: str, *values: str) -> None:
        raise TransportError("no answer")

    with monkeypatch.context() as patch:
        for method in ("set", "compare_set"):
            patch.setattr(first.store, method, silent, raising=False)
        with pytest.raises(TransportError):
            ranks.beats[0]._publish(first, kind="silent", rank=3, silent_s=9.0, beat={})
    ranks.beats[1]._publish(second, kind="silent", rank=3, silent_s=10.0, beat={})
    for rank in (0, 1, 2):
        ranks.beats[rank]._beat()
    assert sum("no heartbeat from rank 3 for 10 s" in line for _, line in heard.lines) == 3


@pytest.mark.alone
def test_a_beat_takes_less_than_a_thousandth_of_the_default_interval() -> None:
    ranks = Ranks(2, 4, 600.0)
    ranks.beats[0]._beat()
    started_s = time.thread_time()
    for _ in range(50):
        ranks.beats[0]._beat()
    assert (time.thread_time() - started_s) / 50 < limit(BY_DEFAULT_S / 1000)


# ------------------------------------------------------------------------------ kernels that do not end


class Event:
    """A CUDA event."""

    def __init__(self, *answers: bool | RuntimeError) -> None:
        self._answers = list(answers)

    def query(self) -> bool:
        answer = self._answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


def test_a_kernel_that_does_not_end_is_a_task_under_way() -> None:
    from commopt.lanes.stream import StreamLane

    lane = object.__new__(StreamLane)  # of which no stream is asked
    lane._task = lane._launched = None
    assert lane.under_way() is None
    membership: Any = Shared(name="m", ranks=(0, 1))
    event: Any = Event(False, True, RuntimeError("CUDA error: an illegal memory access was encountered"))
    lane._launched = event, membership, "HookState 0", 7, 100
    place = lane.under_way()
    assert place is not None
    assert (place.owner, place.sequence) == ("HookState 0", 7)
    assert lane.under_way() is None
    assert lane.under_way() is None


# ------------------------------------------------------------------------------ phases


class Asks(nn.Module):
    """A layer whose forward and backward note the phase that another thread would see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.phases: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.phases.append(activity.beat()["phase"])
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(self._note)
        return y

    def _note(self, gradient: Tensor) -> None:
        self.phases.append(activity.beat()["phase"])


class AskingData(Dataset[str]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return str(activity.beat()["phase"])


class AskingFile:
    def __init__(self) -> None:
        self.phases: set[str] = set()

    def write(self, data: bytes) -> int:
        self.phases.add(activity.beat()["phase"])
        return len(data)

    def flush(self) -> None:
        pass


def test_the_phase_of_training_is_told_by_the_stack() -> None:
    layer = Asks()
    nn.Sequential(layer)(torch.ones(3)).sum().backward()
    assert layer.phases == ["forward", "backward"]

    def evaluate_model() -> None:
        layer(torch.ones(3))

    def train_and_evaluate() -> None:
        layer(torch.ones(3))

    evaluate_model()
    train_and_evaluate()
    assert layer.phases[2:] == ["evaluation", "forward"]
    assert list(DataLoader(AskingData())) == [["loading data"]]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    phases: list[str] = []
    handle = optimizer.register_step_pre_hook(lambda *_: phases.append(activity.beat()["phase"]))
    optimizer.step()
    handle.remove()
    assert phases == ["optimizer step"]
    file: Any = AskingFile()
    torch.save({"x": torch.ones(3)}, file)
    assert file.phases == {"saving"}
    assert activity.beat()["phase"] == "elsewhere"


# ------------------------------------------------------------------------------ records, read by the doctor


def record_of(rank: int, lanes: dict[str, Any], submitted: int) -> dict[str, Any]:
    """Return what `commopt doctor` needs of a record of two ranks."""
    return {
        **{"commopt_flight": 1, "rank": rank, "members": {"m": [0, 1]}, "reasons": ["why"], "peers": {}},
        **{"phase": "backward", "stack": ["f (a.py:1)"], "clients": {"m HookState 0": [submitted, 2, 0]}},
        "lanes": lanes,
    }


def test_the_doctor_reads_records_and_dumps_of_torch_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"membership": "m", "owner": "HookState 0", "sequence": 5, "title": "bucket 0", "numel": 10}
    (tmp_path / "flight_0.json").write_text(json.dumps(record_of(0, {"cpu": task}, 5)))
    (tmp_path / "flight_1.json").write_text(json.dumps(record_of(1, {}, 4)))
    for rank, state in enumerate(("completed", "started")):
        entry = {"process_group": ["0", "x"], "collective_seq_id": 9, "profiling_name": "gloo:barrier", "state": state}
        status = {"last_enqueued_collective": 9, "last_completed_collective": 9 - rank}
        dump = {"entries": [entry], "pg_config": {}, "pg_status": {"0": status}, "rank": rank}
        (tmp_path / f"trace_{rank}").write_text(json.dumps(dump))
    assert main(["doctor", "--flight", str(tmp_path)]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "group HookState 0: rank 0 waits in SeqNum 5 bucket 0 of 10 elements; rank 1 has called nothing" in told
    assert "rank 1 is behind, and has not called SeqNum 5" in told
    assert "rank 1 waits in SeqNum 9 barrier" in told
    assert "rank 0, 1 wrote: why" in told
    assert "not read" in told
    assert "NCCL" not in told.partition("error(s)")[0].replace("TORCH_NCCL", "")


@pytest.mark.parametrize(
    "change",
    [
        {"commopt_flight": 99},
        {"rank": "one"},
        {"clients": {"a b": [1]}},
        {"lanes": {"cpu": {"owner": 3}}},
        {"peers": [1]},
        {"members": {"m": "all"}},
        {"stack": 4},
    ],
)
def test_a_damaged_record_is_refused_in_one_line(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = record_of(0, {}, 3)
    file = tmp_path / "record.json"
    file.write_text(json.dumps(whole))
    assert main(["doctor", "--flight", str(file)]) == 0
    capsys.readouterr()
    file.write_text(json.dumps(whole | change))
    assert main(["doctor", "--flight", str(file)]) == 2
    output = capsys.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1)


# ------------------------------------------------------------------------------ as it is by default


class SlowFile:
    """A file that takes its time, as a full or distant disk."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def write(self, data: bytes) -> int:
        waited_s, self._seconds = self._seconds, 0.0
        time.sleep(waited_s)
        return len(data)

    def flush(self) -> None:
        pass


def train_evaluate_and_save(rank: int, world_size: int) -> tuple[list[str], list[str], list[str]]:
    heard, ddp = Heard(), model(timeout=600)

    def lines() -> list[str]:
        found, heard.lines = [line for _, line in heard.lines], []
        return found

    train(ddp, 1000)
    in_steps = lines()
    if rank == 1:
        evaluate(60)
    train(ddp, 1)
    in_evaluation = lines()
    time.sleep(2 * BY_DEFAULT_S)  # it is told that this is over
    lines()
    train(ddp, 1)
    if rank == 0:
        slow: Any = SlowFile(25)
        torch.save(ddp.module.state_dict(), slow)
    train(ddp, 1)
    return in_steps, in_evaluation, lines()


@pytest.mark.slow
def test_by_default_long_evaluations_and_slow_checkpoints_are_warnings_and_steps_are_not(tmp_path: Path) -> None:
    env = {"COMMOPT_FLIGHT": str(tmp_path), "COMMOPT_HEARTBEAT": None}
    for in_steps, in_evaluation, in_save in run(train_evaluate_and_save, 4, env=env, timeout_s=600, fresh=True):
        assert in_steps == []
        assert 1 <= len(in_evaluation) <= 3  # after 15, 30 and 60 s
        assert all("rank 1 (" in line and "phase evaluation" in line for line in in_evaluation)
        assert 1 <= len(in_save) <= 2
        assert all("rank 0 (" in line and "phase saving" in line for line in in_save)


def stop_one_by_default(rank: int, world_size: int, folder: str) -> float:
    heard, ddp, mark = Heard(), model(timeout=600), Path(folder, "stopped")
    train(ddp, 20)
    if rank == 1:
        mark.with_suffix(".tmp").write_text(json.dumps([os.getpid(), time.monotonic()]))
        mark.with_suffix(".tmp").rename(mark)
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_until(mark.exists)
    pid, stopped_s = json.loads(mark.read_text())
    named_s, _ = heard.wait_for("no heartbeat from rank 1 ", 2 * NAMED_S)
    Path(folder, f"done{rank}").touch()
    if rank == 0:
        wait_until(lambda: len(list(Path(folder).glob("done*"))) == world_size - 1)
        os.kill(pid, signal.SIGKILL)
    return named_s - float(stopped_s)


@pytest.mark.slow
def test_by_default_a_stopped_rank_is_named_within_30_s(tmp_path: Path) -> None:
    results = run(stop_one_by_default, 3, str(tmp_path), dies=(1,), fresh=True, env={"COMMOPT_HEARTBEAT": None})
    print(results)
    assert max(results[0], results[2]) < NAMED_S
