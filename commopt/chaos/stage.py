# SPDX-License-Identifier: Apache-2.0
"""Emulated nodes on which one run follows the other, and what faults do to them from outside of the ranks."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, count
from pathlib import Path
from types import TracebackType

from commopt.chaos.faults import FLAP_S, SLOW_RATE, STOP_S
from commopt.chaos.journal import Event, Journal, JournalReader
from commopt.chaos.judge import RankRecord, RunRecord
from commopt.chaos.rank import RunOrder
from commopt.cluster import ClusterUnavailableError, EmulatedCluster
from commopt.cluster.network import address

_PORT = 29500
_POLL_S = 0.02
_BEGINS_WITHIN_S = 120.0  # before the first step of a rank
_GRACE_S = 30.0  # beyond the limit, for processes to end: a busy machine needs seconds
_STARTS_WITHIN_S = 300.0  # loading torch on a busy machine


class Stage:
    """Context manager: nodes whose ranks run one order after the other. Raises as EmulatedCluster does.

    limit_s: for how long after a fault a rank may say nothing.
    """

    def __init__(self, nodes: int, ranks_per_node: int, rate: str, limit_s: float) -> None:
        self._cluster = EmulatedCluster(nodes, ranks_per_node, rate)
        self._limit_s = limit_s
        self._agents: list[subprocess.Popen[str]] = []
        self._said: queue.Queue[Event] = queue.Queue()
        self._ports = count(_PORT, 2)  # the store's, and the scheduler's
        self._stopped = False
        ends = list(accumulate(self._cluster.ranks_per_node))
        self.nodes = [next(node for node, end in enumerate(ends) if rank < end) for rank in range(ends[-1])]

    def __enter__(self) -> Stage:
        self._cluster.__enter__()
        try:
            for node_rank in range(len(self._cluster.ranks_per_node)):
                self._agents.append(self._start(node_rank))
            self._await("ready", len(self._agents), _STARTS_WITHIN_S)
        except BaseException:
            self._cluster.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cluster.__exit__(kind, value, traceback)
        for agent in self._agents:
            agent.wait()

    def _start(self, node_rank: int) -> subprocess.Popen[str]:
        counts = ",".join(map(str, self._cluster.ranks_per_node))
        command = [sys.executable, "-u", "-m", "commopt.chaos.node", str(node_rank), counts, address(0)]
        agent = self._cluster.start(
            node_rank, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        threading.Thread(target=self._listen, args=(agent,), daemon=True).start()
        return agent

    def _listen(self, agent: subprocess.Popen[str]) -> None:
        assert agent.stdout is not None
        for line in agent.stdout:
            self._said.put(json.loads(line))
        self._said.put({"gone": True})

    def _await(self, what: str, times: int, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while times:
            try:
                said = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                said = {"gone": True}
            if "gone" in said:
                raise ClusterUnavailableError("a node's process ended, or did not start; see what it wrote to stderr")
            times -= what in said

    def _order(self, text: str, agents: Sequence[subprocess.Popen[str]]) -> None:
        for agent in agents:
            assert agent.stdin is not None
            agent.stdin.write(text + "\n")
            agent.stdin.flush()

    def run(self, order: RunOrder) -> RunRecord:
        """Run the script on all ranks until none is left, or until they are stuck and killed."""
        Path(order.folder).mkdir(parents=True, exist_ok=True)
        self._order(json.dumps({**order.told(), "port": next(self._ports)}), self._agents)
        nodes = [*self.nodes, 0] if order.has_server else self.nodes
        performance = _Performance(order, self._cluster, nodes, self._limit_s)
        try:
            while performance.going_on() and not self._stopped:
                self._hear(performance)
        finally:
            performance.kill_all()
            while performance.left:
                self._hear(performance)
            performance.clear_up()
            self._order("end", self._agents)
            self._await("ended", len(self._agents), _STARTS_WITHIN_S)
        if performance.problem is not None:
            raise performance.problem
        return performance.record()

    def stop(self) -> None:
        """End the run under way; it comes out as stuck."""
        self._stopped = True

    def _hear(self, performance: _Performance) -> None:
        with suppress(queue.Empty):
            said = self._said.get(timeout=_POLL_S)
            if "gone" in said:
                raise ClusterUnavailableError("a node's process ended; see what it wrote to stderr")
            performance.hear(said)


class _Performance:
    """One run: what is heard of its ranks, and the fault. The last process may be a parameter server."""

    def __init__(self, order: RunOrder, cluster: EmulatedCluster, nodes: Sequence[int], limit_s: float) -> None:
        self.order, self._cluster, self._nodes, self._limit_s = order, cluster, nodes, limit_s
        folder = Path(order.folder)
        self._journal = Journal(folder / "events.jsonl")
        self._readers = [JournalReader(folder / f"rank{rank}.jsonl") for rank in range(len(nodes))]
        self._events: list[list[Event]] = [[] for _ in nodes]
        self._pids: dict[int, int] = {}
        self._ended: dict[int, tuple[int | None, float]] = {}
        self._steps_begun = False
        self._progress_s = self._begun_s = time.monotonic()
        self._deeds: list[threading.Thread] = []
        self._killed = False
        self._number = 0
        self.problem: Exception | None = None  # of the fault itself, which did not come about
        self._journal.write("begin", fault=order.fault, strategy=order.strategy, victim=order.victim)

    @property
    def left(self) -> bool:
        """Whether any rank still runs."""
        return len(self._ended) < len(self._nodes)

    def hear(self, said: Event) -> None:
        """Take note of a process that began or ended."""
        if "pid" in said:
            self._pids[said["rank"]] = said["pid"]
            if self._killed:
                self._signal(said["rank"], signal.SIGKILL)
        if "status" in said:
            status = None if self._killed else said["status"]
            self._ended[said["rank"]] = status, said["t"]
            self._journal.write("exit", said["t"], rank=said["rank"], status=said["status"], stuck=self._killed)
            self._progress_s = time.monotonic()
            if self.order.has_server and self._ended.keys() == set(range(len(self._nodes) - 1)):
                self._signal(len(self._nodes) - 1, signal.SIGTERM)  # the server's work is done

    def going_on(self) -> bool:
        """Read the journals, let the fault strike; return whether to wait for more."""
        for rank, reader in enumerate(self._readers):
            for event in reader.new():
                self._events[rank].append(event)
                if event["event"] in ("step", "end", "strike"):
                    self._progress_s = time.monotonic()
                    self._steps_begun |= event["event"] == "step"
                if event["event"] == "strike":
                    self._strike(event["number"])
        within_s = self._limit_s + _GRACE_S if self._steps_begun else _BEGINS_WITHIN_S
        return self.left and self.problem is None and time.monotonic() - self._progress_s < within_s

    def kill_all(self) -> None:
        """Kill what is left; such ranks count as stuck."""
        self._killed = True
        for rank in self._pids:
            if rank not in self._ended:
                self._signal(rank, signal.SIGKILL)

    def clear_up(self) -> None:
        """Undo what was done to links, and read the rest."""
        for deed in self._deeds:
            deed.join()
        node = self._nodes[self.order.victim]
        if self.order.fault in ("partition", "flap"):
            self._cluster.mend(node)
        if self.order.fault == "slow":
            self._cluster.reshape(node)
        self.going_on()

    def record(self) -> RunRecord:
        """Return what is known of the run."""
        ranks = tuple(RankRecord.of(*self._ended[rank], self._events[rank]) for rank in range(len(self._nodes)))
        victim, fault = self.order.victim, self.order.fault
        struck = [event["t"] for event in self._events[victim] if event["event"] == "strike"]
        cut = tuple(rank for rank, node in enumerate(self._nodes) if node == self._nodes[victim])
        server = len(ranks) - 1 if self.order.has_server else None
        begun_s, struck_s = self._begun_s, struck[0] if struck else None
        return RunRecord(self.order.strategy, fault, victim, cut, begun_s, struck_s, ranks, server)

    # ---------------------------------------------------------------------------------------- faults

    def _strike(self, number: int) -> None:
        outside: Callable[[], None] | None = getattr(self, f"_{self.order.fault}", None)

        def deed() -> None:
            if outside is None:
                self._journal.write("fault", what=f"{self.order.fault} on rank {self.order.victim}")
                return
            try:
                outside()
            except (ClusterUnavailableError, RuntimeError, OSError) as error:
                self.problem = error

        self._number = number
        self._deeds.append(threading.Thread(target=deed))
        self._deeds[-1].start()

    def _struck(self, what: str) -> None:
        """Note what was done, and let the rank go on that waits for it."""
        self._journal.write("fault", what=what)
        Path(self.order.folder, f"struck{self._number}").touch()

    def _signal(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pids[rank], number)

    def _kill(self) -> None:
        self._signal(self.order.victim, signal.SIGKILL)
        self._struck(f"rank {self.order.victim} killed")

    def _stop(self) -> None:
        self._signal(self.order.victim, signal.SIGSTOP)
        self._struck(f"rank {self.order.victim} stopped")
        time.sleep(STOP_S)
        self._signal(self.order.victim, signal.SIGCONT)
        self._journal.write("over", what="continued")

    def _partition(self) -> None:
        node = self._nodes[self.order.victim]
        self._cluster.cut(node)
        self._struck(f"node {node} cut off")

    def _flap(self) -> None:
        node = self._nodes[self.order.victim]
        self._cluster.cut(node)
        self._struck(f"link of node {node} down")
        time.sleep(FLAP_S)
        self._cluster.mend(node)
        self._journal.write("over", what="up")

    def _slow(self) -> None:
        node = self._nodes[self.order.victim]
        self._cluster.reshape(node, SLOW_RATE)
        self._struck(f"link of node {node} at {SLOW_RATE}")
