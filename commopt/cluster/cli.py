# SPDX-License-Identifier: Apache-2.0
"""`commopt cluster`: run a script on emulated nodes, and always remove them afterwards."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, NamedTuple

from commopt.cluster.commands import ClusterUnavailableError
from commopt.cluster.events import LinkTimeline, StartSignal, read_cuts, read_links
from commopt.cluster.link import EmulatedLink
from commopt.cluster.network import (
    INTERFACE,
    MAX_NODES,
    OPTIONS_VARIABLE,
    RATE_VARIABLE,
    RELAY_BPS,
    Counters,
    EmulatedNetwork,
    LinkTraffic,
    address,
    uninterrupted,
)
from commopt.cluster.relay import RelayCounters
from commopt.cluster.report import NodeTraffic, Result, show
from commopt.cluster.sites import EmulatedSites
from commopt.command_line import refuse, whole

# Time for the other nodes to fail after the first one, and then to react to SIGTERM.
_GRACE_S = 5.0
_POLL_S = 0.05
_MASTER_PORT = 29500  # always free: the namespace is new
_TIMED_OUT = 124
_NODE_SCRIPT = Path(__file__).with_name("node.py")


class _Counted(NamedTuple):
    """What all counters of the network show."""

    nodes: list[LinkTraffic]
    sites: list[Counters]
    relays: dict[int, RelayCounters]


class EmulatedCluster:
    """Context manager: emulated nodes that exist inside the `with` block. `run` may be called many times.

    Raises ValueError for invalid arguments, ClusterUnavailableError if this machine cannot emulate the cluster.

    nodes: number of nodes.
    ranks_per_node: one number for all nodes, or one per node.
    rate: rate of every node's link, for example "200mbit"; "none": unshaped.
    delay: one-way delay of the network.
    sites: where nodes are not all equally near.
    loss: share of packets lost on the way, "0.01%".
    node_links: what is otherwise for single nodes, from the start or for a time: "1:rate=50mbit", "1@30s+5s:loss=1%".
    cuts: when single nodes are cut off during `run`: "1@30s+5s"; times count from when the ranks of all nodes began.
    flaps: when the link of single nodes goes down and up again and again: "1@30s/2s", "1@30s/2s+20s".
    """

    def __init__(
        self,
        nodes: int = 2,
        ranks_per_node: int | Sequence[int] = 2,
        rate: str = "200mbit",
        delay: str = "0ms",
        sites: EmulatedSites | None = None,
        loss: str = "0%",
        node_links: Sequence[str] = (),
        cuts: Sequence[str] = (),
        flaps: Sequence[str] = (),
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
        self.link = EmulatedLink.parse(rate, delay, loss)
        links, changes = read_links(node_links, nodes, {"rate": rate, "delay": delay, "loss": loss})
        self._events = (*changes, *read_cuts(cuts, flaps, nodes))
        self.sites = EmulatedSites() if sites is None else sites
        if self.sites.nodes and sum(self.sites.nodes) != nodes:
            raise ValueError(f"sites of {self.sites.nodes} nodes hold {sum(self.sites.nodes)} nodes, not {nodes}")
        impaired = [word for name, text in (("--delay", delay), ("--loss", loss)) for word in (name, text)]
        several = (("--node", node_links), ("--cut", cuts), ("--flap", flaps))
        self._options = [*shlex.split(self.sites.options()), *(impaired if self.link.is_impaired else [])]
        self._options += [word for name, texts in several for text in texts for word in (name, text)]
        site_of = [self.sites.site_of(node_rank) for node_rank in range(nodes)]
        self._network = EmulatedNetwork(links, site_of, self.sites.link)

    @staticmethod
    def missing(rate: str = "200mbit", delay: str = "0ms", loss: str = "0%") -> str | None:
        """Try a cluster of one node. Return the reason why this machine cannot emulate it, None if it can."""
        try:
            with EmulatedCluster(nodes=1, rate=rate, delay=delay, loss=loss):
                return None
        except ClusterUnavailableError as error:
            return str(error)

    def __enter__(self) -> EmulatedCluster:
        self._network.build()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._network.remove()

    def cut(self, node_rank: int) -> None:
        """Disconnect a node from all others during a run: its connections break silently."""
        self._network.connect(node_rank, up=False)

    def mend(self, node_rank: int) -> None:
        """Undo `cut`."""
        self._network.connect(node_rank, up=True)

    def reshape(self, node_rank: int, rate: str | None = None, delay: str = "0ms", loss: str = "0%") -> None:
        """Give a node's link another rate, delay and loss during a run; without a rate those it had at the start."""
        link = self._network.links[node_rank] if rate is None else EmulatedLink.parse(rate, delay, loss)
        self._network.reshape(node_rank, link)

    def start(self, node_rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a program on one node with options of `subprocess.Popen`. It is killed with the cluster."""
        environment = {**os.environ, **self._environment(node_rank)}
        return subprocess.Popen(self._network.enter(node_rank, command), env=environment, text=True, **options)

    def run(
        self,
        command: Sequence[str],
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        capture: bool = True,
    ) -> Result:
        """Run `SCRIPT ARGS...` or `-m MODULE ARGS...` on all ranks until no process is left.

        A failing script raises nothing; see `Result.returncode`. Raises ClusterUnavailableError if the network fails.

        capture: False gives node 0 this process's stdout, stderr and terminal, and writes the lines of the other nodes
            to stderr as they arrive.
        """
        before = self._count()
        timeline = LinkTimeline(self._network, self._events)
        started = StartSignal()
        start = time.monotonic()
        stdout: list[str] = []
        stderr: list[str] = []
        log = stderr.append if capture else _write_stderr
        if self._network.is_faster_than_relays:
            log(f"[cluster] a relay carries up to {RELAY_BPS / 1e9:g} Gbit/s; pass a --rate below that\n")
        agents: list[subprocess.Popen[str]] = []
        pumps: list[threading.Thread] = []

        def watch() -> None:
            self._network.check_relays()
            elapsed_s = started.elapsed_s()
            for what in timeline.follow(elapsed_s) if elapsed_s is not None else ():
                log(f"[cluster] {elapsed_s:.1f} s: {what}\n")

        try:
            for node_rank in range(len(self.ranks_per_node)):
                agent = self._start(node_rank, command, env or {}, started.writing, piped=capture or node_rank > 0)
                agents.append(agent)
                prefix = f"[node {node_rank}] " if node_rank else ""
                for stream, sink in ((agent.stdout, log if node_rank else stdout.append), (agent.stderr, log)):
                    if stream is not None:
                        pumps.append(_pump(stream, sink, prefix))
            started.close_writing()
            returncode = _wait(agents, timeout_s, log, watch)
        finally:
            with uninterrupted():
                started.close()
                _terminate(agents)
                self._network.kill()
                for pump in pumps:
                    pump.join()
                timeline.undo()
        return self._result(returncode, "".join(stdout), "".join(stderr), time.monotonic() - start, before)

    def _result(self, returncode: int, stdout: str, stderr: str, seconds: float, before: _Counted) -> Result:
        after = self._count()
        moved = (now - then for now, then in zip(after.nodes, before.nodes, strict=True))
        traffic = tuple(map(NodeTraffic, range(len(after.nodes)), self.ranks_per_node, moved))
        sites = tuple(now - then for now, then in zip(after.sites, before.sites, strict=True))
        relays = {node_rank: now.since(before.relays.get(node_rank)) for node_rank, now in after.relays.items()}
        return Result(returncode, stdout, stderr, seconds, traffic, sites, relays, self._uses_netem)

    def _count(self) -> _Counted:
        nodes = [self._network.traffic(node_rank) for node_rank in range(len(self.ranks_per_node))]
        return _Counted(nodes, self._network.site_traffic(), self._network.relays())

    @property
    def _uses_netem(self) -> bool:
        links = (*self._network.links, *(event.link for event in self._events))
        return any(link is not None and link.is_impaired for link in links) and self._network.has_netem

    def _start(
        self, node_rank: int, command: Sequence[str], env: Mapping[str, str], started: int, piped: bool
    ) -> subprocess.Popen[str]:
        launcher = [sys.executable, "-u", str(_NODE_SCRIPT), str(node_rank), ",".join(map(str, self.ranks_per_node))]
        output = subprocess.PIPE if piped else None
        return subprocess.Popen(
            self._network.enter(node_rank, [*launcher, address(0), str(_MASTER_PORT), str(started), *command]),
            pass_fds=[started],
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
        told = {"COMMOPT_SITE": f"site{self.sites.site_of(node_rank)}"} if self.sites.told else {}
        return {
            **told,
            RATE_VARIABLE: self.rate,
            OPTIONS_VARIABLE: shlex.join(self._options),
            "NCCL_HOSTID": self._network.nodes[node_rank],
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }


def _wait(
    agents: Sequence[subprocess.Popen[str]],
    timeout_s: float | None,
    log: Callable[[str], object],
    watch: Callable[[], object],
) -> int:
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    failure = 0
    while True:
        watch()
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
    left = [agent for agent in agents if agent.returncode != 0]  # after status 0 its ranks are gone too
    for agent in left:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for agent in left:
        with suppress(ProcessLookupError):  # none of its group is left
            while time.monotonic() < deadline:
                agent.poll()  # reaps it; otherwise it stays in the group
                os.killpg(agent.pid, 0)
                time.sleep(_POLL_S)


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the emulated cluster."""
    parser.description = "Run a script, as torchrun does, on emulated nodes joined by a slow network (needs root)."
    parser.epilog = "The exit status is that of the rank that failed first."
    add: Any = parser.add_argument
    add("--nodes", type=whole(1), default=2, help="number of nodes (default 2)")
    ranks = "ranks on every node, or one number per node (default 2)"
    add("--ranks-per-node", type=_counts, default=2, metavar="L[,L...]", help=ranks)
    rate = "rate of every node's link: 1gbit, none; received/sent: 50mbit/10mbit (default 200mbit)"
    add("--rate", default="200mbit", help=rate)
    add("--delay", default="0ms", help="one-way delay of the network: 500us, 5ms (default 0ms)")
    sites = "sites of so many nodes: 3,2; or one number, of equal sites (default 1: all nodes are equally near)"
    add("--loss", default="0%", help="share of the packets lost on the way: 0.01%% (default 0%%)")
    other = "another rate, delay or loss of one node, always or for a time: 1:rate=50mbit, 1@30s+5s:loss=1%%,delay=9ms"
    add(
        "--node",
        dest="node_links",
        action="append",
        default=[],
        metavar="NODE[@START[+FOR]]:NAME=VALUE,...",
        help=other,
    )
    cut = "cut a node off, from START on: 1@30s, or for a time: 1@30s+5s. START counts from when all ranks are started"
    add("--cut", dest="cuts", action="append", default=[], metavar="NODE@START[+FOR]", help=cut)
    flap = "let the link of a node be down for PERIOD and up for PERIOD, in turn: 1@30s/2s, or for a time: 1@30s/2s+20s"
    add("--flap", dest="flaps", action="append", default=[], metavar="NODE@START/PERIOD[+FOR]", help=flap)
    add("--sites", type=_counts, default=1, metavar="N[,N...]", help=sites)
    add("--site-rate", default="none", help="rate of each site's link to the others, as --rate (default none)")
    add("--tell-sites", action="store_true", help="set COMMOPT_SITE on every rank")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    add("script", metavar="SCRIPT")
    add("arguments", metavar="ARGS", nargs=argparse.REMAINDER)


def _counts(text: str) -> int | list[int]:
    counts = [whole(1)(count) for count in text.split(",")]
    return counts if "," in text else counts[0]


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _has_module(name: str) -> bool:
    """Return whether ranks will find a module, on sys.path or in the current folder."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
    finally:
        sys.path.pop(0)


def run(arguments: argparse.Namespace) -> int:
    """Run the script; return the exit status of the rank that failed first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    command = [*(["-m"] if arguments.module else []), arguments.script, *arguments.arguments]
    if not arguments.module and not os.path.isfile(arguments.script):  # run_path would take any text for a path
        return refuse("commopt cluster", f"there is no file {arguments.script}; for a module put -m before its name")
    if arguments.module and not _has_module(arguments.script):
        return refuse("commopt cluster", f"there is no module {arguments.script!r}; for a file leave -m out")
    try:
        sites = EmulatedSites.of(arguments.sites, arguments.nodes, arguments.site_rate, arguments.tell_sites)
        with EmulatedCluster(
            arguments.nodes,
            arguments.ranks_per_node,
            arguments.rate,
            arguments.delay,
            sites,
            arguments.loss,
            arguments.node_links,
            arguments.cuts,
            arguments.flaps,
        ) as cluster:
            result = cluster.run(command, capture=False)
    except (ClusterUnavailableError, ValueError) as error:
        return refuse("commopt cluster", error)
    show(result, cluster.rate, cluster.sites)
    return result.returncode
