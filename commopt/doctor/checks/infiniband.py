"""InfiniBand and RoCE: ports, the choice among them, RoCE addresses, relaxed ordering."""

from __future__ import annotations

from math import inf

from commopt.doctor.facts.machine import Machine, version_text
from commopt.doctor.facts.network import Port, active_ports, before, gids, ports
from commopt.doctor.facts.pattern import Pattern
from commopt.doctor.facts.surroundings import virtual_machine
from commopt.doctor.finding import Check, Confidence, Finding
from commopt.doctor.provider import provider_profile

PORT = Check("ib-port", "RDMA ports")
CHOICE = Check("ib-hca", "Choice of RDMA adapters")
GID = Check("roce-gid", "RoCE addresses")
CLASSES = Check("roce-class", "Traffic class and paths of RoCE")
ORDERING = Check("ib-ordering", "Relaxed ordering")

NONE = "no RDMA device"


def port(machine: Machine) -> list[Finding]:
    """Every port that is there should be up, at the speed of its siblings."""
    read = "/sys/class/infiniband/*/ports/*"
    everything, active = ports(machine), active_ports(machine)
    if not everything:
        return [PORT.ok(read, NONE, "nothing to check")]
    found = []
    for one in everything:
        if not one.active:
            expected = "4: ACTIVE, 5: LinkUp"
            remedy = f"ibstat {one.device}; check cable and switch"
            if one.link_layer == "InfiniBand" and (one.state or "").startswith("2"):
                remedy = "sudo sminfo (is a subnet manager running?)"
            state = f"{one.state or 'state unreadable'}, {one.phys_state or 'physical state unreadable'}"
            # A port nobody cabled is common, a second one even usual; none at all is not.
            spare = one.device in {other.device for other in active} or not _selected(machine, one)
            kind = PORT.error if not active else PORT.info if spare else PORT.warning
            found.append(kind(f"/{one.path}/state", state, expected, remedy, "medium" if active else "high"))
        elif one.gbps is None:
            found.append(PORT.unread(f"/{one.path}/rate", machine.why_not(f"{one.path}/rate"), f"ibstat {one.device}"))
    for layer in ("InfiniBand", "Ethernet"):
        alike = [one for one in active if one.link_layer == layer and one.gbps]
        best = max((one.gbps or 0 for one in alike), default=0)
        slower = [one for one in alike if (one.gbps or 0) < best]
        if slower and all(_selected(machine, one) for one in slower):
            shown = ", ".join(f"{one.name} {one.gbps:g} Gb/s" for one in slower)
            fast = ",".join(one.name for one in alike if one not in slower)
            expected = f"{best:g} Gb/s like the others, or not used at all"
            remedy = f"ibstat; check cables; if these are for storage: export NCCL_IB_HCA=={fast}"
            found.append(PORT.warning(f"{read}/rate", shown, expected, remedy, "medium"))
    found += _narrow(machine, [one for one in active if one.link_layer == "InfiniBand" and _selected(machine, one)])
    shown = ", ".join(f"{one.name} {one.gbps or 0:g} Gb/s" for one in active)
    return found or [PORT.ok(read, shown, "ACTIVE, LinkUp, equal rates")]


def _narrow(machine: Machine, active: list[Port]) -> list[Finding]:
    """An InfiniBand port has four lanes; a cable that is split, or bad, or half plugged in leaves it with fewer."""
    slots = {device.busid: device.link_max.gbps for device in machine.hardware.pci}
    room = {nic.name: slots.get(nic.busid or "") for nic in machine.hardware.nics}
    narrow = [
        one
        for one in active
        if one.lanes == 1 or (one.lanes == 2 and (room.get(one.device) or inf) >= 2 * (one.gbps or 0))
    ]
    if not narrow:
        return []
    shown = ", ".join(f"{one.name} {one.lanes}X {one.gbps or 0:g} Gb/s" for one in narrow)
    expected = "4X: with fewer lanes the port has that much less bandwidth (2X is as it should be with split cables)"
    remedy = f"sudo mlxlink -d {narrow[0].device}; then reseat or replace the cable"
    sure: Confidence = "high" if any(one.lanes == 1 for one in narrow) else "medium"
    return [PORT.warning("/sys/class/infiniband/*/ports/*/rate", shown, expected, remedy, sure)]


def _selected(machine: Machine, one: Port) -> bool:
    return Pattern.parse(machine.variable("NCCL_IB_HCA") or "").selects(one.device, one.number)


def choice(machine: Machine) -> list[Finding]:
    """NCCL_IB_HCA should select all ports of the fast network and nothing else."""
    active = active_ports(machine)
    value = machine.variable("NCCL_IB_HCA")
    read = "NCCL_IB_HCA, /sys/class/infiniband"
    names = ", ".join(one.name for one in active)
    if not active:
        return [CHOICE.ok(read, value or "unset", "an active RDMA port, which this machine does not have")]
    used = [one for one in active if _selected(machine, one)]
    if not used:
        expected = f"active ports of this machine ({names}): NCCL uses TCP otherwise"
        return [CHOICE.error(read, value or "unset", expected, "unset NCCL_IB_HCA")]
    found = []
    layers = {one.link_layer for one in used if one.link_layer}
    if len(layers) > 1:
        best = max(sorted(layers), key=lambda layer: sum(one.gbps or 0 for one in used if one.link_layer == layer))
        listed = ",".join(one.name for one in used if one.link_layer == best)
        shown = ", ".join(f"{one.name} {one.link_layer}" for one in used)
        expected = "one kind of network: NCCL cannot connect InfiniBand with Ethernet"
        found.append(CHOICE.warning(read, shown, expected, f"export NCCL_IB_HCA=={listed}", "medium"))
    best_rate = max(one.gbps or 0 for one in used)
    left = [
        one
        for one in active
        if one not in used and {one.link_layer} <= {other.link_layer for other in used} and (one.gbps or 0) >= best_rate
    ]
    if left:
        idle = ", ".join(one.name for one in left)
        expected = f"all equal ports: {idle} stay idle"
        found.append(CHOICE.warning(read, f"{value}", expected, "unset NCCL_IB_HCA, or add them", "medium"))
    pattern = Pattern.parse(value or "")
    unknown = [] if pattern.exclude else pattern.unmatched([one.device for one in ports(machine)])
    if unknown:
        found.append(
            CHOICE.warning(
                read, f"{', '.join(unknown)} fits no device", f"devices of this machine ({names})", "ibstat -l"
            )
        )
    stretched = pattern.stretched([one.device for one in ports(machine)])
    if stretched:
        expected = f"whole names: NCCL takes {value} for the beginning of {', '.join(stretched)} too"
        shown = f"{value} selects {', '.join(one.name for one in used)}"
        found.append(CHOICE.warning(read, shown, expected, f"export NCCL_IB_HCA=={value}", "medium"))
    return found or [CHOICE.ok(read, ", ".join(one.name for one in used), "all equal ports of one network")]


def gid(machine: Machine) -> list[Finding]:
    """RoCE needs an address of version 2; NCCL finds it by itself since 2.21."""
    roce = [one for one in active_ports(machine) if one.link_layer == "Ethernet"]
    value = machine.variable("NCCL_IB_GID_INDEX")
    read = "NCCL_IB_GID_INDEX, /sys/class/infiniband/*/ports/*/gid_attrs/types"
    if not roce:
        return [GID.ok(read, value or "unset", "an active RoCE port, which this machine does not have")]
    found = []
    for one in roce:
        found += _addresses(machine, one, value) + _frames(machine, one)
    if value not in (None, "-1") and before(machine.software.nccl, (2, 21)) is not True:
        expected = f"unset: NCCL {version_text(machine.software.nccl)} chooses for each port (since 2.21)"
        found.append(GID.warning("NCCL_IB_GID_INDEX", value or "", expected, "unset NCCL_IB_GID_INDEX", "medium"))
    return found or [GID.ok(read, value or "unset", "a RoCE v2 address on every port, chosen by NCCL")]


def _addresses(machine: Machine, one: Port, chosen: str | None) -> list[Finding]:
    folder = f"{one.path}/gid_attrs/types"
    table = gids(machine, one)
    second = [entry for entry in table if entry.kind == "RoCE v2"]
    if not table:
        return [GID.unread(f"/{folder}", machine.why_not(folder), "show_gids")]
    give = "give the port's interface an IP address: sudo ip address add ADDRESS/PREFIX dev "
    give += machine.text(f"{one.path}/gid_attrs/ndevs/0") or "INTERFACE"
    if not second:
        kinds = ", ".join(sorted({entry.kind for entry in table}))
        expected = "RoCE v2: version 1 is not routed and many switches drop it"
        return [GID.error(f"/{folder}", kinds, expected, give)]
    if chosen not in (None, "-1"):
        found = next((entry for entry in table if entry.index == chosen), None)
        if found in second:
            return []
        shown = f"{chosen} is {found.kind if found else 'empty'} on {one.name}"
        expected = f"RoCE v2, which is {' or '.join(entry.index for entry in second)} there"
        return [GID.error("NCCL_IB_GID_INDEX", shown, expected, "unset NCCL_IB_GID_INDEX (or -1)")]
    known = [entry.address for entry in second if entry.address is not None]
    if len(known) < len(second):
        return []
    routed = [entry.address for entry in second if entry.address is not None and not entry.link_local]
    wants_six = machine.variable("NCCL_IB_ADDR_FAMILY") == "AF_INET6"
    if any((address.ipv4_mapped is None) == wants_six for address in routed):
        return []
    shown = ", ".join(map(str, known))
    expected = "an address that is not link-local (fe80): NCCL passes over those, and ends with RoCE v1"
    if routed:
        expected = "an IPv4 address, or the other family allowed: NCCL looks at IPv4 only"
        give = "export NCCL_IB_ADDR_FAMILY=AF_INET6"
    if wants_six:
        expected, give = "a global IPv6 address, since NCCL_IB_ADDR_FAMILY asks for one", "unset NCCL_IB_ADDR_FAMILY"
    return [GID.error(f"/{one.path}/gids", shown, expected, give)]


def classes(machine: Machine) -> list[Finding]:
    """RoCE relies on the switches not to drop: its packets need the class that they protect, and several paths."""
    roce = [one for one in active_ports(machine) if one.link_layer == "Ethernet"]
    read = "NCCL_IB_TC, NCCL_IB_QPS_PER_CONNECTION"
    shown = {name: machine.variable(name) for name in read.split(", ")}
    value = ", ".join(text or "unset" for text in shown.values())
    if not roce or provider_profile(machine.environ):
        return [CLASSES.ok(read, value, "an active RoCE port, and no provider that sees to it")]
    found = []
    forced = [f"sys/class/infiniband/{one.device}/tc/{one.number}/traffic_class" for one in roce]
    if shown["NCCL_IB_TC"] is None and not all(machine.text(path) for path in forced):
        expected = "the class that the switches protect (PFC, ECN), unless that is class 0; ask who runs the network"
        remedy = "export NCCL_IB_TC=NUMBER (4 times the DSCP; 106 for DSCP 26 with ECN is common)"
        found.append(CLASSES.info("NCCL_IB_TC", "unset: class 0", expected, remedy, "medium"))
    if shown["NCCL_IB_QPS_PER_CONNECTION"] is None:
        expected = "several, where the switches spread flows over paths (ECMP): one connection takes one path"
        remedy = "try: export NCCL_IB_QPS_PER_CONNECTION=4"
        found.append(CLASSES.info("NCCL_IB_QPS_PER_CONNECTION", "unset: 1", expected, remedy, "medium"))
    return found or [CLASSES.ok(read, value, "set where there is RoCE")]


def _frames(machine: Machine, one: Port) -> list[Finding]:
    """RoCE packets of 4096 bytes need an interface with room for them."""
    interface = machine.text(f"{one.path}/gid_attrs/ndevs/0")
    size = machine.number(f"sys/class/net/{interface}/mtu") if interface else None
    if size is None or size >= 4200:
        return []
    expected = "9000 (at least 4200), so that RoCE uses packets of 4096 bytes: on every node and switch"
    remedy = f"sudo ip link set {interface} mtu 9000"
    return [GID.warning(f"/sys/class/net/{interface}/mtu", str(size), expected, remedy, "medium")]


def ordering(machine: Machine) -> list[Finding]:
    """Relaxed ordering lets the PCIe root complex reorder writes; some platforms are slow without it."""
    value = machine.variable("NCCL_IB_PCI_RELAXED_ORDERING")
    if value != "0" or not active_ports(machine):
        return [ORDERING.ok("NCCL_IB_PCI_RELAXED_ORDERING", value or "unset", "unset: NCCL uses it where it exists")]
    slow = virtual_machine(machine) or "AuthenticAMD" in (machine.text("proc/cpuinfo") or "")
    expected = "unset: virtual machines and AMD processors lose bandwidth with strict ordering"
    kind = ORDERING.warning if slow else ORDERING.info
    return [kind("NCCL_IB_PCI_RELAXED_ORDERING", value, expected, "unset NCCL_IB_PCI_RELAXED_ORDERING", "medium")]
