# SPDX-License-Identifier: Apache-2.0
"""Between GPUs and adapters: GPUDirect RDMA, the distance limit, access control (ACS), IOMMU, PCIe links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from commopt.doctor.finding import Finding, Unread, check, error, info, ok, unread, warning
from commopt.doctor.machine import REAL, Machine
from commopt.doctor.network import nearest_ports, switches_hidden
from commopt.doctor.settings import needs_gpudirect, through_own_cpu
from topology.model import Distance, PciDevice, PciLink
from topology.sysfs import GDR_FILES, read_slots
from topology.text import is_narrow

LOAD = "sudo modprobe nvidia-peermem && echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf"
OFED = "sys/module/mlx_compat"
"""Present with MLNX_OFED and DOCA: with most other drivers of the adapter nvidia-peermem does not load."""
ACS_CAPABILITY = 0x000D
# Source validation, request and completion redirect, egress control: each can send peer transfers to the CPU.
ACS_BITS = 0b101101


@check(", ".join(f"/{path}" for path in GDR_FILES), needs=((needs_gpudirect, "no GPU together with an RDMA adapter"),))
def gdr_module(machine: Machine) -> Iterator[Finding]:
    """GPUDirect RDMA: nvidia-peermem, or DMA-BUF; data is copied through CPU memory otherwise."""
    if not needs_gpudirect(machine) or any(map(machine.exists, GDR_FILES)):
        return
    driver = machine.text("proc/driver/nvidia/version") or ""
    kernel = re.match(r"(\d+)\.(\d+)", machine.text("proc/sys/kernel/osrelease") or "")
    needs = (
        ("Open Kernel Module" in driver, "the open kernel driver", "sudo apt-get install nvidia-open"),
        (kernel and (int(kernel[1]), int(kernel[2])) >= (5, 12), "Linux 5.12", "a kernel of Linux 5.12 or newer"),
        (machine.variable("NCCL_DMABUF_ENABLE") != "0", "NCCL_DMABUF_ENABLE", "unset NCCL_DMABUF_ENABLE"),
    )
    lacking = [(name, fix) for present, name, fix in needs if not present]
    if lacking:
        value = f"no module, and DMA-BUF lacks {' and '.join(name for name, _ in lacking)}"
        get = "; ".join(fix for _, fix in lacking)
        remedy = LOAD if machine.exists(OFED) else f"{get}; or, with MLNX_OFED or DOCA: {LOAD}"
        # A container shows the host's modules too. They are loaded on the host.
        yield error(value, remedy=remedy + ("  # on the host" if machine.in_container else ""))


@check("paths between GPUs and adapters", needs=((needs_gpudirect, "no GPU together with an RDMA adapter"),))
def gdr_level(machine: Machine) -> Iterator[Finding]:
    """GPUs near adapters: PXB or nearer; by default NCCL does not use GPUDirect RDMA across a CPU."""
    if not needs_gpudirect(machine):
        return
    if machine.variable("NCCL_NET_GDR_LEVEL") or machine.variable("NCCL_IB_GDR_LEVEL"):
        return  # covered by the table of settings
    if switches_hidden(machine):
        yield ok("unset", "unset; the provider's topology file has the distances")
        return
    own_cpu, near = through_own_cpu(machine), nearest_ports(machine)
    unknown = [gpu for gpu, distance, _ in near if distance is None]
    if unknown:
        yield unread(f"no path known for {', '.join(unknown)}", "nvidia-smi topo -m")
    limit = Distance.NODE if own_cpu else Distance.PXB
    far = [(one, f"{gpu}-{nics} {one.value}") for gpu, one, nics in near if one is not None and one.rank > limit.rank]
    shown = "; ".join(text for _, text in far)
    if any(distance is Distance.SYS for distance, _ in far):
        expected = "an adapter on the GPU's own processor: data crosses the link between processors"
        remedy = "python -m topology; unset NCCL_PXN_DISABLE (GPUs near an adapter then send for others)"
        yield warning(shown, expected, f"{remedy}; or move an adapter", "medium")
    elif far:  # GPUDirect through a CPU can be faster or slower than a copy: only a trial shows it
        yield info(shown, remedy="try: export NCCL_NET_GDR_LEVEL=PHB (or SYS)", confidence="medium")
    elif not unknown:
        yield ok("unset", f"unset: NCCL goes directly up to {'P2C' if own_cpu else 'PXB'}")


def _direct(machine: Machine) -> bool:
    return len(_direct_devices(machine)) > 1


def _devices(machine: Machine) -> bool:
    return any(device.kind in ("gpu", "nic") for device in machine.hardware.pci)


@check(
    "/sys/bus/pci/devices/*/config (ACS control of bridges)",
    needs=((_direct, "no two devices that exchange data directly"), REAL),
)
def acs(machine: Machine) -> Iterator[Finding]:
    """PCIe access control (ACS): off on bare metal; devices below one switch exchange through the CPU otherwise."""
    devices = _direct_devices(machine)
    if len(devices) < 2 or machine.virtual:  # on virtual machines the provider enables address translation (ATS)
        return
    slots = read_slots(machine.root)
    bridges = _common_bridges([slots[busid].above for busid in devices if busid in slots])
    configs = {bridge: machine.content(f"sys/bus/pci/devices/{bridge}/config") for bridge in bridges}
    on = [bridge for bridge, config in configs.items() if _acs_control(config) & ACS_BITS]
    # Without privileges the kernel shows only the first 64 bytes; the extended capabilities begin at 256.
    hidden = sum(len(config) <= 256 for config in configs.values())
    if on:
        remedy = f"for b in {' '.join(on)}; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done (for good: in the BIOS)"
        yield warning(f"on: {', '.join(on)}", remedy=remedy)
    if hidden:
        remedy = "sudo lspci -vvv | grep ACSCtl (bad: SrcValid+)"
        yield unread(f"only root may read it ({hidden} of {len(bridges)} bridges)", remedy)


def _common_bridges(paths: list[tuple[str, ...]]) -> list[str]:
    """Return the bridges between any two devices: those with several devices below, and the bridges under them.

    paths: the bridges above each device, from the host bridge down.
    """
    count = Counter(bridge for path in paths for bridge in path)
    found = set()
    for path in paths:
        first = next((place for place, bridge in enumerate(path) if count[bridge] > 1), len(path))
        found |= set(path[first:])
    return sorted(found)


def _direct_devices(machine: Machine) -> list[str]:
    """Return the bus ids of GPUs and RDMA adapters, which exchange data without the CPU."""
    nics = {nic.busid for nic in machine.hardware.nics if not nic.virtual and nic.port is not None and nic.busid}
    gpus = [gpu.busid for gpu in machine.hardware.gpus if gpu.busid is not None]
    return gpus + (sorted(nics) if gpus else [])


def _acs_control(config: bytes) -> int:
    """Return the ACS control register from the extended capabilities; 0 if the device has none."""
    place, seen = 256, set()
    while 256 <= place <= len(config) - 8 and place not in seen:
        seen.add(place)
        header = int.from_bytes(config[place : place + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(config[place + 6 : place + 8], "little")
        place = header >> 20
    return 0


@check(
    "/sys/kernel/iommu_groups/*/type, /proc/cmdline",
    needs=((_direct, "no two devices that exchange data directly"), REAL),
)
def iommu(machine: Machine) -> Iterator[Finding]:
    """IOMMU: off, or passing through (identity); direct transfers are slow, hang or corrupt data otherwise."""
    if len(_direct_devices(machine)) < 2 or machine.virtual or not machine.listing("sys/class/iommu"):
        return
    arm = any(cpu.arch == "arm64" for cpu in machine.hardware.cpus)
    through = "iommu.passthrough=1" if arm else "iommu=pt"
    kinds: dict[str, str] = {}
    for group in machine.listing("sys/kernel/iommu_groups"):
        inside = machine.listing(f"sys/kernel/iommu_groups/{group}/devices")
        kind = machine.text(f"sys/kernel/iommu_groups/{group}/type")
        kinds |= {gpu.busid: kind for gpu in machine.hardware.gpus if gpu.busid in inside and gpu.busid and kind}
    if not kinds and not {through, "iommu.passthrough=1"}.intersection((machine.text("proc/cmdline") or "").split()):
        raise Unread("no group names a GPU", "sudo dmesg | grep -i iommu")
    translated = sorted(busid for busid, kind in kinds.items() if kind != "identity")
    if translated:
        value = f"on, type {kinds[translated[0]]} for {', '.join(translated)}"
        remedy = f"""sudo sed -i 's/^GRUB_CMDLINE_LINUX="/&{through} /' /etc/default/grub && sudo update-grub"""
        remedy += f" (Red Hat: sudo grubby --update-kernel=ALL --args={through}); then reboot"
        if machine.coherent:  # there peer transfers use NVLink, without the IOMMU
            yield warning(value, "identity: one that translates costs each adapter bandwidth", remedy, "medium")
        else:
            yield error(value, remedy=remedy)


@check("/sys/bus/pci/devices/*/{current,max}_link_{speed,width}", needs=((_devices, "no GPU or network card on PCIe"),))
def pcie_link(machine: Machine) -> Iterator[Finding]:
    """PCIe links: as wide and fast as device and slot can be."""
    unknown, idle = [], []
    for device in machine.hardware.pci:
        now, best = device.link, device.link_max
        if device.kind not in ("gpu", "nic"):
            continue
        if None in (now.width, best.width, now.gts, best.gts):
            unknown.append(device.busid)
            continue
        share = (now.gbps or 0) / (best.gbps or 1)
        expected = f"{_link(best)}: bandwidth is {100 * share:.0f} % of that"
        read, look = f"/sys/bus/pci/devices/{device.busid}", f"sudo lspci -vv -s {device.busid} | grep LnkSta"
        if is_narrow(device):
            # A single GPU exchanges data with the CPU only; laptops have half the lanes by design.
            alone = device.kind == "gpu" and len(_direct_devices(machine)) < 2
            remedy = f"reseat the card, or move it to a wider slot; {look}"
            yield (info if alone else warning)(f"{_link(now)} ({device.kind})", expected, remedy, read=read)
        elif share < 1 and device.kind == "gpu":
            idle.append(f"{device.busid} {_link(now)} of {_link(best)}")
        elif share < 1 and (now.gbps or 0) < _carried_gbps(machine, device):
            yield warning(_link(now), expected, f"BIOS: PCIe generation of the slot; {look}", "medium", read)
    if idle:
        expected = "full speed under load; GPUs slow their link down when idle"
        yield info(", ".join(idle), expected, "nvidia-smi -q -d PCIE, while the GPUs work", "low")
    if unknown:
        yield unread(
            f"not stated for {', '.join(unknown)} (normal in virtual machines)", "sudo lspci -vv | grep LnkSta"
        )


def _carried_gbps(machine: Machine, device: PciDevice) -> float:
    """Return the sum of the speeds of an adapter's ports, which its slot must reach."""
    speeds = [nic.speed_gbps for nic in machine.hardware.nics if nic.busid == device.busid and not nic.virtual]
    return sum(speed or float("inf") for speed in speeds) if speeds else float("inf")


def _link(link: PciLink) -> str:
    return f"{link.gts:g} GT/s x{link.width}"
