"""Does NCCL use the fast network at all? Settings that send everything through TCP although there is RDMA."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.network import active_ports, ports
from commopt.doctor.finding import Check, Finding

TRANSPORT = Check("transport", "RDMA instead of TCP")

LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "lib64", "usr/lib", "usr/local/lib")


def transport(machine: Machine) -> list[Finding]:
    """Look for what stands between NCCL and the RDMA devices that the kernel has."""
    read = "/sys/class/infiniband, NCCL_IB_DISABLE, NCCL_NET"
    present = ports(machine)
    found = []
    if (machine.variable("NCCL_NET") or "").upper() == "IB" and not present:
        expected = "unset: NCCL does not start, since there is no RDMA device"
        found.append(TRANSPORT.error("NCCL_NET", "IB", expected, "unset NCCL_NET"))
    if not present:
        return found or [TRANSPORT.ok(read, "no RDMA device", "TCP is all there is")]
    active = active_ports(machine)
    if active:
        found += _switched_off(machine) if any(not port.elastic for port in active) else _plugin(machine)
        if not machine.listing("dev/infiniband"):
            expected = "the device files: without them NCCL silently falls back to TCP"
            remedy = "docker run --device=/dev/infiniband ... (on the host: sudo modprobe ib_uverbs)"
            found.append(TRANSPORT.error("/dev/infiniband", machine.why_not("dev/infiniband"), expected, remedy))
        folders = [folder for folder in LIBRARIES if machine.exists(folder)]
        if folders and not any(_has_verbs(machine, folder) for folder in folders):
            value = "not in " + ", ".join(f"/{folder}" for folder in folders)
            expected = "installed: NCCL opens it to reach RDMA devices, and falls back to TCP without it"
            remedy = "sudo apt-get install libibverbs1 ibverbs-providers (or: sudo dnf install libibverbs)"
            found.append(TRANSPORT.warning("libibverbs.so.1", value, expected, remedy, "medium"))
    names = ", ".join(port.name for port in active)
    return found or [TRANSPORT.ok(read, f"active: {names or 'none'}", "nothing that switches RDMA off")]


def _switched_off(machine: Machine) -> list[Finding]:
    found = []
    disable = machine.variable("NCCL_IB_DISABLE")
    if disable not in (None, "0"):
        expected = "unset: RDMA devices are there and TCP is several times slower"
        found.append(TRANSPORT.error("NCCL_IB_DISABLE", disable, expected, "unset NCCL_IB_DISABLE"))
    if (machine.variable("NCCL_NET") or "").upper() == "SOCKET":
        expected = "unset: RDMA devices are there and TCP is several times slower"
        found.append(TRANSPORT.error("NCCL_NET", "Socket", expected, "unset NCCL_NET"))
    return found


def _plugin(machine: Machine) -> list[Finding]:
    """NCCL itself cannot use Amazon's adapters."""
    named = (machine.variable("LD_LIBRARY_PATH") or "").split(":")
    folders = [folder.strip("/") for folder in (*named, *LIBRARIES, "opt/amazon/ofi-nccl/lib", "opt/aws-ofi-nccl/lib")]
    folders += [f"opt/amazon/ofi-nccl/lib/{arch}-linux-gnu" for arch in ("x86_64", "aarch64")]
    if machine.variable("NCCL_NET_PLUGIN") or any(
        name.startswith("libnccl-net") for folder in folders if folder for name in machine.listing(folder)
    ):
        return []
    expected = "installed: without the plugin of EFA NCCL falls back to TCP"
    remedy = "install aws-ofi-nccl; export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:$LD_LIBRARY_PATH"
    return [TRANSPORT.warning("libnccl-net*.so", "not found", expected, remedy, "medium")]


def _has_verbs(machine: Machine, folder: str) -> bool:
    return any(name.startswith("libibverbs.so.1") for name in machine.listing(folder))
