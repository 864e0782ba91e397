"""Build and remove the namespaces, links and bridge of an emulated cluster."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from commopt.cluster.counters import INTERFACE, PROC_FILES, Traffic
from commopt.cluster.link import Link

MAX_NODES = 254  # one /24
_NAMESPACES = Path("/run/netns")
_CONFIGURATIONS = Path("/etc/netns")  # `ip netns exec NAME` sees NAME/hosts here as /etc/hosts
_SERIAL = itertools.count()
_COMMAND_TIMEOUT_S = 30
_KILL_TIMEOUT_S = 10

# Word in a command that failed -> what the machine lacks.
_REQUIREMENTS = {
    "netem": "a kernel with netem (CONFIG_NET_SCH_NETEM; try `modprobe sch_netem`) or --delay 0ms",
    "tbf": "a kernel with token bucket filters (CONFIG_NET_SCH_TBF; try `modprobe sch_tbf`) or --rate none",
    "veth": "a kernel with veth pairs (CONFIG_VETH; try `modprobe veth`)",
    "bridge": "a kernel with bridges (CONFIG_BRIDGE; try `modprobe bridge`)",
}
_PRIVILEGES = (
    "the right to make network namespaces (CONFIG_NET_NS, CAP_SYS_ADMIN and CAP_NET_ADMIN; "
    "in a container: `docker run --privileged`)"
)


class ClusterUnavailableError(RuntimeError):
    """This machine cannot emulate a cluster; the message says what is missing and how to get it."""


class Network:
    """Namespaces `commopt-<pid>-<serial>-node<i>`, joined by a bridge in `commopt-<pid>-<serial>-hub`.

    Addresses and the names of links are private to the namespaces and cannot collide with the host's.
    """

    def __init__(self, nodes: int, link: Link) -> None:
        self.link = link
        self.name = f"commopt-{os.getpid()}-{next(_SERIAL)}"
        self.nodes = tuple(f"{self.name}-node{node_rank}" for node_rank in range(nodes))
        self._hub = f"{self.name}-hub"

    def build(self) -> None:
        """Make everything, or raise ClusterUnavailableError and leave nothing behind."""
        check_tools()
        remove_leftovers()
        try:
            with uninterrupted():
                self._build()
        except BaseException:
            self.remove()
            raise

    def _build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        _up(self._hub, "br0")
        for node_rank, node in enumerate(self.nodes):
            port = f"node{node_rank}"
            _ip("netns", "add", node)
            self._name_addresses(node)
            _ip("-n", node, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self._hub)
            _ip("-n", node, "address", "add", f"{address(node_rank)}/24", "dev", INTERFACE)
            for arguments in self.link.near_end():
                _tc("-n", node, "qdisc", "add", "dev", INTERFACE, *arguments)
            for arguments in self.link.far_end():
                _tc("-n", self._hub, "qdisc", "add", "dev", port, *arguments)
            _ip("-n", self._hub, "link", "set", port, "master", "br0")
            _up(self._hub, port)
            _up(node, INTERFACE)
            _up(node, "lo")
            _run(self.enter(node_rank, ["true"]))

    def _name_addresses(self, node: str) -> None:
        # torch looks up its peers' names, by IPv4 address mapped to IPv6, and warns when nobody answers.
        peers = ((address(node_rank), f"node{node_rank}") for node_rank in range(len(self.nodes)))
        names = (f"{form}{ip} {name}" for ip, name in peers for form in ("", "::ffff:"))
        hosts = _CONFIGURATIONS / node / "hosts"
        hosts.parent.mkdir(parents=True)
        hosts.write_text("\n".join([Path("/etc/hosts").read_text(), *names, ""]))

    def enter(self, node_rank: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a node."""
        return ["ip", "netns", "exec", self.nodes[node_rank], *command]

    def traffic(self, node_rank: int) -> Traffic:
        return Traffic.parse(*(_run(self.enter(node_rank, ["cat", file])) for file in PROC_FILES))

    def connect(self, node_rank: int, *, up: bool) -> None:
        """Pull a node's cable out of the hub, or put it back: nobody is told, packets are lost."""
        _ip("-n", self._hub, "link", "set", f"node{node_rank}", "up" if up else "down")

    def kill(self) -> None:
        """Kill every process on every node, however it was started, and wait until all are gone."""
        with uninterrupted():
            for node in self.nodes:
                _kill(node)

    def remove(self) -> None:
        """Kill what runs on the nodes and delete them; links and bridge go with their namespaces."""
        with uninterrupted():
            for namespace in (*self.nodes, self._hub):
                _delete(namespace)


def address(node_rank: int) -> str:
    return f"10.77.0.{node_rank + 1}"


def check_tools() -> None:
    """Raise ClusterUnavailableError unless this is root on Linux with iproute2."""
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        raise ClusterUnavailableError(
            f"no {' and no '.join(absent)} on PATH; an emulated cluster needs Linux with iproute2 "
            "(`apt-get install iproute2`, `dnf install iproute iproute-tc`)"
        )
    if os.geteuid() != 0:
        raise ClusterUnavailableError(
            f"user id {os.geteuid()} may not make network namespaces; an emulated cluster needs root "
            '(`sudo env "PATH=$PATH" commopt cluster ...`)'
        )


def remove_leftovers() -> None:
    """Remove what launchers that were killed outright left: namespaces named after a process that is gone.

    A reused process id only delays the removal. Launchers that share /run/netns must share process ids too.
    """
    for namespace in _NAMESPACES.glob("commopt-*"):
        match = re.fullmatch(r"commopt-(\d+)-\d+-(?:hub|node\d+)", namespace.name)
        if match and not Path("/proc", match[1]).exists():
            # Another launcher may be removing the same one.
            with suppress(ClusterUnavailableError):
                _delete(namespace.name)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back until the block, which must take a bounded time, is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, lambda number, frame: held.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


def _delete(namespace: str) -> None:
    shutil.rmtree(_CONFIGURATIONS / namespace, ignore_errors=True)
    if (_NAMESPACES / namespace).exists():
        _kill(namespace)
        _ip("netns", "delete", namespace)


def _kill(namespace: str) -> None:
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    # Again and again, because a process may fork between being listed and being killed.
    while pids := _ip("netns", "pids", namespace).split():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {', '.join(pids)} in {namespace} outlive SIGKILL; look for stuck I/O")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _up(namespace: str, interface: str) -> None:
    # Without a link-local address it sends nothing by itself that would be counted as the job's packets. Two
    # commands, because a single one would bring it up first.
    _ip("-n", namespace, "link", "set", interface, "addrgenmode", "none")
    _ip("-n", namespace, "link", "set", interface, "up")


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _tc(*arguments: str) -> str:
    return _run(["tc", *arguments])


def _run(command: Sequence[str]) -> str:
    # In a session of its own, Ctrl-C at the terminal cannot cut a command short and leave half its work.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        requirement = next((lack for word, lack in _REQUIREMENTS.items() if word in command), _PRIVILEGES)
        raise ClusterUnavailableError(
            f"`{' '.join(command)}` failed: {done.stderr.strip().rstrip('.')}. An emulated cluster needs {requirement}"
        )
    return done.stdout
