# SPDX-License-Identifier: Apache-2.0
"""Ethernet: the interface that carries the data, its speed, frame size, TCP buffers, number of sockets."""

from __future__ import annotations

from collections.abc import Iterator

from commopt.doctor.finding import Finding, Unread, check, error, info, ok, warning
from commopt.doctor.machine import Machine
from commopt.doctor.network import AMAZON, GOOGLE, DeviceList, NetworkInterface, candidates, interfaces, tcp_interfaces

FAST_GBPS = 25
BUFFER_BYTES = 16 << 20
BUFFERS = {
    "net.core.rmem_max": "67108864",
    "net.core.wmem_max": "67108864",
    "net.ipv4.tcp_rmem": "4096 131072 67108864",
    "net.ipv4.tcp_wmem": "4096 65536 67108864",
}


@check("/sys/class/net, /proc/net/route", "ip address; ip route")
def interface(machine: Machine) -> Iterator[Finding]:
    """Network interface: one with an address that other nodes can reach, or one that is named."""
    possible, fine = candidates(machine), True
    names = ", ".join(one.name for one in possible)
    if not machine.listing("sys/class/net"):
        raise Unread(machine.unread_reason("sys/class/net"), "ip address", "/sys/class/net")
    # For data over TCP the fastest. If RDMA carries the data, the one all nodes share, not one of the rails.
    tcp = bool(tcp_interfaces(machine))
    ranked = sorted(possible, key=lambda one: (tcp * (one.gbps or 0), one.default_route, one.gbps or 0), reverse=True)
    for variable, prefix in (("NCCL_SOCKET_IFNAME", "="), ("GLOO_SOCKET_IFNAME", "")):
        value = machine.variable(variable)
        fix = f"export {variable}={prefix}{ranked[0].name}" if ranked else f"unset {variable}"
        if value is not None:
            yield from _chosen(machine, variable, value, fix)
        elif len(possible) > 1 and (machine.hardware.gpus or variable.startswith("GLOO")):
            kind = warning if machine.hardware.gpus or machine.several_nodes else info
            expected = "set: the nodes may choose different networks, or a slow one"
            yield kind(f"unset, with {names} to choose from", expected, fix, "medium", variable)
        fine &= value is None and len(possible) == 1
    if not possible:
        yield info("no such interface", confidence="medium")
    elif fine:
        yield ok(names)


def _chosen(machine: Machine, variable: str, value: str, fix: str) -> Iterator[Finding]:
    existing, possible = interfaces(machine), candidates(machine)
    everything = [one.name for one in existing]
    # gloo has neither prefixes nor signs.
    listed = DeviceList.parse(value if variable.startswith("NCCL") else f"={value}")
    chosen = [one for one in existing if listed.selects(one.name)]
    usable = [one for one in chosen if one.usable]
    others = ", ".join(one.name for one in possible) or "none"
    if not chosen or (not listed.exclude and listed.unmatched(everything)):
        expected = f"an interface of this machine ({', '.join(everything)}): initialisation fails otherwise"
        yield error(value, expected, fix, read=variable)
    elif not usable:
        yield error(value, f"an interface that is up and has an address ({others})", fix, read=variable)
    elif all(one.internal for one in usable) and (possible or machine.several_nodes):
        kind = error if machine.several_nodes else warning
        yield kind(value, f"an interface that leads to other nodes ({others})", fix, read=variable)
    elif matched_by_prefix := listed.matched_by_prefix(everything):
        expected = f"whole names: NCCL takes {value} for the beginning of {', '.join(matched_by_prefix)} too"
        selected = f"{value} selects {', '.join(one.name for one in chosen)}"
        yield warning(selected, expected, f"export {variable}=={value}", "medium", variable)


@check("/sys/class/net/*/speed", needs=((tcp_interfaces, "no interface that carries data over TCP"),))
def nic_speed(machine: Machine) -> Iterator[Finding]:
    """Speed of the network interface: stated, and that of its siblings of the same make."""
    everything = [one for one in interfaces(machine) if one.vendor is not None and one.state != "down"]
    for one in tcp_interfaces(machine):
        read = f"/sys/class/net/{one.name}/speed"
        alike = [other for other in everything if (other.vendor, other.model) == (one.vendor, one.model)]
        best = max((other.gbps or 0 for other in alike), default=0)
        yield from _members(machine, one)
        if one.gbps is None:  # normal for virtio, and harmless if there is only one path
            remedy = (
                "NCCL_TOPO_DUMP_FILE=topo.xml in one run; correct speed= there; export NCCL_TOPO_FILE=$PWD/topo.xml"
            )
            yield info("not stated", "a speed: NCCL assumes 10 Gb/s without one", remedy, "low", read)
        elif one.gbps < best:
            remedy = f"ethtool {one.name}; check cable, module and switch port"
            yield warning(
                f"{one.gbps:g} Gb/s", f"{best:g} Gb/s, as its siblings of the same make", remedy, "medium", read
            )


def _members(machine: Machine, bond: NetworkInterface) -> Iterator[Finding]:
    members = (machine.text(f"sys/class/net/{bond.name}/bonding/slaves") or "").split()
    speeds = {name: machine.number(f"sys/class/net/{name}/speed") or 0 for name in members}
    best = max(speeds.values(), default=0)
    for name, mbps in speeds.items():
        down = machine.text(f"sys/class/net/{name}/operstate") == "down"
        if down or mbps < best:
            expected = f"up with {best / 1000:g} Gb/s like the others in {bond.name}"
            remedy = f"ethtool {name}; cat /proc/net/bonding/{bond.name}"
            shown = "down" if down else f"{mbps / 1000:g} Gb/s"
            yield warning(shown, expected, remedy, read=f"/sys/class/net/{name}/speed")


@check("/sys/class/net/*/mtu", needs=((tcp_interfaces, "no interface that carries data over TCP"),))
def mtu(machine: Machine) -> Iterator[Finding]:
    """Frame size (MTU): 9000 on every node and switch, where TCP runs over 25 Gb/s or more."""
    for one in tcp_interfaces(machine):
        if (one.gbps or 0) < FAST_GBPS or (one.mtu or 9000) > 1500:
            continue
        read = f"/sys/class/net/{one.name}/mtu"
        if machine.virtual:  # frames larger than the provider's network carries are lost
            remedy = (
                "change the network first (Google: gcloud compute networks update NETWORK --mtu=8896), then the nodes"
            )
            yield info(str(one.mtu), "up to 9000, where the provider's network carries that", remedy, "low", read)
            continue
        private = bool(one.networks) and all(network.is_private for network in one.networks)
        remedy = f"sudo ip link set {one.name} mtu 9000; then: ping -M do -s 8972 OTHER_NODE"
        kind = warning if private else info
        yield kind(str(one.mtu), remedy=remedy, confidence="medium" if private else "low", read=read)


def _fast(machine: Machine) -> bool:
    return any((one.gbps or 0) >= FAST_GBPS for one in tcp_interfaces(machine))


@check("/proc/sys/net", needs=((_fast, f"no TCP over {FAST_GBPS} Gb/s or more"),))
def tcp_buffers(machine: Machine) -> Iterator[Finding]:
    """TCP buffers: 16 MiB and more where TCP runs over a fast link, since one socket has to fill it."""
    if not _fast(machine):
        return
    texts = {name: machine.need(f"proc/sys/{name.replace('.', '/')}") for name in BUFFERS}
    most = {name: text.split()[-1] for name, text in texts.items()}
    small = [name for name in BUFFERS if not most[name].isdecimal() or int(most[name]) < BUFFER_BYTES]
    if small:
        shown = "; ".join(f"{name}={texts[name]}".replace("\t", " ") for name in small)
        expected = f"a maximum of {BUFFER_BYTES} bytes or more on {FAST_GBPS} Gb/s"
        remedy = "sudo sysctl -w " + " ".join(f"{name}='{BUFFERS[name]}'" for name in small)
        yield warning(shown, expected, remedy, "medium")


@check(
    "NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD",
    "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4",
    needs=((_fast, f"no TCP over {FAST_GBPS} Gb/s or more"),),
)
def sockets(machine: Machine) -> Iterator[Finding]:
    """Sockets per connection: several on a fast TCP link; NCCL opens one, unless it knows the cloud."""
    values = [machine.variable(name) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    threads, each = (int(value) if value and value.isdecimal() else 1 for value in values)
    shown = ", ".join(value or "unset" for value in values)
    used = [one for one in tcp_interfaces(machine) if one.vendor not in (AMAZON, GOOGLE)]
    fast = ", ".join(f"{one.name} {one.gbps:g} Gb/s" for one in used if (one.gbps or 0) >= FAST_GBPS)
    if threads * each > 64 or threads > 16:
        yield warning(shown, "at most 16 threads, and a product of at most 64")
    elif fast and values == [None, None]:
        yield warning(shown, f"several sockets on a link this fast ({fast}): NCCL opens one", confidence="medium")
