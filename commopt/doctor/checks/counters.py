"""Error counters: two readings, because only growth says that something is wrong now."""

from __future__ import annotations

from collections.abc import Mapping

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.network import candidates, ports
from commopt.doctor.finding import Check, Finding

COUNTERS = Check("counters", "Error counters")

LINK = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors")
DISCARDS = ("port_xmit_discards", "excessive_buffer_overrun_errors")
TRAFFIC = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "out_of_buffer")
# Notices of congestion (CNP), marked packets, waits for credit: normal now and then, many of them are a busy network.
CONGESTION = ("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets")
WAITS = ("port_xmit_wait",)
ETHERNET = ("rx_crc_errors", "rx_missed_errors", "rx_fifo_errors", "tx_carrier_errors")


def read_counters(machine: Machine) -> Mapping[str, int]:
    """Return the error counters of every RDMA port and of the interfaces to other nodes, by path."""
    paths = [f"{port.path}/counters/{name}" for port in ports(machine) for name in LINK + DISCARDS + WAITS]
    paths += [f"{port.path}/hw_counters/{name}" for port in ports(machine) for name in TRAFFIC + CONGESTION]
    paths += [
        f"sys/class/net/{interface.name}/statistics/{name}" for interface in candidates(machine) for name in ETHERNET
    ]
    values = {path: machine.number(path) for path in paths}
    return {path: value for path, value in values.items() if value is not None}


def counters(machine: Machine) -> list[Finding]:
    """Compare the counters with what they were when the machine was first looked at."""
    now = read_counters(machine)
    read = "/sys/class/infiniband/*/ports/*/{counters,hw_counters}, /sys/class/net/*/statistics"
    if not now:
        return [COUNTERS.unread(read, "no port has counters that this user can read", "ethtool -S INTERFACE")]
    layers = {port.device: port.link_layer for port in ports(machine)}
    found = []
    for path, value in now.items():
        grown = value - machine.counters.get(path, value)
        if grown <= 0:
            continue
        device, name = path.split("/")[3], path.rsplit("/", 1)[1]
        told = f"+{grown} while the doctor looked (now {value})"
        if name in CONGESTION + WAITS:
            expected = "few, also under load: the network makes senders wait"
            remedy = "look for a slow link or many senders to one port; the same counters on the switches"
            found.append(COUNTERS.info(f"/{path}", told, expected, remedy, "low"))
            continue
        expected = "no growth: errors now, every one costs a retransmission"
        found.append(COUNTERS.error(f"/{path}", told, expected, _remedy(device, name, layers.get(device))))
    if found:
        return found
    old = {path: value for path, value in now.items() if value and not path.endswith(CONGESTION + WAITS)}
    if old:
        shown = ", ".join(
            f"{_short(path)} {value}" for path, value in sorted(old.items(), key=lambda item: -item[1])[:4]
        )
        expected = "0; these did not grow now, so run the doctor again during training"
        return [COUNTERS.info(read, shown, expected, "python -m commopt doctor, while the job runs", "low")]
    return [COUNTERS.ok(read, f"{len(now)} counters, no errors", "0")]


def _remedy(device: str, name: str, layer: str | None) -> str:
    if name in TRAFFIC + DISCARDS and layer == "Ethernet":
        return (
            "export NCCL_IB_TC to the class that PFC and ECN protect (mlnx_qos -i INTERFACE, and the switches); "
            "ethtool -S INTERFACE | grep -E 'pause|discard'"
        )
    if name in TRAFFIC + DISCARDS:
        return "sudo ibdiagnet (errors and congestion on the way); perfquery -x on both ends"
    if name in ("rx_missed_errors", "rx_fifo_errors"):
        return f"sudo ethtool -g {device}; sudo ethtool -G {device} rx 8192 (at most its maximum)"
    if name in ETHERNET:
        return f"sudo ethtool -m {device}; then cable, module, switch port"
    return f"sudo mlxlink -d {device} -c; then cable, module, switch port"


def _short(path: str) -> str:
    """Name the device and the counter: "mlx5_0 symbol_error"."""
    parts = path.split("/")
    return f"{parts[3]} {parts[-1]}"
