# SPDX-License-Identifier: Apache-2.0
"""Namespaces, links and bridge of an emulated cluster, and counters of a node's traffic."""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

from commopt.cluster.commands import ClusterUnavailableError, check_tools, ip, run, tc
from commopt.cluster.link import DELAYED_PACKETS, EmulatedLink
from commopt.cluster.relay import RelayCounters
from commopt.cluster.relay_process import Relay, program

INTERFACE = "eth0"
RATE_VARIABLE = "BENCH_CLUSTER_RATE"
OPTIONS_VARIABLE = "BENCH_CLUSTER_OPTIONS"
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

    @property
    def retransmitted_share(self) -> float:
        """Share of the packets sent over the link that had been sent before."""
        packets = max(self.link.tx_packets, self.link.tx_payload_bytes // _SEGMENT_PAYLOAD_BYTES, 1)
        return min(1.0, self.retransmissions / packets)  # the interface counts what it is given at once as one

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


def cluster_options() -> list[str]:
    """Return the options of `commopt cluster` around this process, beside those of nodes, ranks and rate."""
    return shlex.split(os.environ.get(OPTIONS_VARIABLE, ""))


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


MAX_NODES = 254  # one /24
_SUBNET = "10.77.0.0/24"
# Linux's default TCP, whatever the host uses: BBR leaves a slow link idle for part of a long message.
_ROUTE = ("proto", "kernel", "scope", "link", "congctl", "cubic")
_NAMESPACES = Path("/run/netns")
_CONFIGURATIONS = Path("/etc/netns")  # `ip netns exec NAME` sees NAME/hosts here as /etc/hosts
_SERIAL = itertools.count()
_KILL_TIMEOUT_S = 10
RELAY_BPS = 1e9
"""More than this takes all of a processor for one relay."""


class EmulatedNetwork:
    """Namespaces `commopt-<pid>-<serial>-node<i>`, joined by a bridge in `commopt-<pid>-<serial>-hub`.

    Addresses and the names of links are private to the namespaces and cannot collide with the host's.

    links: of each node, at the start.
    site_of: site of each node: each has its own bridge there, joined to the others' by a link. One site has none.
    site_link: of each site to the others.
    """

    def __init__(
        self, links: Sequence[EmulatedLink], site_of: Sequence[int] = (), site_link: EmulatedLink | None = None
    ) -> None:
        self.links = tuple(links)
        self._site_of = site_of or (0,) * len(links)
        self._site_link = site_link or EmulatedLink()
        self.name = f"commopt-{os.getpid()}-{next(_SERIAL)}"
        self.nodes = tuple(f"{self.name}-node{node_rank}" for node_rank in range(len(links)))
        self._relays: dict[int, Relay] = {}
        self._sends_whole = False
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
        ip("netns", "add", self._hub)
        self._build_sites()
        for node_rank, node in enumerate(self.nodes):
            port = f"node{node_rank}"
            ip("netns", "add", node)
            self._name_addresses(node)
            ip("-n", node, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", self._hub)
            ip("-n", node, "address", "add", f"{address(node_rank)}/24", "dev", INTERFACE)
            self._plug(port, f"br{self._site_of[node_rank]}")
            _up(node, INTERFACE)
            ip("-n", node, "route", "change", _SUBNET, "dev", INTERFACE, *_ROUTE, "src", address(node_rank))
            _up(node, "lo")
            run(self.enter(node_rank, ["true"]))
        for node_rank, link in enumerate(self.links):
            self._shape(node_rank, link)

    def _build_sites(self) -> None:
        sites = sorted(set(self._site_of))
        for bridge in [f"br{site}" for site in sites] + (["core"] if len(sites) > 1 else []):
            ip("-n", self._hub, "link", "add", bridge, "type", "bridge", "mcast_snooping", "0")
            _up(self._hub, bridge)
        for site in sites if len(sites) > 1 else ():
            near, far = f"site{site}", f"core{site}"  # what leaves the site is sent by the first of them
            ip("-n", self._hub, "link", "add", near, "type", "veth", "peer", "name", far)
            for port, shaping in ((near, self._site_link.near_end()), (far, self._site_link.far_end())):
                for arguments in shaping:
                    tc("-n", self._hub, "qdisc", "add", "dev", port, *arguments)
            self._plug(near, f"br{site}")
            self._plug(far, "core")

    def _plug(self, port: str, bridge: str) -> None:
        ip("-n", self._hub, "link", "set", port, "master", bridge)
        _up(self._hub, port)

    def _name_addresses(self, node: str) -> None:
        # torch looks up its peers' names, by IPv4 address mapped to IPv6, and warns if there is no answer.
        peers = ((address(node_rank), f"node{node_rank}") for node_rank in range(len(self.nodes)))
        names = (f"{form}{where} {name}" for where, name in peers for form in ("", "::ffff:"))
        hosts = _CONFIGURATIONS / node / "hosts"
        hosts.parent.mkdir(parents=True)
        hosts.write_text("\n".join([Path("/etc/hosts").read_text(), *names, ""]))

    def enter(self, node_rank: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a node."""
        return ["ip", "netns", "exec", self.nodes[node_rank], *command]

    def traffic(self, node_rank: int) -> LinkTraffic:
        return LinkTraffic.parse(*(run(self.enter(node_rank, ["cat", file])) for file in PROC_FILES))

    def site_traffic(self) -> list[Counters]:
        """Return the counters of each site's link to the others: sent is what left the site."""
        counters = _interfaces(run(["ip", "netns", "exec", self._hub, "cat", PROC_FILES[0]]))
        return [counters[f"site{site}"] for site in sorted(set(self._site_of)) if f"site{site}" in counters]

    def connect(self, node_rank: int, *, up: bool) -> None:
        """Connect a node to the hub, or disconnect it: packets are then lost silently."""
        ip("-n", self._hub, "link", "set", f"node{node_rank}", "up" if up else "down")

    def reshape(self, node_rank: int, link: EmulatedLink) -> None:
        """Give a node another link; what waits for the old one is lost, and sent again."""
        for namespace, device in ((self.nodes[node_rank], INTERFACE), (self._hub, f"node{node_rank}")):
            with suppress(ClusterUnavailableError):  # there is none to delete
                tc("-n", namespace, "qdisc", "del", "dev", device, "root")
        self._shape(node_rank, link)

    def _shape(self, node_rank: int, link: EmulatedLink) -> None:
        node, port = self.nodes[node_rank], f"node{node_rank}"
        netem = link.is_impaired and self.has_netem
        if link.is_impaired and not self._sends_whole:
            self._sends_whole = True
            for sender in range(len(self.nodes)):
                run(self.enter(sender, program("whole", INTERFACE)))
        for arguments in link.near_end(netem):
            tc("-n", node, "qdisc", "add", "dev", INTERFACE, *arguments)
        for arguments in link.far_end():
            tc("-n", self._hub, "qdisc", "add", "dev", port, *arguments)
        if link.is_impaired and not netem and node_rank not in self._relays:
            self._insert_relay(node_rank)
        if node_rank in self._relays:
            self._relays[node_rank].set(link.delay_us, link.loss)

    @property
    def is_faster_than_relays(self) -> bool:
        """Whether a node with a relay may send more than that carries."""
        return any((self.links[node_rank].send_bps or math.inf) > RELAY_BPS for node_rank in self._relays)

    @cached_property
    def has_netem(self) -> bool:
        """Whether the kernel delays and loses packets. If not, relays do."""
        try:
            tc("-n", self._hub, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us", "loss", "1%")
        except ClusterUnavailableError:
            return False
        tc("-n", self._hub, "qdisc", "del", "dev", "lo", "root")
        return True

    def _insert_relay(self, node_rank: int) -> None:
        """Pull a node's port out of its bridge, and plug a relay in between."""
        port, inner, outer = f"node{node_rank}", f"relay{node_rank}", f"plug{node_rank}"
        ip("-n", self._hub, "link", "set", port, "nomaster")
        ip("-n", self._hub, "link", "add", inner, "type", "veth", "peer", "name", outer)
        _up(self._hub, inner)
        seed = str(node_rank)  # losses are the same ones in every run
        enter = ["ip", "netns", "exec", self._hub]
        self._relays[node_rank] = Relay(f"the relay of node {node_rank}", enter, seed, DELAYED_PACKETS, (port, inner))
        self._plug(outer, f"br{self._site_of[node_rank]}")

    def relays(self) -> dict[int, RelayCounters]:
        """Return the counters of the relays, by node. Raises RelayError, as `check_relays` does."""
        return {node_rank: relay.counters() for node_rank, relay in self._relays.items()}

    def check_relays(self) -> None:
        """Raise RelayError if one has ended."""
        for relay in self._relays.values():
            relay.check()

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
            for relay in self._relays.values():
                relay.close()
            self._relays.clear()


def address(node_rank: int) -> str:
    return f"10.77.0.{node_rank + 1}"


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
        ip("netns", "delete", namespace)


def _kill(namespace: str) -> None:
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    # Again and again, because a process may fork between being listed and being killed.
    while pids := ip("netns", "pids", namespace).split():
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {', '.join(pids)} in {namespace} outlive SIGKILL; look for stuck I/O")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _up(namespace: str, interface: str) -> None:
    # Without a link-local address the interface sends no packets of its own, which would be counted as the job's. Two
    # commands, since a single one would bring it up first.
    ip("-n", namespace, "link", "set", interface, "addrgenmode", "none")
    ip("-n", namespace, "link", "set", interface, "up")
