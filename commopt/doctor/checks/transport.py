"""Does NCCL use the fast network at all? Settings that send everything through TCP although there is RDMA."""

from __future__ import annotations

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.network import active_ports, ports
from commopt.doctor.finding import Check, Finding

TRANSPORT = Check("transport", "RDMA instead of TCP")

TCP_IS_SLOW = "unset: RDMA devices are there and TCP is several times slower"
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
        found += _switched_off(machine)
        found += _plugin(machine) if all(port.elastic for port in active) else []
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
    elastic = all(port.elastic for port in active_ports(machine))
    if disable not in (None, "0") and not elastic:  # of EFA the plugin decides
        found.append(TRANSPORT.error("NCCL_IB_DISABLE", disable, TCP_IS_SLOW, "unset NCCL_IB_DISABLE"))
    if (machine.variable("NCCL_NET") or "").upper() == "SOCKET":
        found.append(TRANSPORT.error("NCCL_NET", "Socket", TCP_IS_SLOW, "unset NCCL_NET"))
    return found


def _plugin(machine: Machine) -> list[Finding]:
    """NCCL itself cannot use Amazon's adapters: look for the plugin, and for what keeps it from RDMA."""
    found = []
    if (machine.variable("NCCL_NET") or "").upper() == "IB":
        expected = "unset: NCCL's own InfiniBand transport does not know these adapters, and NCCL does not start"
        found.append(TRANSPORT.error("NCCL_NET", "IB", expected, "unset NCCL_NET"))
    libfabric = machine.variable("FI_PROVIDER")
    if libfabric is not None and ("efa" in libfabric.lower()) == libfabric.startswith("^"):
        expected = "efa, or unset: libfabric goes over TCP otherwise"
        found.append(TRANSPORT.error("FI_PROVIDER", libfabric, expected, "unset FI_PROVIDER"))
    if machine.variable("FI_EFA_USE_DEVICE_RDMA") == "0":
        expected = "unset: without RDMA in the adapter every message is copied (only the first generation has none)"
        remedy = "unset FI_EFA_USE_DEVICE_RDMA"
        found.append(TRANSPORT.warning("FI_EFA_USE_DEVICE_RDMA", "0", expected, remedy, "medium"))
    plugin = machine.variable("NCCL_NET_PLUGIN")
    if plugin is not None and plugin.lower() == "none":
        expected = "unset: without the plugin of EFA NCCL falls back to TCP"
        found.append(TRANSPORT.error("NCCL_NET_PLUGIN", plugin, expected, "unset NCCL_NET_PLUGIN"))
    elif not _has_plugin(machine, plugin):
        expected = "installed: without the plugin of EFA NCCL falls back to TCP"
        remedy = "install aws-ofi-nccl; export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:$LD_LIBRARY_PATH"
        found.append(
            TRANSPORT.warning("libnccl-net*.so", f"not found: {plugin or 'unset'}", expected, remedy, "medium")
        )
    return found


def _has_plugin(machine: Machine, value: str | None) -> bool:
    """Whether a library is where the loader looks; `value`: NCCL_NET_PLUGIN, a list of names, files or endings."""
    wanted = [name.strip() for name in (value or "libnccl-net").split(",") if name.strip()]
    cache = machine.content("etc/ld.so.cache")
    named = (machine.variable("LD_LIBRARY_PATH") or "").split(":")
    folders = [folder.strip("/") for folder in (*named, *LIBRARIES, "opt/amazon/ofi-nccl/lib", "opt/aws-ofi-nccl/lib")]
    folders += [f"opt/amazon/ofi-nccl/lib/{arch}-linux-gnu" for arch in ("x86_64", "aarch64")]
    there = [name for folder in folders if folder for name in machine.listing(folder)]
    return any(
        machine.exists(name.lstrip("/"))
        if "/" in name
        else any(file.startswith((name, f"libnccl-net-{name}")) for file in there) or name.encode() in cache
        for name in wanted
    )


def _has_verbs(machine: Machine, folder: str) -> bool:
    return any(name.startswith("libibverbs.so.1") for name in machine.listing(folder))
