# SPDX-License-Identifier: Apache-2.0
"""Network interfaces and RDMA ports from the kernel, NCCL's device lists, and the ports nearest to each GPU."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple

from commopt.doctor.machine import Machine
from topology.machine import VIRTUAL_TOPOLOGY
from topology.model import Distance
from topology.queries import Paths, usable_nics

# Software interfaces, which lead to containers and virtual machines, not to other nodes.
INTERNAL = (
    "lo",
    "docker",
    "virbr",
    "br-",
    "veth",
    "cni",
    "cali",
    "flannel",
    "lxc",
    "podman",
    "dummy",
    "ifb",
    "tunl",
    "vnet",
    "tap",
    "vmnet",
    "vboxnet",
    "lxdbr",
    "cilium",
    "kube-",
    "nodelocaldns",
    "nerdctl",
    "vxlan",
    "genev",
    "ovs-",
    "antrea",
    "weave",
    "eni",
    "azv",
    "gke",
)
# Interfaces to other machines through a program that wraps and often encrypts each packet.
TUNNELS = ("tun", "ip6tnl", "tailscale", "wg", "zt", "utun", "ppp", "gre", "sit", "ipsec", "nebula", "nordlynx")
INFINIBAND = re.compile(r"ib(?:\d|[sp]\d|_|mgt)|mlx\d?ib|hsi\d|opap?\d")
"""Names of IPoIB interfaces: ib0, ibs1, ibp12s0."""
LINK_LOCAL = IPv6Network("fe80::/64")
LIBVIRT, DOCKER = IPv4Network("192.168.122.0/24"), IPv4Network("172.17.0.0/16")
AMAZON, GOOGLE = 0x1D0F, 0x1AE0


@dataclass(frozen=True)
class NetworkInterface:
    """One network interface."""

    name: str
    state: str
    """The kernel's operstate; "unknown" is normal for some drivers and for lo."""
    gbps: float | None
    """None if the driver states no speed."""
    mtu: int | None
    vendor: int | None
    model: int | None
    """The vendor's model number of the card."""
    networks: tuple[IPv4Network, ...]
    """Networks reached directly."""
    default_route: bool
    six: bool
    """Whether it has an IPv6 address that others can reach."""

    @property
    def usable(self) -> bool:
        """Whether it is up and has an address."""
        return self.state in ("up", "unknown") and bool(self.networks or self.default_route or self.six)

    @property
    def internal(self) -> bool:
        """Whether it does not lead to other nodes, or only slowly."""
        return unsuitable_reason(self.name) is not None


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device."""

    device: str
    number: int
    state: str
    """ "4: ACTIVE", or the reason why it is unknown."""
    gbps: float | None
    lanes: int | None
    """Number of lanes of the trained link."""
    link_layer: str | None
    """ "InfiniBand" or "Ethernet"; None for others."""
    vendor: int | None

    @property
    def elastic(self) -> bool:
        """Whether it is Amazon's EFA, which only a plugin can use, and whose own driver provides GPUDirect RDMA."""
        return self.vendor == AMAZON

    @property
    def name(self) -> str:
        """The name in the form of NCCL_IB_HCA."""
        return f"{self.device}:{self.number}"

    @property
    def path(self) -> str:
        """The path of its directory."""
        return f"sys/class/infiniband/{self.device}/ports/{self.number}"

    @property
    def active(self) -> bool:
        """Whether it can carry data."""
        return self.state.startswith("4")


class Gid(NamedTuple):
    """An entry of a RoCE port's address table.

    number: index of the entry.
    kind: "RoCE v2" or "IB/RoCE v1".
    address: None if it cannot be read.
    """

    number: str
    kind: str
    address: IPv6Address | None


@dataclass(frozen=True)
class DeviceList:
    """A device list of NCCL_SOCKET_IFNAME or NCCL_IB_HCA: "mlx5_0:1,mlx5_2", "=eth0", "^docker,lo"."""

    exclude: bool
    """With "^": all devices but these."""
    exact: bool
    """With "=": whole names; otherwise prefixes."""
    items: tuple[tuple[str, int | None], ...]
    """Names and ports; None: every port."""

    @classmethod
    def parse(cls, text: str) -> DeviceList:
        """Parse a variable's value. Empty items are skipped, as in NCCL."""
        exclude, text = text.startswith("^"), text.removeprefix("^")
        parts = (item.strip().partition(":") for item in text.removeprefix("=").split(","))
        items = tuple((name, int(port) if port.isdecimal() else None) for name, _, port in parts if name)
        return cls(exclude, text.startswith("="), items)

    def selects(self, name: str, port: int | None = None) -> bool:
        """Return whether NCCL would use this device (and port)."""
        listed = any(self._matches(item, name, port) for item in self.items)
        return listed != self.exclude if self.items else True

    def unmatched(self, names: list[str]) -> list[str]:
        """Return the items that match none of `names`."""
        return [item[0] for item in self.items if not any(self._matches(item, name, item[1]) for name in names)]

    def matched_by_prefix(self, names: list[str]) -> list[str]:
        """Return the names selected only because a listed whole name is a prefix of them."""
        wanted = [item for item, _ in self.items]
        whole = tuple(item for item in wanted if item in names and not self.exact and not self.exclude)
        return [name for name in names if name not in wanted and name.startswith(whole)]

    def _matches(self, item: tuple[str, int | None], name: str, port: int | None) -> bool:
        same = name == item[0] if self.exact else name.startswith(item[0])
        return same and (item[1] is None or port is None or item[1] == port)


def unsuitable_reason(name: str, address: str | None = None) -> str | None:
    """Return the reason why an interface is unsuitable between nodes, from its name and address; None if suitable.

    name: "" for an address without a name.
    """
    try:
        ip = ip_address((address or "").partition("%")[0])
    except ValueError:
        ip = None
    if name == "lo" or name.startswith("lo:") or (ip is not None and ip.is_loopback):
        return "loopback, which leads to no other node"
    if ip is not None and ip in LIBVIRT:
        return "the network of virtual machines (libvirt), the same on every host"
    if ip is not None and ip in DOCKER and (not name or name.startswith("docker")):
        return "the network of Docker, the same on every host"
    if name.startswith(TUNNELS):
        return "a tunnel, whose packets a program wraps"
    if name.startswith(INTERNAL):
        return "made by software for containers or virtual machines"
    if isinstance(ip, IPv6Address) and ip.is_link_local:
        return "link-local (fe80), as members of a bond and unused ports have it"
    return None


def interfaces(machine: Machine) -> list[NetworkInterface]:
    """Return all interfaces, sorted by name."""
    routes = _routes(machine.text("proc/net/route") or "")
    addresses = [line.split() for line in (machine.text("proc/net/if_inet6") or "").splitlines()]
    six = {fields[5] for fields in addresses if len(fields) == 6 and fields[3] == "00"}
    found = []
    for name in machine.listing("sys/class/net"):
        folder = f"sys/class/net/{name}"
        if not machine.exists(f"{folder}/operstate"):
            continue  # bonding_masters is a file
        mbps = machine.number(f"{folder}/speed") or 0
        mine = [network for interface, network in routes if interface == name]
        found.append(
            NetworkInterface(
                name,
                machine.text(f"{folder}/operstate") or "unknown",
                mbps / 1000 if mbps > 0 else None,
                machine.number(f"{folder}/mtu"),
                machine.number(f"{folder}/device/vendor"),
                machine.number(f"{folder}/device/device"),
                tuple(network for network in mine if network.prefixlen),
                any(not network.prefixlen for network in mine),
                name in six,
            )
        )
    return found


def _routes(text: str) -> list[tuple[str, IPv4Network]]:
    """Parse /proc/net/route, whose addresses are hexadecimal in the machine's byte order."""
    routes = []
    for fields in map(str.split, text.splitlines()[1:]):
        with suppress(IndexError, ValueError, OverflowError):
            address, mask = (IPv4Address(int(fields[place], 16).to_bytes(4, sys.byteorder)) for place in (1, 7))
            routes.append((fields[0], IPv4Network(f"{address}/{mask}", strict=False)))
    return routes


def candidates(machine: Machine) -> list[NetworkInterface]:
    """Return the interfaces that may lead to other nodes."""
    return [interface for interface in interfaces(machine) if interface.usable and not interface.internal]


def used_by_nccl(machine: Machine) -> list[NetworkInterface]:
    """Return the interfaces for NCCL's sockets: those of NCCL_SOCKET_IFNAME, else all candidates."""
    chosen = machine.variable("NCCL_SOCKET_IFNAME")
    listed = None if chosen is None else DeviceList.parse(chosen)
    usable = (one for one in interfaces(machine) if one.usable)
    return [one for one in usable if (listed.selects(one.name) if listed else not one.internal)]


def tcp_interfaces(machine: Machine) -> list[NetworkInterface]:
    """Return the interfaces that carry NCCL's data to other nodes over TCP; empty if RDMA carries it."""
    rdma = active_ports(machine) and machine.variable("NCCL_IB_DISABLE") in (None, "0")
    if rdma and (machine.variable("NCCL_NET") or "").upper() != "SOCKET":
        return []
    return [interface for interface in used_by_nccl(machine) if not interface.internal]


def ports(machine: Machine) -> list[Port]:
    """Return all ports of all RDMA devices, sorted by name."""
    found = []
    for device in machine.listing("sys/class/infiniband"):
        for number in machine.listing(f"sys/class/infiniband/{device}/ports"):
            folder = f"sys/class/infiniband/{device}/ports/{number}"
            rate = re.match(r"([\d.]+)[^(]*(?:\((\d+)X)?", machine.text(f"{folder}/rate") or "")
            layer = machine.text(f"{folder}/link_layer")
            found.append(
                Port(
                    device,
                    int(number) if number.isdecimal() else 0,
                    machine.text(f"{folder}/state") or "state unreadable",
                    float(rate[1]) if rate else None,
                    int(rate[2]) if rate and rate[2] else None,
                    layer if layer in ("InfiniBand", "Ethernet") else None,
                    machine.number(f"sys/class/infiniband/{device}/device/vendor"),
                )
            )
    return found


def active_ports(machine: Machine, layer: str | None = None) -> list[Port]:
    """Return the active ports (of one link layer). With any, NCCL uses RDMA by default."""
    return [port for port in ports(machine) if port.active and layer in (None, port.link_layer)]


def gids(machine: Machine, port: Port) -> list[Gid]:
    """Return the used addresses of a RoCE port in the order of the files."""
    found = []
    for index in machine.listing(f"{port.path}/gid_attrs/types"):
        kind = machine.text(f"{port.path}/gid_attrs/types/{index}")
        try:
            address = IPv6Address(machine.text(f"{port.path}/gids/{index}") or "")
        except ValueError:
            address = None
        if kind and (address is None or int(address)):
            found.append(Gid(index, kind, address))
    return found


def nearest_ports(machine: Machine) -> list[tuple[str, Distance | None, str]]:
    """Return label ("GPU0"), distance of the nearest active ports (None: unknown) and their names for each GPU.

    If no active port is in the topology, all other ports count.
    """
    topology, paths = machine.topology, Paths(machine.topology)
    active = {port.device for port in active_ports(machine)}
    places = usable_nics(topology)
    places = tuple(place for place in places if topology.nics[place].name in active) or places
    found = []
    for gpu_place, gpu in enumerate(topology.gpus):
        near = paths.nearest(gpu_place, places)
        names = ",".join(topology.nics[place].name for place in near[0]) if near else ""
        found.append((f"GPU{gpu.index}", near[1] if near else None, names))
    return found


def switches_hidden(machine: Machine) -> bool:
    """Return whether a virtual machine with GPUs and RDMA hides its switches, and no topology file replaces them.

    EFA is excluded, as its plugin brings the file.
    """
    rdma = any(not port.elastic for port in active_ports(machine))
    # Grace machines have no switches.
    if len(machine.hardware.gpus) < 2 or not rdma or not machine.virtual or machine.coherent:
        return False
    if machine.variable("NCCL_TOPO_FILE") or machine.exists(VIRTUAL_TOPOLOGY):
        return False
    return all(one is None or one.rank > Distance.PXB.rank for _, one, _ in nearest_ports(machine))
