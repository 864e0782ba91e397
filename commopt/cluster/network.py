# SPDX-License-Identifier: Apache-2.0
"""Namespaces, links and bridge of an emulated cluster, the shaping of a link, and counters of a node's traffic."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path

INTERFACE = "eth0"
RATE_VARIABLE = "BENCH_CLUSTER_RATE"
PROC_FILES = ("/proc/net/dev", "/proc/net/snmp")  # the input of LinkTraffic.parse

# Ethernet 14, IPv4 20, TCP with timestamps 32.
_HEADER_BYTES = 66
_SEGMENT_PAYLOAD_BYTES = 1500 - 20 - 32


@dataclass(frozen=True)
class Counters:
    """Bytes (headers included) and packets of one interface. The difference of two is the traffic between them."""

    tx_bytes: int = 0
    tx_packets: int = 0
    rx_bytes: int = 0
    rx_packets: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    @property
    def tx_payload_bytes(self) -> int:
        """Bytes sent without the TCP, IP and Ethernet headers (acknowledgements count 0)."""
        return self.tx_bytes - _HEADER_BYTES * self.tx_packets


@dataclass(frozen=True)
class LinkTraffic:
    """A node's counters.

    link: traffic over the shaped network.
    loopback: traffic inside the node.
    retransmissions: TCP segments sent again. Acknowledgements wait in the queue of a slow link, and a busy machine
        delays them until TCP considers data lost that did arrive.
    """

    link: Counters
    loopback: Counters
    retransmissions: int = 0

    def __sub__(self, earlier: LinkTraffic) -> LinkTraffic:
        retransmissions = self.retransmissions - earlier.retransmissions
        return LinkTraffic(self.link - earlier.link, self.loopback - earlier.loopback, retransmissions)

    @property
    def link_payload_bytes(self) -> int:
        """Bytes sent by programs over the link: without headers, and every full segment counted once."""
        return max(0, self.link.tx_payload_bytes - _SEGMENT_PAYLOAD_BYTES * self.retransmissions)

    @classmethod
    def parse(cls, proc_net_dev: str, proc_net_snmp: str) -> LinkTraffic:
        """Parse the texts of /proc/net/dev and /proc/net/snmp."""
        counters = _interfaces(proc_net_dev)
        names, values = (line.split() for line in proc_net_snmp.splitlines() if line.startswith("Tcp:"))
        retransmissions = int(values[names.index("RetransSegs")])
        return cls(counters[INTERFACE], counters["lo"], retransmissions)


def _interfaces(proc_net_dev: str) -> dict[str, Counters]:
    """Return the counters of each interface in the text of /proc/net/dev."""
    counters = {}
    for line in proc_net_dev.splitlines()[2:]:
        name, _, fields = line.partition(":")
        rx_bytes, rx_packets, *_, tx_bytes, tx_packets = (int(field) for field in fields.split()[:10])
        counters[name.strip()] = Counters(tx_bytes, tx_packets, rx_bytes, rx_packets)
    return counters


def link_rate() -> str | None:
    """Return the rate of this node's emulated link ("none": unshaped); None outside an emulated cluster."""
    return os.environ.get(RATE_VARIABLE)


def traffic() -> LinkTraffic:
    """Return the counters of this process's node, which all its ranks share.

    Call it after a barrier: a collective returns while its last bytes still wait for the link.
    """
    if link_rate() is None:
        raise RuntimeError(
            "this process is not on an emulated node, so its counters would show the host's own traffic; "
            "start it with `commopt cluster`, or ask link_rate() first"
        )
    return LinkTraffic.parse(*(Path(file).read_text() for file in PROC_FILES))


_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_DELAY_UNITS = {"us": 1.0, "ms": 1e3, "s": 1e6}

# Long enough for TCP never to starve, short enough that a full queue is noticed as lost packets, not as lag.
_QUEUE_S = 0.1
# A host queues packets that its link cannot send yet. A drop there would count as sent twice and never leave.
_NEAR_QUEUE_BYTES = 640_000
# netem's default of 1000 packets would drop packets that a fast link keeps in flight during the delay.
_DELAYED_PACKETS = 100_000


@dataclass(frozen=True)
class EmulatedLink:
    """One node's full-duplex link.

    send_bps: rate of sending in bit/s; None: unshaped.
    receive_bps: rate of receiving in bit/s; None: unshaped.
    delay_us: one-way delay.
    """

    send_bps: int | None = None
    receive_bps: int | None = None
    delay_us: int = 0

    @classmethod
    def parse(cls, rate: str = "none", delay: str = "0ms") -> EmulatedLink:
        """Parse texts such as "200mbit" and "1.5ms". Raises a ValueError that shows the right form.

        Two rates, "50mbit/10mbit", are the rates of receiving and of sending.
        """
        delay_us = _quantity("delay", delay, _DELAY_UNITS, example="5ms")
        receive, slash, send = rate.partition("/")
        return cls(_rate(send if slash else receive), _rate(receive), delay_us)

    def near_end(self) -> list[list[str]]:
        """Return `tc qdisc add` arguments for the node's own end of its link."""
        shaped = _tbf(self.send_bps, least_queue_bytes=_NEAR_QUEUE_BYTES)
        if not self.delay_us:
            return [["root", *tbf] for tbf in shaped]
        netem = ["netem", "delay", f"{self.delay_us}us", "limit", str(_DELAYED_PACKETS)]
        return [["root", "handle", "1:", *netem], *(["parent", "1:1", *tbf] for tbf in shaped)]

    def far_end(self) -> list[list[str]]:
        """Return `tc qdisc add` arguments for the bridge's end, which shapes the node's receiving side."""
        return [["root", *tbf] for tbf in _tbf(self.receive_bps)]


def _rate(rate: str) -> int | None:
    if rate == "none":
        return None
    rate_bps = _quantity("rate", rate, _RATE_UNITS, example="200mbit, or none for an unshaped link")
    if rate_bps <= 0:
        raise ValueError(f"rate {rate!r} must be above 0; write none for an unshaped link")
    return rate_bps


def _tbf(rate_bps: int | None, least_queue_bytes: int = 0) -> list[list[str]]:
    if rate_bps is None:
        return []
    # Bytes a port may send at once: 2 ms of the rate. A larger burst would let small messages pass unshaped.
    burst_bytes = max(32 * 1024, rate_bps * 2 // 1000 // 8)
    queue_bytes = burst_bytes + max(least_queue_bytes, int(rate_bps / 8 * _QUEUE_S))
    return [["tbf", "rate", f"{rate_bps}bit", "burst", f"{burst_bytes}b", "limit", f"{queue_bytes}b"]]


def _quantity(name: str, text: str, units: Mapping[str, float], example: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{name} {text!r} must be a number and one of {', '.join(units)}; for example {example}")
    return round(float(match[1]) * units[match[2]])


MAX_NODES = 254  # one /24
_SUBNET = "10.77.0.0/24"
# Linux's default TCP, whatever the host uses: BBR leaves a slow link idle for part of a long message.
_ROUTE = ("proto", "kernel", "scope", "link", "congctl", "cubic")
_NAMESPACES = Path("/run/netns")
_CONFIGURATIONS = Path("/etc/netns")  # `ip netns exec NAME` sees NAME/hosts here as /etc/hosts
_SERIAL = itertools.count()
_COMMAND_TIMEOUT_S = 30
_KILL_TIMEOUT_S = 10

# Word in a failed command -> the missing requirement.
_REQUIREMENTS = {
    "netem": "a kernel with netem (CONFIG_NET_SCH_NETEM; try `modprobe sch_netem`) or --delay 0ms",
    "tbf": "a kernel with token bucket filters (CONFIG_NET_SCH_TBF; try `modprobe sch_tbf`) or --rate none",
    "veth": "a kernel with veth pairs (CONFIG_VETH; try `modprobe veth`)",
    "bridge": "a kernel with bridges (CONFIG_BRIDGE; try `modprobe bridge`)",
    "cubic": "a kernel with TCP's usual congestion control (CONFIG_TCP_CONG_CUBIC; try `modprobe tcp_cubic`)",
}
_PRIVILEGES = (
    "the right to make network namespaces (CONFIG_NET_NS, CAP_SYS_ADMIN and CAP_NET_ADMIN; "
    "in a container: `docker run --privileged`)"
)


class ClusterUnavailableError(RuntimeError):
    """This machine cannot emulate a cluster. The message names the missing requirement and how to get it."""


class EmulatedNetwork:
    """Namespaces `commopt-<pid>-<serial>-node<i>`, joined by a bridge in `commopt-<pid>-<serial>-hub`.

    Addresses and the names of links are private to the namespaces and cannot collide with the host's.

    nodes: their number.
    link: of each node.
    site_of: site of each node: each has its own bridge there, joined to the others' by a link. One site has none.
    site_link: of each site to the others.
    """

    def __init__(
        self, nodes: int, link: EmulatedLink, site_of: Sequence[int] = (), site_link: EmulatedLink | None = None
    ) -> None:
        self.link = link
        self._site_of = site_of or (0,) * nodes
        self._site_link = site_link or EmulatedLink()
        self.name = f"commopt-{os.getpid()}-{next(_SERIAL)}"
        self.nodes = tuple(f"{self.name}-node{node_rank}" for node_rank in range(nodes))
        self._hub = f"{self.name}-hub"

    def build(self) -> None:
        """Create the cluster, or raise ClusterUnavailableError and leave nothing behind."""
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
        self._build_sites()
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
            self._plug(port, f"br{self._site_of[node_rank]}")
            _up(node, INTERFACE)
            _ip("-n", node, "route", "change", _SUBNET, "dev", INTERFACE, *_ROUTE, "src", address(node_rank))
            _up(node, "lo")
            _run(self.enter(node_rank, ["true"]))

    def _build_sites(self) -> None:
        sites = sorted(set(self._site_of))
        for bridge in [f"br{site}" for site in sites] + (["core"] if len(sites) > 1 else []):
            _ip("-n", self._hub, "link", "add", bridge, "type", "bridge", "mcast_snooping", "0")
            _up(self._hub, bridge)
        for site in sites if len(sites) > 1 else ():
            near, far = f"site{site}", f"core{site}"  # what leaves the site is sent by the first of them
            _ip("-n", self._hub, "link", "add", near, "type", "veth", "peer", "name", far)
            for port, shaping in ((near, self._site_link.near_end()), (far, self._site_link.far_end())):
                for arguments in shaping:
                    _tc("-n", self._hub, "qdisc", "add", "dev", port, *arguments)
            self._plug(near, f"br{site}")
            self._plug(far, "core")

    def _plug(self, port: str, bridge: str) -> None:
        _ip("-n", self._hub, "link", "set", port, "master", bridge)
        _up(self._hub, port)

    def _name_addresses(self, node: str) -> None:
        # torch looks up its peers' names, by IPv4 address mapped to IPv6, and warns if there is no answer.
        peers = ((address(node_rank), f"node{node_rank}") for node_rank in range(len(self.nodes)))
        names = (f"{form}{ip} {name}" for ip, name in peers for form in ("", "::ffff:"))
        hosts = _CONFIGURATIONS / node / "hosts"
        hosts.parent.mkdir(parents=True)
        hosts.write_text("\n".join([Path("/etc/hosts").read_text(), *names, ""]))

    def enter(self, node_rank: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a node."""
        return ["ip", "netns", "exec", self.nodes[node_rank], *command]

    def traffic(self, node_rank: int) -> LinkTraffic:
        return LinkTraffic.parse(*(_run(self.enter(node_rank, ["cat", file])) for file in PROC_FILES))

    def site_traffic(self) -> list[Counters]:
        """Return the counters of each site's link to the others: sent is what left the site."""
        counters = _interfaces(_run(["ip", "netns", "exec", self._hub, "cat", PROC_FILES[0]]))
        return [counters[f"site{site}"] for site in sorted(set(self._site_of)) if f"site{site}" in counters]

    def connect(self, node_rank: int, *, up: bool) -> None:
        """Connect a node to the hub, or disconnect it: packets are then lost silently."""
        _ip("-n", self._hub, "link", "set", f"node{node_rank}", "up" if up else "down")

    def reshape(self, node_rank: int, link: EmulatedLink) -> None:
        """Give a node another link; what waits for the old one is lost, and sent again."""
        ends = ((self.nodes[node_rank], INTERFACE, link.near_end()), (self._hub, f"node{node_rank}", link.far_end()))
        for namespace, device, shaping in ends:
            with suppress(ClusterUnavailableError):  # there is none to delete
                _tc("-n", namespace, "qdisc", "del", "dev", device, "root")
            for arguments in shaping:
                _tc("-n", namespace, "qdisc", "add", "dev", device, *arguments)

    def kill(self) -> None:
        """Kill every process on every node, however it was started, and wait until all are gone."""
        with uninterrupted():
            for node in self.nodes:
                _kill(node)

    def remove(self) -> None:
        """Kill all processes on the nodes and delete the namespaces, with their links and the bridge."""
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
    """Remove the namespaces of launchers that were killed: their names contain the id of a process that is gone.

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
    """Delay Ctrl-C, SIGTERM and SIGHUP until the end of the block, which must take a bounded time."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    delayed: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.signal(number, lambda number, frame: delayed.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        if delayed:
            signal.raise_signal(delayed[0])


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
    # Without a link-local address the interface sends no packets of its own, which would be counted as the job's. Two
    # commands, since a single one would bring it up first.
    _ip("-n", namespace, "link", "set", interface, "addrgenmode", "none")
    _ip("-n", namespace, "link", "set", interface, "up")


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _tc(*arguments: str) -> str:
    return _run(["tc", *arguments])


def _run(command: Sequence[str]) -> str:
    # In a session of its own: Ctrl-C at the terminal cannot interrupt a command halfway.
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
