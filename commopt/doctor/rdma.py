# SPDX-License-Identifier: Apache-2.0
"""InfiniBand, RoCE and EFA: access to RDMA for NCCL, ports and their selection, RoCE addresses, error counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from commopt.doctor.finding import Finding, Unread, check, error, info, unread, warning
from commopt.doctor.machine import Machine, Need
from commopt.doctor.network import LINK_LOCAL, DeviceList, Port, active_ports, candidates, gids, ports
from commopt.doctor.settings import is_amazon

LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "lib64", "usr/lib", "usr/local/lib")
PLUGINS = ("opt/amazon/ofi-nccl/lib", "opt/aws-ofi-nccl/lib", "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu")
PORTS = "/sys/class/infiniband/*/ports/*"


ROCE: Need = (lambda machine: active_ports(machine, "Ethernet"), "no active RoCE port")
ACTIVE: Need = (active_ports, "no active RDMA port")


@check("/dev/infiniband, libibverbs, plugins of NCCL", needs=(ACTIVE,))
def transport(machine: Machine) -> Iterator[Finding]:
    """RDMA instead of TCP: device files, libibverbs and plugins that NCCL can use; it falls back to TCP otherwise."""
    if not active_ports(machine):
        return
    plugin = machine.variable("NCCL_NET_PLUGIN")
    if is_amazon(machine) and (plugin or "").lower() != "none" and not _has_plugin(machine, plugin or "libnccl-net"):
        remedy = "install aws-ofi-nccl; export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:$LD_LIBRARY_PATH"
        yield warning(f"not found: {plugin or 'unset'}", "EFA's plugin", remedy, "medium", "libnccl-net*.so")
    if not machine.listing("dev/infiniband"):
        remedy = "docker run --device=/dev/infiniband ... (on the host: sudo modprobe ib_uverbs)"
        yield error(machine.unread_reason("dev/infiniband"), remedy=remedy, read="/dev/infiniband")
    folders = [folder for folder in LIBRARIES if machine.exists(folder)]
    names = [name for folder in folders for name in machine.listing(folder)]
    if folders and not any(name.startswith("libibverbs.so.1") for name in names):
        value = "not in " + ", ".join(f"/{folder}" for folder in folders)
        remedy = "sudo apt-get install libibverbs1 ibverbs-providers (or: sudo dnf install libibverbs)"
        yield warning(value, remedy=remedy, confidence="medium", read="libibverbs.so.1")


def _has_plugin(machine: Machine, wanted: str) -> bool:
    """Return whether the loader can find a library.

    wanted: value of NCCL_NET_PLUGIN, a list of names, files or endings.
    """
    named = [folder.strip("/") for folder in (machine.variable("LD_LIBRARY_PATH") or "").split(":")]
    there = [name for folder in (*named, *LIBRARIES, *PLUGINS) if folder for name in machine.listing(folder)]
    cache = machine.content("etc/ld.so.cache")
    for name in filter(None, map(str.strip, wanted.split(","))):
        installed = any(file.startswith((name, f"libnccl-net-{name}")) for file in there) or name.encode() in cache
        if machine.exists(name.lstrip("/")) if "/" in name else installed:
            return True
    return False


@check(PORTS, needs=((ports, "no RDMA adapter"),))
def ib_port(machine: Machine) -> Iterator[Finding]:
    """RDMA ports: ACTIVE, LinkUp, at the rate of their siblings."""
    active = active_ports(machine)
    for one in ports(machine):
        if not one.active:
            remedy = f"ibstat {one.device}; check cable and switch"
            if one.link_layer == "InfiniBand" and one.state.startswith("2"):
                remedy = "sudo sminfo (is a subnet manager running?)"
            state = f"{one.state}, {machine.text(f'{one.path}/phys_state') or 'physical state unreadable'}"
            # An unconnected port is common, a second one even usual; no connected port at all is not.
            spare = one.device in {other.device for other in active} or not _selected(machine, one)
            kind, sure = (error, "high") if not active else (info if spare else warning, "medium")
            yield kind(state, "4: ACTIVE, 5: LinkUp", remedy, sure, f"/{one.path}/state")
        elif one.gbps is None:
            yield unread(machine.unread_reason(f"{one.path}/rate"), f"ibstat {one.device}", f"/{one.path}/rate")
    for layer in ("InfiniBand", "Ethernet"):
        rates = {one: one.gbps for one in active_ports(machine, layer) if one.gbps}
        best = max(rates.values(), default=0)
        slower = [one for one, gbps in rates.items() if gbps < best]
        if slower and all(_selected(machine, one) for one in slower):
            fast = ",".join(one.name for one in rates if one not in slower)
            remedy = f"ibstat; check cables; if these are for storage: export NCCL_IB_HCA=={fast}"
            yield warning(_rates(slower), f"{best:g} Gb/s like the others, or not used at all", remedy, "medium")
    # A split, bad or loose cable leaves an InfiniBand port with fewer than four lanes.
    few = [one for one in active_ports(machine, "InfiniBand") if one.lanes in (1, 2) and _selected(machine, one)]
    slots = {device.busid: device.link_max.gbps for device in machine.hardware.pci}
    room = {nic.name: slots.get(nic.busid or "") or inf for nic in machine.hardware.nics}
    narrow = [one for one in few if one.lanes == 1 or room.get(one.device, inf) >= 2 * (one.gbps or 0)]
    if narrow:
        shown = ", ".join(f"{one.name} {one.lanes}X {one.gbps or 0:g} Gb/s" for one in narrow)
        expected = "4X: fewer lanes carry less (2X is right for split cables)"
        remedy = f"sudo mlxlink -d {narrow[0].device}; then reseat or replace the cable"
        yield warning(shown, expected, remedy, "high" if any(one.lanes == 1 for one in narrow) else "medium")


def _rates(of: list[Port]) -> str:
    return ", ".join(f"{one.name} {one.gbps or 0:g} Gb/s" for one in of)


def _selected(machine: Machine, one: Port) -> bool:
    return DeviceList.parse(machine.variable("NCCL_IB_HCA") or "").selects(one.device, one.number)


@check("NCCL_IB_HCA, /sys/class/infiniband", "unset NCCL_IB_HCA, or list them all", needs=(ACTIVE,))
def ib_hca(machine: Machine) -> Iterator[Finding]:
    """Choice of RDMA adapters: all equal ports of the fast network, and nothing else."""
    active, value = active_ports(machine), machine.variable("NCCL_IB_HCA") or ""
    names = ", ".join(one.name for one in active)
    used = [one for one in active if _selected(machine, one)]
    if not active:
        return
    if not used:
        yield error(value, f"active ports of this machine ({names}): NCCL uses TCP otherwise")
        return
    layers = sorted({one.link_layer for one in used if one.link_layer})
    if len(layers) > 1:
        best = max(layers, key=lambda layer: sum(one.gbps or 0 for one in used if one.link_layer == layer))
        shown = ", ".join(f"{one.name} {one.link_layer}" for one in used)
        remedy = f"export NCCL_IB_HCA=={','.join(one.name for one in used if one.link_layer == best)}"
        yield warning(shown, "one kind of network: NCCL cannot connect InfiniBand with Ethernet", remedy, "medium")
    rate, kinds = max(one.gbps or 0 for one in used), {one.link_layer for one in used}
    idle = [one.name for one in active if one not in used and one.link_layer in kinds and (one.gbps or 0) >= rate]
    if idle:
        yield warning(value, f"all equal ports: {', '.join(idle)} stay idle", confidence="medium")
    listed, devices = DeviceList.parse(value), [one.device for one in ports(machine)]
    unknown = [] if listed.exclude else listed.unmatched(devices)
    if unknown:
        yield warning(f"{', '.join(unknown)} fits no device", f"devices of this machine ({names})", "ibstat -l")
    if matched_by_prefix := listed.matched_by_prefix(devices):
        expected = f"whole names: NCCL takes {value} for the beginning of {', '.join(matched_by_prefix)} too"
        shown = f"{value} selects {', '.join(one.name for one in used)}"
        yield warning(shown, expected, f"export NCCL_IB_HCA=={value}", "medium")


@check(
    f"NCCL_IB_GID_INDEX, {PORTS}/gid_attrs/types",
    "unset NCCL_IB_GID_INDEX (or -1)",
    needs=(ROCE,),
)
def roce_gid(machine: Machine) -> Iterator[Finding]:
    """RoCE addresses: one of version 2 on every port, which NCCL finds without a setting, and packets of 4096 bytes."""
    value = machine.variable("NCCL_IB_GID_INDEX")
    value, roce = None if value == "-1" else value, active_ports(machine, "Ethernet")
    wrong = [finding for one in roce for finding in _addresses(machine, one, value)]
    yield from wrong
    if value is not None and roce and not wrong:
        yield warning(value, "unset: NCCL chooses for each port", confidence="medium", read="NCCL_IB_GID_INDEX")
    for one in roce:
        interface = machine.text(f"{one.path}/gid_attrs/ndevs/0")
        mtu = machine.number(f"sys/class/net/{interface}/mtu") if interface else None
        if mtu is not None and mtu < 4200:
            expected = "9000 (at least 4200) on every node and switch, so that RoCE uses packets of 4096 bytes"
            remedy = f"sudo ip link set {interface} mtu 9000"
            yield warning(str(mtu), expected, remedy, "medium", f"/sys/class/net/{interface}/mtu")


def _addresses(machine: Machine, one: Port, chosen: str | None) -> Iterator[Finding]:
    folder, table = f"{one.path}/gid_attrs/types", gids(machine, one)
    second = [entry for entry in table if entry.kind == "RoCE v2"]
    give = "give the port's interface an IP address: sudo ip address add ADDRESS/PREFIX dev "
    give += machine.text(f"{one.path}/gid_attrs/ndevs/0") or "INTERFACE"
    known = [entry.address for entry in second if entry.address is not None]
    if not table:
        yield unread(machine.unread_reason(folder), "show_gids", f"/{folder}")
    elif not second:
        kinds = ", ".join(sorted({entry.kind for entry in table}))
        yield error(kinds, "RoCE v2: version 1 is not routed and many switches drop it", give, read=f"/{folder}")
    elif chosen is not None:
        kind = next((entry.kind for entry in table if entry.number == chosen), "empty")
        if kind != "RoCE v2":
            expected = f"RoCE v2, which is {' or '.join(entry.number for entry in second)} there"
            yield error(f"{chosen} is {kind} on {one.name}", expected, read="NCCL_IB_GID_INDEX")
    elif len(known) == len(second):
        routed = [address for address in known if address not in LINK_LOCAL]
        wants_six = machine.variable("NCCL_IB_ADDR_FAMILY") == "AF_INET6"
        expected = "an address that is not link-local (fe80): NCCL skips those, and ends with RoCE v1"
        if wants_six:
            expected, give = "a global IPv6 address: NCCL_IB_ADDR_FAMILY asks for one", "unset NCCL_IB_ADDR_FAMILY"
        elif routed:
            expected = "an IPv4 address, or the other family allowed: NCCL looks at IPv4 only"
            give = "export NCCL_IB_ADDR_FAMILY=AF_INET6"
        if not any((address.ipv4_mapped is None) == wants_six for address in routed):
            yield error(", ".join(map(str, known)), expected, give, read=f"/{one.path}/gids")


ETHERNET = ("rx_crc_errors", "rx_missed_errors", "rx_fifo_errors", "tx_carrier_errors")
LINK = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors")
LOST = (
    "port_xmit_discards",
    "excessive_buffer_overrun_errors",
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "out_of_buffer",
)
# Congestion notices (CNP), marked packets, waits for credit: a few are normal, many mean a busy network.
CONGESTION = ("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets", "port_xmit_wait")


def read_counters(machine: Machine) -> Mapping[str, int]:
    """Return the error counters of all RDMA ports and of the interfaces to other nodes, by path."""
    paths = [f"sys/class/net/{one.name}/statistics/{name}" for one in candidates(machine) for name in ETHERNET]
    folders = [f"{one.path}/{folder}" for one in ports(machine) for folder in ("counters", "hw_counters")]
    paths += [f"{folder}/{name}" for folder in folders for name in LINK + LOST + CONGESTION]
    return {path: value for path in paths if (value := machine.number(path)) is not None}


@check(f"{PORTS}/{{counters,hw_counters}}, /sys/class/net/*/statistics")
def counters(machine: Machine) -> Iterator[Finding]:
    """Error counters: 0, or no growth since the doctor's first reading; every error costs a retransmission."""
    now = read_counters(machine)
    if not now:
        raise Unread("no port has counters that this user can read", "ethtool -S INTERFACE")
    layers = {one.device: one.link_layer for one in ports(machine)}
    grown = {path: more for path, value in now.items() if (more := value - machine.counters.get(path, value)) > 0}
    for path, more in grown.items():
        device, name = path.split("/")[3], path.rsplit("/", 1)[1]
        growth = f"+{more} between two readings (now {now[path]})"
        if name in CONGESTION:
            remedy = "look for a slow link or many senders to one port; the same counters on the switches"
            yield info(growth, "few: the network makes senders wait", remedy, "low", f"/{path}")
        else:
            yield error(growth, remedy=_repair(device, name, layers.get(device)), read=f"/{path}")
    old = {path: value for path, value in now.items() if value and not path.endswith(CONGESTION)}
    if old and not grown:
        worst = sorted(old.items(), key=lambda item: -item[1])[:4]
        shown = ", ".join(f"{path.split('/')[3]} {path.rsplit('/', 1)[1]} {value}" for path, value in worst)
        expected = "0; these did not grow now, so run the doctor again during training"
        yield info(shown, expected, "python -m commopt doctor, while the job runs", "low")


def _repair(device: str, name: str, layer: str | None) -> str:
    if name in LOST and layer == "Ethernet":
        remedy = "export NCCL_IB_TC to the class that PFC and ECN protect (mlnx_qos -i INTERFACE, and the switches); "
        return remedy + "ethtool -S INTERFACE | grep -E 'pause|discard'"
    if name in LOST:
        return "sudo ibdiagnet (errors and congestion on the way); perfquery -x on both ends"
    if name in ("rx_missed_errors", "rx_fifo_errors"):
        return f"sudo ethtool -g {device}; sudo ethtool -G {device} rx 8192 (at most its maximum)"
    tool = f"sudo ethtool -m {device}" if name in ETHERNET else f"sudo mlxlink -d {device} -c"
    return f"{tool}; then cable, module, switch port"
