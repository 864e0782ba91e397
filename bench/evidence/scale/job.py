# SPDX-License-Identifier: Apache-2.0
"""A world of light processes of this machine: set up, agree, beat, and lose a rank; what each phase asks and takes.

The processes are forked from one that has torch loaded, so 64 of them share its memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which DDP loads: once, before the forks
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.evidence.scale.counting import CountingStore, Counts
from commopt.groups import join
from commopt.groups.store import limited_store

RANKS_PER_NODE = 4
BEAT_S = 2.0
BEATS = 5
_TIMEOUT_S = 300.0
FORK = multiprocessing.get_context("fork")


@contextmanager
def store_host() -> Iterator[tuple[int, int]]:
    """Host a store in a process of its own; give its port and the id of the process."""
    port, end = FORK.SimpleQueue(), FORK.Event()
    process = FORK.Process(target=_host, args=(port, end))
    process.start()
    try:
        assert process.pid is not None
        yield port.get(), process.pid
    finally:
        end.set()
        process.join()


def _host(port: Any, end: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    end.wait()


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken, of all its threads."""
    ns = [int(Path(task, "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(ns) / 1e9


def run_world(size: int) -> dict[str, Any]:
    """Run a world; return a record for each phase, and what each rank holds."""
    with tempfile.TemporaryDirectory() as folder, store_host() as (port, host):
        barrier = FORK.Barrier(size)
        ranks = [FORK.Process(target=_rank, args=(rank, size, port, host, barrier, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(_TIMEOUT_S)
            if process.exitcode is None:
                process.kill()
        if bad := [rank for rank, process in enumerate(ranks[:-1]) if process.exitcode]:
            raise SystemExit(f"ranks {bad} of {size} failed")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    phases = [{"phase": name, **_together([each[name] for each in found if name in each])} for name in found[0]]
    return {"ranks": size, "phases": phases}


def _together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of what all ranks found in a phase: sums, the most of one rank but rank 0, and rank 0's."""
    record: dict[str, Any] = {"ranks": len(ranks), "first": ranks[0]["requests"]}
    for name in ("requests", "nbytes"):
        kinds = sorted({kind for each in ranks for kind in each[name]})
        record[name] = {kind: sum(each[name].get(kind, 0) for each in ranks) for kind in kinds}
        record[f"{name}_of_one"] = {kind: max(each[name].get(kind, 0) for each in ranks[1:]) for kind in kinds}
    record["seconds"] = max(each["seconds"] for each in ranks)
    for name in ("files", "threads", "kib"):
        record[name] = max(each[name] for each in ranks)
    record["host_cpu_s"], record["host_files"] = ranks[0]["host_cpu_s"], ranks[0]["host_files"]
    record["named"] = sum(each.get("named", 0) for each in ranks)
    return record


class _Phases:
    """Counts and measures one phase after the other on this rank."""

    def __init__(self, host: int, barrier: Any, counts: Counts) -> None:
        self._host, self._barrier, self._counts = host, barrier, counts
        self.found: dict[str, dict[str, Any]] = {}

    def run(self, name: str, call: Callable[[], Any], *, all_end: bool = True) -> Any:
        """Let all ranks begin a phase together; all but the last one's end together too."""
        self._barrier.wait()
        self._counts.take()
        cpu, begin = cpu_s(self._host), time.monotonic()
        self._barrier.wait()
        result = call()
        seconds, counted = time.monotonic() - begin, self._counts.take()
        if all_end:
            self._barrier.wait()
        self.found[name] = {
            **counted,
            "seconds": seconds,
            "host_cpu_s": cpu_s(self._host) - cpu,
            "host_files": len(os.listdir(f"/proc/{self._host}/fd")),
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "kib": _private_kib(),
        }
        return result


def _private_kib() -> int:
    """Return the memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _rank(rank: int, size: int, port: int, host: int, barrier: Any, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"COMMOPT_RANKS_PER_NODE": str(RANKS_PER_NODE), "COMMOPT_HEARTBEAT": str(BEAT_S)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "COMMOPT_FLIGHT": folder, "COMMOPT_PLAN": "ddp"}
    counts, file = Counts(), Path(folder, f"{rank}.json")
    phases = _Phases(host, barrier, counts)
    limit = timedelta(seconds=_TIMEOUT_S)
    store = CountingStore(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit), counts)
    phases.run("nothing", lambda: None)
    phases.run("torch", lambda: dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit))
    phases.run("connect", lambda: limited_store("", _TIMEOUT_S))  # torch looks up the name of the store's address
    membership = phases.run("setup", join)
    for number in range(3):
        phases.run(f"agreement {number}", lambda: membership.agree("a purpose", number=number))  # noqa: B023
    ddp = phases.run("torch's DDP", lambda: DistributedDataParallel(nn.Linear(8, 8)))
    phases.run("attach", lambda: commopt.attach(ddp, "hierarchical"))
    phases.run("first steps", lambda: _train(ddp, 3))  # in the second one DDP rebuilds its buckets
    phases.run("heartbeat", lambda: time.sleep(BEATS * BEAT_S))
    if rank == size - 1:
        file.write_text(json.dumps(phases.found))
        barrier.wait()
        barrier.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    error = phases.run("failure", lambda: _go_on(ddp), all_end=False)
    phases.found["failure"]["named"] = int(f"rank {size - 1}" in error)
    file.write_text(json.dumps(phases.found))
    sys.stdout.flush()
    os._exit(0)  # the groups are gone, and nobody waits


def _go_on(ddp: nn.Module) -> str:
    """Train until the loss of a rank is known."""
    while True:
        try:
            _train(ddp, 1)
        except commopt.CommoptError as error:
            return str(error)


def _train(ddp: nn.Module, steps: int) -> None:
    for _ in range(steps):
        ddp(torch.ones(1, 8)).sum().backward()
