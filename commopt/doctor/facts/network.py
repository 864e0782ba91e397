"""Network interfaces and RDMA ports, as the kernel lists them: what the Ethernet and InfiniBand checks share."""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network
from typing import Literal

from commopt.doctor.facts.machine import Machine, Version
from commopt.doctor.facts.pattern import Pattern

# Made by software on the host side: they lead to containers and virtual machines, not to other nodes.
INTERNAL = (
    *("lo", "docker", "virbr", "br-", "veth", "cni", "cali", "flannel", "lxc", "podman", "dummy", "ifb", "tunl"),
    *("vnet", "tap", "vmnet", "vboxnet", "lxdbr", "cilium", "kube-", "nodelocaldns", "nerdctl", "vxlan", "genev"),
    *("ovs-", "antrea", "weave", "eni", "azv", "gke"),
)
LINK_LOCAL = IPv6Network("fe80::/64")
AMAZON = 0x1D0F
VENDORS = {AMAZON: "AWS", 0x1AE0: "Google"}


@dataclass(frozen=True)
class Interface:
    """One network interface."""

    name: str
    state: str
    """The kernel's operstate; "unknown" is normal for some drivers and for lo."""
    gbps: float | None
    """None when the driver states no speed."""
    mtu: int | None
    duplex: str | None
    vendor: int | None
    model: int | None
    """The vendor's number of the card."""
    networks: tuple[IPv4Network, ...]
    """Networks that are reached through it directly."""
    default_route: bool
    six: bool
    """Whether it has an IPv6 address that others can reach."""

    @property
    def usable(self) -> bool:
        """Up, with an address."""
        return self.state in ("up", "unknown") and bool(self.networks or self.default_route or self.six)

    @property
    def internal(self) -> bool:
        """Whether it leads nowhere but to this machine."""
        return self.name.startswith(INTERNAL)


@dataclass(frozen=True)
class Port:
    """One port of an RDMA device."""

    device: str
    number: int
    state: str | None
    """ "4: ACTIVE"."""
    phys_state: str | None
    """ "5: LinkUp"."""
    gbps: float | None
    link_layer: Literal["InfiniBand", "Ethernet"] | None
    vendor: int | None = None
    lanes: int | None = None
    """Of the link as it was trained; None when `rate` does not say."""

    @property
    def elastic(self) -> bool:
        """Whether it is Amazon's EFA: only a plugin reaches it, and its own driver does GPUDirect RDMA."""
        return self.vendor == AMAZON

    @property
    def name(self) -> str:
        """As NCCL_IB_HCA writes it."""
        return f"{self.device}:{self.number}"

    @property
    def path(self) -> str:
        """Its directory."""
        return f"sys/class/infiniband/{self.device}/ports/{self.number}"

    @property
    def active(self) -> bool:
        """Whether it can carry data."""
        return (self.state or "").startswith("4")


def interfaces(machine: Machine) -> list[Interface]:
    """Return every interface, by name."""
    routes = _routes(machine.text("proc/net/route") or "")
    six = {
        fields[5]
        for fields in map(str.split, (machine.text("proc/net/if_inet6") or "").splitlines())
        if len(fields) == 6 and fields[3] == "00"
    }
    found = []
    for name in machine.listing("sys/class/net"):
        folder = f"sys/class/net/{name}"
        if not machine.exists(f"{folder}/operstate"):
            continue  # bonding_masters is a file
        speed = machine.number(f"{folder}/speed")
        mine = [network for interface, network in routes if interface == name]
        found.append(
            Interface(
                name,
                machine.text(f"{folder}/operstate") or "unknown",
                speed / 1000 if speed is not None and speed > 0 else None,
                machine.number(f"{folder}/mtu"),
                machine.text(f"{folder}/duplex"),
                machine.number(f"{folder}/device/vendor"),
                machine.number(f"{folder}/device/device"),
                tuple(network for network in mine if network.prefixlen),
                any(not network.prefixlen for network in mine),
                name in six,
            )
        )
    return found


def candidates(machine: Machine) -> list[Interface]:
    """Return the interfaces that could lead to other nodes."""
    return [interface for interface in interfaces(machine) if interface.usable and not interface.internal]


def used_by_nccl(machine: Machine) -> list[Interface]:
    """Return the interfaces that NCCL's sockets would use: what NCCL_SOCKET_IFNAME selects, else all candidates."""
    chosen = machine.variable("NCCL_SOCKET_IFNAME")
    if chosen is None:
        return candidates(machine)
    pattern = Pattern.parse(chosen)
    return [interface for interface in interfaces(machine) if interface.usable and pattern.selects(interface.name)]


def ports(machine: Machine) -> list[Port]:
    """Return every port of every RDMA device, by name."""
    found = []
    for device in machine.listing("sys/class/infiniband"):
        for number in machine.listing(f"sys/class/infiniband/{device}/ports"):
            folder = f"sys/class/infiniband/{device}/ports/{number}"
            rate = re.match(r"[\d.]+", machine.text(f"{folder}/rate") or "")
            lanes = re.search(r"\((\d+)X", machine.text(f"{folder}/rate") or "")
            layer = machine.text(f"{folder}/link_layer")
            found.append(
                Port(
                    device,
                    int(number) if number.isdecimal() else 0,
                    machine.text(f"{folder}/state"),
                    machine.text(f"{folder}/phys_state"),
                    float(rate[0]) if rate else None,
                    "InfiniBand" if layer == "InfiniBand" else "Ethernet" if layer == "Ethernet" else None,
                    machine.number(f"sys/class/infiniband/{device}/device/vendor"),
                    int(lanes[1]) if lanes else None,
                )
            )
    return found


def active_ports(machine: Machine) -> list[Port]:
    """Return the ports that can carry data: with one of them NCCL uses RDMA unless it is told not to."""
    return [port for port in ports(machine) if port.active]


@dataclass(frozen=True)
class Gid:
    """One entry of a RoCE port's table of addresses."""

    index: str
    kind: str
    """"RoCE v2", "IB/RoCE v1"."""
    address: IPv6Address | None
    """None when it cannot be read."""

    @property
    def link_local(self) -> bool:
        """Whether it leads no further than the next router: NCCL passes over it."""
        return self.address is not None and self.address in LINK_LOCAL


def gids(machine: Machine, port: Port) -> list[Gid]:
    """Return the entries that are in use, in the order of the files."""
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


def tcp_interfaces(machine: Machine) -> list[Interface]:
    """Return the interfaces that carry NCCL's data when that goes over TCP; empty when RDMA carries it."""
    rdma = active_ports(machine) and machine.variable("NCCL_IB_DISABLE") in (None, "0")
    return [] if rdma and (machine.variable("NCCL_NET") or "").upper() != "SOCKET" else used_by_nccl(machine)


def before(version: Version | None, gate: Version) -> bool | None:
    """Whether a version is older than `gate`; None when it is unknown."""
    return None if version is None else version < gate


def _routes(text: str) -> list[tuple[str, IPv4Network]]:
    """Read /proc/net/route: addresses are little-endian hexadecimal."""
    routes = []
    for fields in map(str.split, text.splitlines()[1:]):
        try:
            address, mask = (socket.inet_ntoa(struct.pack("=I", int(fields[place], 16))) for place in (1, 7))
            routes.append((fields[0], IPv4Network(f"{address}/{mask}", strict=False)))
        except (IndexError, ValueError, struct.error):
            continue
    return routes
