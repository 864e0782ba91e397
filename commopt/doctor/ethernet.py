"""Ethernet: which interface carries the data, how fast it is, frame size, TCP buffers, number of sockets."""

from __future__ import annotations

from collections.abc import Iterator

from commopt.doctor.finding import Finding, check, error, info, ok, unread, warning
from commopt.doctor.machine import Machine
from commopt.doctor.network import AMAZON, GOOGLE, DeviceList, Interface, candidates, interfaces, tcp_interfaces

FAST_GBPS = 25
BUFFER_BYTES = 16 << 20
BUFFERS = {
    "net.core.rmem_max": "67108864",
    "net.core.wmem_max": "67108864",
    "net.ipv4.tcp_rmem": "4096 131072 67108864",
    "net.ipv4.tcp_wmem": "4096 65536 67108864",
}


@check("interface", "Network interface", "/sys/class/net, /proc/net/route", "one interface, or one that is named")
def choice(machine: Machine) -> Iterator[Finding]:
    """NCCL and gloo each choose an interface; with several, different nodes can choose differently."""
    possible, fine = candidates(machine), True
    names = ", ".join(interface.name for interface in possible)
    if not machine.listing("sys/class/net"):
        yield unread(machine.why_not("sys/class/net"), "ip address", "/sys/class/net")
        return
    # For data over TCP the fastest; where RDMA carries it, the one all nodes share, not one of its rails.
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
        yield info(
            "no such interface", "one with an address that other nodes can reach", "ip address; ip route", "medium"
        )
    elif fine:
        yield ok(names)


def _chosen(machine: Machine, variable: str, value: str, fix: str) -> Iterator[Finding]:
    existing, possible = interfaces(machine), candidates(machine)
    everything = [interface.name for interface in existing]
    # gloo knows neither prefixes nor signs.
    listed = DeviceList.parse(value if variable.startswith("NCCL") else f"={value}")
    chosen = [interface for interface in existing if listed.selects(interface.name)]
    usable = [interface for interface in chosen if interface.usable]
    others = ", ".join(interface.name for interface in possible) or "none"
    stretched = listed.stretched(everything)
    if not chosen or (not listed.exclude and listed.unmatched(everything)):
        expected = f"an interface of this machine ({', '.join(everything)}): initialisation fails otherwise"
        yield error(value, expected, fix, read=variable)
    elif not usable:
        yield error(value, f"an interface that is up and has an address ({others})", fix, read=variable)
    elif all(interface.internal for interface in usable) and (possible or machine.several_nodes):
        kind = error if machine.several_nodes else warning
        yield kind(value, f"an interface that leads to other nodes ({others})", fix, read=variable)
    elif stretched:
        expected = f"whole names: NCCL takes {value} for the beginning of {', '.join(stretched)} too"
        selected = f"{value} selects {', '.join(interface.name for interface in chosen)}"
        yield warning(selected, expected, f"export {variable}=={value}", "medium", variable)


@check("nic-speed", "Speed of the network interface", "/sys/class/net/*/speed", "the same as siblings, full duplex")
def speed(machine: Machine) -> Iterator[Finding]:
    """A link that came up slower than it should, or that states no speed at all, so that NCCL takes it for 10 Gb/s."""
    everything = [one for one in interfaces(machine) if one.vendor is not None and one.state != "down"]
    for interface in tcp_interfaces(machine):
        folder = f"/sys/class/net/{interface.name}"
        alike = [one for one in everything if (one.vendor, one.model) == (interface.vendor, interface.model)]
        best = max((one.gbps or 0 for one in alike), default=0)
        yield from _members(machine, interface)
        if interface.gbps is None:
            remedy = (
                "python -m topology --write-xml topo.xml; correct speed= there; export NCCL_TOPO_FILE=$PWD/topo.xml"
            )
            # Normal for virtio, and harmless where there is only one way anyway.
            yield info("not stated", "a speed: NCCL assumes 10 Gb/s without one", remedy, "low", f"{folder}/speed")
        elif interface.gbps < best:
            remedy = f"ethtool {interface.name}; check cable, module and switch port"
            expected = f"{best:g} Gb/s, as its siblings of the same make"
            yield warning(f"{interface.gbps:g} Gb/s", expected, remedy, "medium", f"{folder}/speed")
        if interface.duplex == "half":
            remedy = f"sudo ethtool -s {interface.name} autoneg on"
            yield error("half", "full: half duplex loses packets under load", remedy, read=f"{folder}/duplex")


def _members(machine: Machine, bond: Interface) -> Iterator[Finding]:
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


@check("mtu", "Frame size (MTU)", "/sys/class/net/*/mtu", f"9000 where TCP runs over {FAST_GBPS} Gb/s or more")
def mtu(machine: Machine) -> Iterator[Finding]:
    """Small frames cost CPU time on fast links that carry TCP; the switches have to carry large ones too."""
    for interface in tcp_interfaces(machine):
        if (interface.gbps or 0) < FAST_GBPS or (interface.mtu or 9000) > 1500:
            continue
        value, read = str(interface.mtu), f"/sys/class/net/{interface.name}/mtu"
        if machine.virtual:  # a larger frame than the provider's network carries is lost
            remedy = (
                "change the network first (Google: gcloud compute networks update NETWORK --mtu=8896), then the nodes"
            )
            yield info(value, "up to 9000, where the provider's network carries that", remedy, "low", read)
            continue
        private = bool(interface.networks) and all(network.is_private for network in interface.networks)
        expected = "9000 on a private network this fast, on every node and switch between them"
        remedy = f"sudo ip link set {interface.name} mtu 9000; then: ping -M do -s 8972 OTHER_NODE"
        yield (warning if private else info)(value, expected, remedy, "medium" if private else "low", read)


@check("tcp-buffers", "TCP buffers and ports", "/proc/sys/net", "buffers of 16 MiB where TCP runs over a fast link")
def tcp(machine: Machine) -> Iterator[Finding]:
    """One socket fills a fast link only if its window may grow; many sockets need many ports."""
    if any((interface.gbps or 0) >= FAST_GBPS for interface in tcp_interfaces(machine)):
        small = {}
        for name in BUFFERS:
            path = f"proc/sys/{name.replace('.', '/')}"
            text = machine.text(path)
            most = (text or "").split()[-1:]
            if text is None:
                yield unread(machine.why_not(path), f"sysctl {name}", f"/{path}")
            elif not most or not most[0].isdecimal() or int(most[0]) < BUFFER_BYTES:
                small[name] = text.replace("\t", " ")
        if small:
            expected = f"a maximum of {BUFFER_BYTES} bytes or more on {FAST_GBPS} Gb/s"
            remedy = "sudo sysctl -w " + " ".join(f"{name}='{BUFFERS[name]}'" for name in small)
            yield warning("; ".join(f"{name}={text}" for name, text in small.items()), expected, remedy, "medium")
    path = "proc/sys/net/ipv4/ip_local_port_range"
    bounds = [int(bound) for bound in (machine.text(path) or "").split() if bound.isdecimal()]
    if len(bounds) == 2 and bounds[1] - bounds[0] < 16384:
        remedy = "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        expected = "at least 16384 ports: large jobs run out of them"
        yield warning(f"{bounds[0]} to {bounds[1]}", expected, remedy, "medium", f"/{path}")


@check("sockets", "Sockets per connection", "NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD", "several on a fast TCP link")
def sockets(machine: Machine) -> Iterator[Finding]:
    """NCCL opens one socket per connection unless it knows the cloud; one rarely fills 25 Gb/s."""
    values = [machine.variable(name) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")]
    threads, each = (int(value) if value and value.isdecimal() else 1 for value in values)
    shown = ", ".join(value or "unset" for value in values)
    remedy = "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"
    used = [one for one in tcp_interfaces(machine) if one.vendor not in (AMAZON, GOOGLE)]
    fast = ", ".join(f"{one.name} {one.gbps:g} Gb/s" for one in used if (one.gbps or 0) >= FAST_GBPS)
    if threads * each > 64 or threads > 16:
        yield warning(shown, "at most 16 threads, and a product of at most 64", remedy)
    elif fast and values == [None, None]:
        yield warning(
            shown, f"several sockets on a link this fast ({fast}): NCCL opens one", f"try: {remedy}", "medium"
        )
