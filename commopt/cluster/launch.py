"""Run a script on an emulated cluster and always take everything down again."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from commopt.cluster.counters import INTERFACE, RATE_VARIABLE, Traffic
from commopt.cluster.link import Link
from commopt.cluster.network import MAX_NODES, ClusterUnavailableError, Network, address, uninterrupted

# How long nodes get to fail by themselves after the first one did, and then to react to SIGTERM.
_GRACE_S = 5.0
_POLL_S = 0.05
_MASTER_PORT = 29500  # always free: the namespace is new
_TIMED_OUT = 124
_NODE_SCRIPT = Path(__file__).with_name("node.py")


@dataclass(frozen=True)
class NodeTraffic:
    """What one node moved during a run."""

    node_rank: int
    ranks: int
    traffic: Traffic


@dataclass(frozen=True)
class Result:
    """Outcome of one run; `returncode` is that of the rank that failed first, 124 after a timeout.

    `stdout` is node 0's alone. `stderr` is node 0's, and both streams of the other nodes with `[node i] `
    before each line. Both are empty when the run was not captured.
    """

    returncode: int
    stdout: str
    stderr: str
    seconds: float
    nodes: tuple[NodeTraffic, ...]


class Cluster:
    """Context manager: emulated nodes that live from `with` to its end; `run` may be called many times.

    `ranks_per_node` is one number for all nodes or one per node. Raises ValueError for arguments that make no
    sense, ClusterUnavailableError where the machine cannot do it.
    """

    def __init__(
        self,
        nodes: int = 2,
        ranks_per_node: int | Sequence[int] = 2,
        rate: str = "200mbit",
        delay: str = "0ms",
        burst: str = "auto",
    ) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"nodes {nodes} must be between 1 and {MAX_NODES}")
        ranks = (ranks_per_node,) * nodes if isinstance(ranks_per_node, int) else tuple(ranks_per_node)
        if len(ranks) != nodes:
            raise ValueError(f"ranks_per_node {ranks} names {len(ranks)} nodes, not {nodes}; give one number per node")
        if min(ranks) < 1:
            raise ValueError(f"ranks_per_node {ranks} must be at least 1 on every node")
        self.ranks_per_node = ranks
        self.rate = rate
        self.link = Link.parse(rate, delay, burst)
        self._network = Network(nodes, self.link)

    @staticmethod
    def missing(rate: str = "200mbit", delay: str = "0ms") -> str | None:
        """Try a cluster of one node; return why this machine cannot emulate such a link, None if it can."""
        try:
            with Cluster(nodes=1, rate=rate, delay=delay):
                return None
        except ClusterUnavailableError as error:
            return str(error)

    def __enter__(self) -> Cluster:
        self._network.build()
        self._scratch = tempfile.TemporaryDirectory(prefix="commopt-cluster-")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._network.remove()
        self._scratch.cleanup()

    def cut(self, node_rank: int) -> None:
        """Cut a node off from all others, while something runs: their connections break without a sign."""
        self._network.connect(node_rank, up=False)

    def mend(self, node_rank: int) -> None:
        """Undo `cut`."""
        self._network.connect(node_rank, up=True)

    def run(
        self,
        command: Sequence[str],
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        capture: bool = True,
    ) -> Result:
        """Run torchrun's `SCRIPT ARGS...` or `-m MODULE ARGS...` on all ranks, until no process is left.

        With `capture` False node 0 keeps this process's stdout, stderr and terminal, and the lines of the
        other nodes go to stderr as they come. Never raises for a script that fails; see `Result.returncode`.
        """
        nodes = range(len(self.ranks_per_node))
        before = [self._network.traffic(node_rank) for node_rank in nodes]
        start = time.monotonic()
        stdout: list[str] = []
        stderr: list[str] = []
        log = stderr.append if capture else _write_stderr
        agents: list[subprocess.Popen[str]] = []
        pumps: list[threading.Thread] = []
        try:
            for node_rank in nodes:
                agent = self._start(node_rank, command, env or {}, piped=capture or node_rank > 0)
                agents.append(agent)
                prefix = f"[node {node_rank}] " if node_rank else ""
                for stream, sink in (
                    (agent.stdout, log if node_rank else stdout.append),
                    (agent.stderr, log),
                ):
                    if stream is not None:
                        pumps.append(_pump(stream, sink, prefix))
            returncode = _wait(agents, timeout_s, log)
        finally:
            with uninterrupted():
                _terminate(agents)
                self._network.kill()
                for pump in pumps:
                    pump.join()
        seconds = time.monotonic() - start
        moved = (self._network.traffic(node_rank) - before[node_rank] for node_rank in nodes)
        traffic = tuple(map(NodeTraffic, nodes, self.ranks_per_node, moved))
        return Result(returncode, "".join(stdout), "".join(stderr), seconds, traffic)

    def _start(
        self, node_rank: int, command: Sequence[str], env: Mapping[str, str], piped: bool
    ) -> subprocess.Popen[str]:
        torchrun = [sys.executable, str(_NODE_SCRIPT), f"--nnodes={len(self.ranks_per_node)}"]
        torchrun += [f"--node-rank={node_rank}", f"--nproc-per-node={self.ranks_per_node[node_rank]}"]
        torchrun += [f"--master-addr={address(0)}", f"--master-port={_MASTER_PORT}"]
        torchrun += [f"--log-dir={self._scratch.name}"]  # torchrun leaves its own behind in /tmp
        output = subprocess.PIPE if piped else None
        return subprocess.Popen(
            self._network.enter(node_rank, [*torchrun, *command]),
            env={**os.environ, **self._environment(node_rank), **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            errors="replace",
            # Ctrl-C at the terminal reaches only this process, which then stops the nodes in order.
            start_new_session=True,
        )

    def _environment(self, node_rank: int) -> dict[str, str]:
        return {
            RATE_VARIABLE: self.rate,
            "NCCL_HOSTID": self._network.nodes[node_rank],
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


def _wait(agents: Sequence[subprocess.Popen[str]], timeout_s: float | None, log: Callable[[str], object]) -> int:
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    failure = 0
    while True:
        codes = [agent.poll() for agent in agents]
        if not failure and (failure := next((code for code in codes if code), 0)):
            deadline = time.monotonic() + _GRACE_S
        if time.monotonic() > deadline and not failure:
            log(f"[cluster] still running after {timeout_s:g} s; stopped\n")
            return _TIMED_OUT
        if None not in codes or time.monotonic() > deadline:
            return failure if failure >= 0 else 128 - failure
        time.sleep(_POLL_S)


def _terminate(agents: Sequence[subprocess.Popen[str]]) -> None:
    for agent in agents:
        agent.terminate()
    deadline = time.monotonic() + _GRACE_S
    for agent in agents:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.0, deadline - time.monotonic()))


def _pump(stream: IO[str], sink: Callable[[str], object], prefix: str) -> threading.Thread:
    def copy() -> None:
        with stream:
            for line in stream:
                sink(prefix + line)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def _write_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()
