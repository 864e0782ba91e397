# SPDX-License-Identifier: Apache-2.0
"""Run a function on every rank of a small gloo or NCCL world, in worker processes that live from job to job.

    from tests.ranks import run
    sums = run(add_up, 4, nodes=(2, 2))       # add_up(rank, world_size) on four ranks of two emulated nodes
    sums = run(add_up, 4, nodes=(2, 2), device="cuda")       # the same over NCCL; ranks may share a GPU

Importing torch takes seconds. Workers are therefore kept, so that a job costs a new process group, not a new
process, and new ones are forked from a server that has torch loaded and nothing running. A job that fails, hangs or
loses a rank takes its workers with it, because what they hold may be poisoned.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.speed import limit

T = TypeVar("T")
Nodes = Sequence[int] | Sequence[Sequence[int]]

# What the caller's shell may hold and a job must not see unless it asks for it.
_CLEAN_ENV: dict[str, str | None] = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
    **dict.fromkeys(("NCCL_HOSTID", "COMMOPT_RANKS_PER_NODE", "COMMOPT_SITE", "COMMOPT_CHECK", "COMMOPT_CONNECTIONS")),
    **dict.fromkeys(("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")),
    "COMMOPT_PLAN": "ddp",  # plans depend on the clock: only for who asks
    "COMMOPT_HEARTBEAT": "0",  # beats outlive a job, and would wait for a store that is gone: only for who asks
}
# Whether there is a GPU is asked through NVML: the CUDA runtime, once it was asked, is of no use in forked processes.
_WORKER_ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# NCCL refuses two ranks on one GPU of a host, so each claims a host of its own; then all traffic goes through sockets.
_NCCL_ENV = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
# Loaded once, by the single-threaded server that workers are forked from: a new worker costs no second import.
_PRELOAD = ["numpy", "torch.distributed", "torch.nn.parallel", "torch.utils.checkpoint", "torch._dynamo"]
_PRELOAD += ["commopt", "pytest"]
JOB_LIMIT_S = 150.0
# Once a rank has failed, its peers either follow within seconds or wait for a rank that never comes.
_GRACE_S = 3.0


class RankError(AssertionError):
    """At least one rank raised, died or never returned; `errors` maps each such rank to what is known."""

    def __init__(self, errors: Mapping[int, str], world_size: int) -> None:
        self.errors = dict(errors)
        ranks_by_text: dict[str, list[int]] = {}
        for rank, text in errors.items():  # in the order in which they happened: the first is the cause
            ranks_by_text.setdefault(text, []).append(rank)
        parts = [f"{len(errors)} of {world_size} ranks failed"]
        parts += [f"--- rank {', '.join(map(str, ranks))} {text}" for text, ranks in ranks_by_text.items()]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class _Job:
    fn: Callable[..., object]
    rank: int
    world_size: int
    rendezvous: str
    timeout_s: float
    device: str
    env: dict[str, str | None]
    args: tuple[object, ...]
    kwargs: dict[str, object]


def run(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = JOB_LIMIT_S,
    nodes: Nodes | None = None,
    sites: Sequence[str] | None = None,
    fresh: bool = False,
    dies: Collection[int] = (),
    device: str = "cpu",
    **kwargs: object,
) -> list[T]:
    """Return `[fn(rank, world_size, *args, **kwargs) for every rank]`, each called in its own process.

    fn: module-level function; the process group exists when it is called and is destroyed after it.
    timeout_s: after how many seconds a rank hangs, longer on a slow machine; also of its process group.
    env: variables to set (or, with None, to unset) on every rank for this job.
    nodes: ranks of each emulated node, `((0, 2), (1, 3))`, or just their number, `(2, 2)`; default: one node.
    sites: site of each node; default: none is known.
    fresh: use new processes and discard them afterwards, for jobs that leave a poisoned lane behind, or set variables
        that NCCL reads once in the life of a process.
    device: "cpu" for a gloo group, "cuda" for an NCCL group; ranks are dealt to the GPUs in turn, and nodes must be
        equal blocks of consecutive ranks there.
    dies: ranks whose processes must end instead of returning; their result is None.
    Raises RankError with the traceback of every rank that failed, or the stack of every rank that hung.
    """
    timeout_s = limit(timeout_s)
    node_of = _node_of(nodes, world_size)
    ranks_per_node = _ranks_per_node(node_of) if device == "cuda" else None
    workers = _pool.start(world_size) if fresh else _pool.take(world_size)
    folder = tempfile.mkdtemp(prefix="rendezvous-")
    reusable = False
    try:
        for rank, worker in enumerate(workers):
            place = _place(node_of[rank], ranks_per_node, worker, alone=nodes is None)
            site = None if sites is None else sites[node_of[rank]]
            job_env = {**_CLEAN_ENV, **place, "COMMOPT_SITE": site, "COMMOPT_FLIGHT": folder, **(env or {})}
            store = str(Path(folder, "store"))
            worker.send(_Job(fn, rank, world_size, store, timeout_s, device, job_env, args, kwargs))
        results, errors = _collect(workers, timeout_s, dies)
        reusable = not (errors or fresh or dies)
    finally:  # also when a test timeout or Ctrl-C lands here
        if reusable:
            _pool.give_back(workers)
        else:
            _pool.discard(workers)
        shutil.rmtree(folder, ignore_errors=True)
    if errors:
        raise RankError(errors, world_size)
    return [results[rank] for rank in range(world_size)]


def _node_of(nodes: Nodes | None, world_size: int) -> list[int]:
    """Return the emulated node of every rank."""
    if nodes is None:
        return [0] * world_size
    ranks = count()
    groups = [tuple(next(ranks) for _ in range(node)) if isinstance(node, int) else tuple(node) for node in nodes]
    node_of = {rank: index for index, group in enumerate(groups) for rank in group}
    if sorted(node_of) != list(range(world_size)) or sum(map(len, groups)) != world_size:
        raise ValueError(f"nodes={nodes!r} must name each of the {world_size} ranks once")
    return [node_of[rank] for rank in range(world_size)]


def _ranks_per_node(node_of: Sequence[int]) -> int:
    """Return the ranks of each node where nodes are equal blocks: all that commopt can be told beside NCCL_HOSTID."""
    per_node = node_of.count(0)
    if len(node_of) % per_node or list(node_of) != [rank // per_node for rank in range(len(node_of))]:
        raise ValueError(f"ranks lie on nodes {list(node_of)}; over NCCL nodes must be equal blocks, such as (2, 2)")
    return per_node


def _place(node: int, ranks_per_node: int | None, worker: _Worker, *, alone: bool) -> dict[str, str | None]:
    """Return what tells a rank's node, to commopt and to NCCL, which keeps the first NCCL_HOSTID of a process."""
    if ranks_per_node is not None:
        return {**_NCCL_ENV, "NCCL_HOSTID": worker.name, "COMMOPT_RANKS_PER_NODE": str(ranks_per_node)}
    return {"NCCL_HOSTID": None if alone else f"emulated-node-{node}"}


def _collect(
    workers: Sequence[_Worker], timeout_s: float, dies: Collection[int]
) -> tuple[dict[int, Any], dict[int, str]]:
    """Wait for one reply per worker; return the results and the errors by rank."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout_s
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for connection in ready:
            assert isinstance(connection, multiprocessing.connection.Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, payload = pickle.loads(connection.recv_bytes())
            except EOFError:
                workers[rank].process.join(_GRACE_S)
                if rank in dies:
                    results[rank] = None
                else:
                    errors[rank] = f"died (exit code {workers[rank].process.exitcode}):\n{workers[rank].log_tail()}"
                continue
            if not succeeded:
                errors[rank] = f"raised:\n{payload}"
            elif rank in dies:
                errors[rank] = f"returned {payload!r} but was expected to die"
            else:
                results[rank] = payload
        if errors:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not ready:
            why = "long after another rank failed" if errors else f"after {timeout_s:g} s"
            hung = [(rank, workers[rank]) for rank in waiting.values()]
            errors.update({rank: f"was still running {why}:\n{worker.stacks()}" for rank, worker in hung})
            break
    return results, errors


class _Worker:
    """One worker process, as its parent sees it."""

    _numbers = count()

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.name = f"worker-{next(self._numbers)}"
        self._log = folder / f"{self.name}.log"
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(self._log)), daemon=True)
        with _environment(_WORKER_ENV):  # OMP_NUM_THREADS counts only when it is set before torch is imported
            self.process.start()
        theirs.close()

    def send(self, job: _Job) -> None:
        """Start one job; the worker learns `sys.path` too, as test modules come from folders added late."""
        self.connection.send_bytes(pickle.dumps((sys.path, pickle.dumps(job))))

    def log_tail(self) -> str:
        """Return the end of what the process printed."""
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else "(no output)"

    def stacks(self) -> str:
        """Return the stack of every thread of the running process."""
        start = self._log.stat().st_size if self._log.exists() else 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
        return self._log.read_text(errors="replace")[start:] if self._log.exists() else "(had not started)"

    def kill(self) -> None:
        """End the process now."""
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


@dataclass
class _Pool:
    """Idle workers, and where they log."""

    _idle: list[_Worker] = field(default_factory=list)
    _folder: Path | None = None

    def take(self, number: int) -> list[_Worker]:
        """Return `number` living workers, as many old ones as there are."""
        taken = [worker for worker in self._idle[:number] if worker.process.is_alive()]
        self._idle = self._idle[number:]
        return taken + self.start(number - len(taken))

    def start(self, number: int) -> list[_Worker]:
        """Return `number` new workers."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        return [_Worker(self._folder) for _ in range(number)]

    def give_back(self, workers: Sequence[_Worker]) -> None:
        """Keep workers that ended a job well; the same process plays the same rank again."""
        self._idle = [*workers, *self._idle]

    def discard(self, workers: Sequence[_Worker]) -> None:
        """End workers whose state cannot be trusted."""
        for worker in workers:
            worker.kill()

    def close(self) -> None:
        """End all workers and remove their logs."""
        self.discard(self._idle)
        self._idle = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


@contextlib.contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Apply changes to os.environ (None unsets) and take them back at the end."""
    before = {name: os.environ.get(name) for name in changes}

    def assign(values: Mapping[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    assign(changes)
    try:
        yield
    finally:
        assign(before)


def _serve(connection: multiprocessing.connection.Connection, log_path: str) -> None:
    """Do jobs until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    log = open(log_path, "w")  # noqa: SIM115  (open as long as the process lives)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: who looks at all objects, as the collector does, need not look at it
    while True:
        try:
            path, pickled_job = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        sys.path[:] = path
        try:
            reply = pickle.dumps((True, _do(pickle.loads(pickled_job), log)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        with contextlib.suppress(OSError):
            connection.send_bytes(reply)


def _do(job: _Job, log: Any) -> object:
    """Run one job inside its own process group."""
    # A parent that was killed cannot end a hung worker; then the worker ends itself.
    faulthandler.dump_traceback_later(job.timeout_s + 30, exit=True, file=log)
    with _environment(job.env):
        dist.init_process_group(
            "nccl" if job.device == "cuda" else "gloo",
            init_method=f"file://{job.rendezvous}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=job.timeout_s),
            device_id=_gpu_to_bind(job.rank) if job.device == "cuda" else None,
        )
        dist.barrier()  # else a rank that is done at once closes the connections its peers are still making
        result = job.fn(job.rank, job.world_size, *job.args, **job.kwargs)
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_meshes()
    faulthandler.cancel_dump_traceback_later()
    return result


def _forget_meshes() -> None:
    """Let the next job find no mesh of this one, if it has computed on DTensors."""
    if "torch.distributed.tensor" in sys.modules:
        from commopt.sharded.seams import forget_meshes  # which loads FSDP

        forget_meshes()


def _gpu_to_bind(rank: int) -> torch.device | None:
    """Make a rank's GPU the current one of this process, whose CUDA context begins here.

    Return it for the first process group. Over later ones that know their GPU, torch makes the groups of a mesh by
    split_group, which dies of SIGSEGV where the world is not the first NCCL group of its process (pytorch#192109).
    """
    global _has_bound
    gpu = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    _has_bound, before = True, _has_bound
    return None if before else gpu


_has_bound = False


_pool = _Pool()
atexit.register(_pool.close)
