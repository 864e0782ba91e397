"""Ethernet: which interface carries the data, how fast it is, frame size, TCP buffers, number of sockets."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.network import (
    VENDORS,
    Interface,
    candidates,
    interfaces,
    tcp_interfaces,
)
from commopt.doctor.facts.pattern import Pattern
from commopt.doctor.facts.surroundings import virtual_machine
from commopt.doctor.finding import Check, Finding

CHOICE = Check("interface", "Network interface")
SPEED = Check("nic-speed", "Speed of the network interface")
MTU = Check("mtu", "Frame size (MTU)")
TCP = Check("tcp-buffers", "TCP buffers and ports")
SOCKETS = Check("sockets", "Sockets per connection")

FAST_GBPS = 25
BUFFER_BYTES = 16 << 20
BUFFERS = (
    ("net.core.rmem_max", "proc/sys/net/core/rmem_max", "67108864"),
    ("net.core.wmem_max", "proc/sys/net/core/wmem_max", "67108864"),
    ("net.ipv4.tcp_rmem", "proc/sys/net/ipv4/tcp_rmem", "4096 131072 67108864"),
    ("net.ipv4.tcp_wmem", "proc/sys/net/ipv4/tcp_wmem", "4096 65536 67108864"),
)


def choice(machine: Machine) -> list[Finding]:
    """NCCL and gloo each choose an interface; with several, different nodes can choose differently."""
    possible = candidates(machine)
    names = ", ".join(interface.name for interface in possible)
    if not machine.listing("sys/class/net"):
        return [CHOICE.unread("/sys/class/net", machine.why_not("sys/class/net"), "ip address")]
    found = []
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = machine.variable(variable)
        if value is not None:
            found += _chosen(machine, variable, value, possible)
        elif len(possible) > 1 and (machine.hardware.gpus or variable.startswith("GLOO")):
            best = _best(machine, possible)
            prefix = "=" if variable.startswith("NCCL") else ""
            expected = "set: the nodes may choose different networks, or a slow one"
            remedy = f"export {variable}={prefix}{best.name}"
            read = f"{variable}, /sys/class/net, /proc/net/route"
            kind = CHOICE.warning if machine.hardware.gpus or machine.several_nodes else CHOICE.info
            found.append(kind(read, f"unset, with {names} to choose from", expected, remedy, "medium"))
    if not possible:
        expected = "one with an address that other nodes can reach"
        found.append(CHOICE.info("/sys/class/net", "no such interface", expected, "ip address; ip route", "medium"))
    return found or [CHOICE.ok("/sys/class/net, /proc/net/route", names, "one interface, or one that is named")]


def _best(machine: Machine, possible: list[Interface]) -> Interface:
    """Return the fastest where TCP carries the data; where RDMA does, the one all nodes share, not one of its rails."""
    if tcp_interfaces(machine):
        return max(possible, key=lambda interface: (interface.gbps or 0, interface.default_route))
    return max(possible, key=lambda interface: (interface.default_route, interface.gbps or 0))


def _chosen(machine: Machine, variable: str, value: str, possible: list[Interface]) -> list[Finding]:
    existing = interfaces(machine)
    everything = [interface.name for interface in existing]
    # gloo knows neither prefixes nor signs.
    pattern = Pattern.parse(value if variable.startswith("NCCL") else f"={value}")
    chosen = [interface for interface in existing if pattern.selects(interface.name)]
    usable = [interface for interface in chosen if interface.usable]
    others = ", ".join(interface.name for interface in possible) or "none"
    prefix = "=" if variable.startswith("NCCL") else ""
    fix = f"export {variable}={prefix}{_best(machine, possible).name}" if possible else f"unset {variable}"
    found = []
    missing = [] if pattern.exclude else pattern.unmatched(everything)
    if missing or not chosen:
        expected = f"an interface of this machine ({', '.join(everything)}): initialisation fails otherwise"
        found.append(CHOICE.error(variable, value, expected, fix))
    elif not usable:
        expected = f"an interface that is up and has an address ({others})"
        found.append(CHOICE.error(variable, value, expected, fix))
    elif all(interface.internal for interface in usable) and (possible or machine.several_nodes):
        expected = f"an interface that leads to other nodes ({others})"
        kind = CHOICE.error if machine.several_nodes else CHOICE.warning
        found.append(kind(variable, value, expected, fix))
    elif stretched := pattern.stretched(everything):
        expected = f"whole names: NCCL takes {value} for the beginning of {', '.join(stretched)} too"
        selected = f"{value} selects {', '.join(interface.name for interface in chosen)}"
        found.append(CHOICE.warning(variable, selected, expected, f"export {variable}=={value}", "medium"))
    return found


def speed(machine: Machine) -> list[Finding]:
    """A link that came up slower than it should, or that states no speed at all, so that NCCL takes it for 10 Gb/s."""
    found = []
    used = [interface for interface in tcp_interfaces(machine) if not interface.internal]
    everything = [interface for interface in interfaces(machine) if interface.vendor is not None]
    for interface in used:
        read = f"/sys/class/net/{interface.name}/speed"
        bond = f"sys/class/net/{interface.name}/bonding/slaves"
        if machine.exists(bond):
            found += _members(machine, interface, (machine.text(bond) or "").split())
        if interface.gbps is None:
            expected = "a speed: NCCL assumes 10 Gb/s without one"
            remedy = "python -m topology --write-xml topo.xml; correct speed= there; "
            remedy += "export NCCL_TOPO_FILE=$PWD/topo.xml"
            # Normal for virtio, and harmless where there is only one way anyway.
            found.append(SPEED.info(read, "not stated", expected, remedy, "low"))
        twins = [
            other
            for other in everything
            if (other.vendor, other.model) == (interface.vendor, interface.model) and other.state != "down"
        ]
        best = max((other.gbps or 0 for other in twins), default=0)
        if interface.gbps is not None and interface.vendor is not None and interface.gbps < best:
            expected = f"{best:g} Gb/s, as its siblings of the same make"
            remedy = f"ethtool {interface.name}; check cable, module and switch port"
            found.append(SPEED.warning(read, f"{interface.gbps:g} Gb/s", expected, remedy, "medium"))
        if interface.duplex == "half":
            expected = "full: half duplex loses packets under load"
            remedy = f"sudo ethtool -s {interface.name} autoneg on"
            found.append(SPEED.error(f"/sys/class/net/{interface.name}/duplex", "half", expected, remedy))
    shown = ", ".join(f"{interface.name} {interface.gbps:g} Gb/s" for interface in used if interface.gbps)
    return found or [SPEED.ok("/sys/class/net/*/speed", shown or "no interface", "the same as siblings, full duplex")]


def _members(machine: Machine, bond: Interface, members: list[str]) -> list[Finding]:
    speeds = {name: machine.number(f"sys/class/net/{name}/speed") for name in members}
    best = max((value or 0 for value in speeds.values()), default=0)
    found = []
    for name, value in speeds.items():
        state = machine.text(f"sys/class/net/{name}/operstate")
        if state == "down" or (value or 0) < best:
            shown = "down" if state == "down" else f"{(value or 0) / 1000:g} Gb/s"
            expected = f"up with {best / 1000:g} Gb/s like the others in {bond.name}"
            remedy = f"ethtool {name}; cat /proc/net/bonding/{bond.name}"
            found.append(SPEED.warning(f"/sys/class/net/{name}/speed", shown, expected, remedy))
    return found


def mtu(machine: Machine) -> list[Finding]:
    """Small frames cost CPU time on fast links that carry TCP; the switches have to carry large ones too."""
    found = []
    for interface in tcp_interfaces(machine):
        if interface.internal or (interface.gbps or 0) < FAST_GBPS or (interface.mtu or 9000) > 1500:
            continue
        read = f"/sys/class/net/{interface.name}/mtu"
        if virtual_machine(machine):  # a larger frame than the provider's network carries is lost
            expected = "up to 9000, where the provider's network carries that"
            remedy = (
                "change the network first (Google: gcloud compute networks update NETWORK --mtu=8896), then the nodes"
            )
            found.append(MTU.info(read, str(interface.mtu), expected, remedy, "low"))
            continue
        private = bool(interface.networks) and all(network.is_private for network in interface.networks)
        expected = "9000 on a private network this fast, on every node and switch between them"
        remedy = f"sudo ip link set {interface.name} mtu 9000; then: ping -M do -s 8972 OTHER_NODE"
        kind = MTU.warning if private else MTU.info
        found.append(kind(read, str(interface.mtu), expected, remedy, "medium" if private else "low"))
    read = "/sys/class/net/*/mtu"
    return found or [MTU.ok(read, "fits", f"9000 where TCP runs over {FAST_GBPS} Gb/s or more")]


def tcp(machine: Machine) -> list[Finding]:
    """One socket fills a fast link only if its window may grow; many sockets need many ports."""
    found = []
    if any((interface.gbps or 0) >= FAST_GBPS for interface in tcp_interfaces(machine)):
        small, lines = [], []
        for name, path, wanted in BUFFERS:
            text = machine.text(path)
            if text is None:
                found.append(TCP.unread(f"/{path}", machine.why_not(path), f"sysctl {name}"))
            elif not text.split()[-1:] or not text.split()[-1].isdecimal() or int(text.split()[-1]) < BUFFER_BYTES:
                small.append(f"{name}={text}".replace("\t", " "))
                lines.append(f"{name}='{wanted}'")
        if small:
            read = "/proc/sys/net/core/*mem_max, /proc/sys/net/ipv4/tcp_*mem"
            expected = f"a maximum of {BUFFER_BYTES} bytes or more on {FAST_GBPS} Gb/s"
            found.append(TCP.warning(read, "; ".join(small), expected, f"sudo sysctl -w {' '.join(lines)}", "medium"))
    path = "proc/sys/net/ipv4/ip_local_port_range"
    bounds = (machine.text(path) or "").split()
    if len(bounds) == 2 and all(bound.isdecimal() for bound in bounds) and int(bounds[1]) - int(bounds[0]) < 16384:
        expected = "at least 16384 ports: large jobs run out of them"
        remedy = "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        found.append(TCP.warning(f"/{path}", " to ".join(bounds), expected, remedy, "medium"))
    shown = f"congestion control {machine.text('proc/sys/net/ipv4/tcp_congestion_control') or 'unknown'}"
    return found or [TCP.ok("/proc/sys/net", shown, "buffers of 16 MiB where TCP runs over a fast link")]


def sockets(machine: Machine) -> list[Finding]:
    """NCCL opens one socket per connection unless it knows the cloud; one rarely fills 25 Gb/s."""
    threads, each = machine.variable("NCCL_SOCKET_NTHREADS"), machine.variable("NCCL_NSOCKS_PERTHREAD")
    read = "NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD"
    shown = f"{threads or 'unset'}, {each or 'unset'}"
    numbers = [int(value) if value and value.isdecimal() else 1 for value in (threads, each)]
    if numbers[0] * numbers[1] > 64 or numbers[0] > 16:
        remedy = "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"
        return [SOCKETS.warning(read, shown, "at most 16 threads, and a product of at most 64", remedy)]
    fast = [
        interface
        for interface in tcp_interfaces(machine)
        if not interface.internal and (interface.gbps or 0) >= FAST_GBPS and interface.vendor not in VENDORS
    ]
    if fast and threads is None and each is None:
        names = ", ".join(f"{interface.name} {interface.gbps:g} Gb/s" for interface in fast)
        expected = f"several sockets on a link this fast ({names}): NCCL opens one"
        remedy = "try: export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"
        return [SOCKETS.warning(read, shown, expected, remedy, "medium")]
    return [SOCKETS.ok(read, shown, "set where TCP runs over 25 Gb/s or more, outside AWS and Google")]
