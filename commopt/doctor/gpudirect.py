"""Between GPUs and adapters: GPUDirect RDMA, the distance limit, access control (ACS), IOMMU, PCIe links."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from commopt.doctor.finding import Finding, check, error, info, ok, unread, warning
from commopt.doctor.machine import Machine, before, version_text
from commopt.doctor.network import nearest_ports, switches_hidden
from commopt.doctor.settings import needs_gpudirect, through_own_cpu
from topology.model import Distance, PciDevice, PciLink
from topology.sysfs import GDR_FILES, read_slots

LOAD = "sudo modprobe nvidia-peermem && echo nvidia-peermem | sudo tee /etc/modules-load.d/nvidia-peermem.conf"
OFED = "sys/module/mlx_compat"
"""Of MLNX_OFED and DOCA: with the adapter's driver of most other kernels nvidia-peermem does not load."""
PEERMEM = GDR_FILES[0]
ACS_CAPABILITY = 0x000D
# Source validation, request and completion redirect, egress control: each can send peer transfers to the CPU.
ACS_BITS = 0b101101


@check("gdr-module", "GPUDirect RDMA", ", ".join(f"/{path}" for path in GDR_FILES), "nvidia-peermem, or DMA-BUF")
def module(machine: Machine) -> Iterator[Finding]:
    """Without the module and without DMA-BUF every message crosses the CPU's memory."""
    if not needs_gpudirect(machine):
        return
    loaded = [path for path in GDR_FILES if machine.exists(path)]
    lacking = _lacking_for_dmabuf(machine)
    if loaded == [PEERMEM] and before(machine.software.nccl, (2, 23)) and lacking:
        value = f"NCCL {version_text(machine.software.nccl)} does not look at /{PEERMEM}; DMA-BUF lacks {lacking[0][0]}"
        expected = "NCCL 2.23 or newer: data is copied through CPU memory, although the module is loaded"
        yield warning(value, expected, "pip install --upgrade torch", "medium")
    elif not loaded and lacking:
        value = f"no module, and DMA-BUF lacks {' and '.join(what for what, _ in lacking)}"
        expected = "one of them: data between GPUs and network is copied through CPU memory otherwise"
        get = "; ".join(how for _, how in lacking)
        remedy = LOAD if machine.exists(OFED) else f"{get}; or, with MLNX_OFED or DOCA: {LOAD}"
        # In a container the host's modules show as well; they are loaded on the host.
        yield error(value, expected, remedy + ("  # on the host" if machine.in_container else ""))


def _lacking_for_dmabuf(machine: Machine) -> list[tuple[str, str]]:
    """Return what DMA-BUF needs and this machine has not, and how to get it; an unknown CUDA counts as new enough."""
    driver = machine.text("proc/driver/nvidia/version") or ""
    kernel = re.match(r"(\d+)\.(\d+)", machine.text("proc/sys/kernel/osrelease") or "0.0")
    old = kernel is None or (int(kernel[1]), int(kernel[2])) < (5, 12)
    needs = (
        ("Open Kernel Module" in driver, "the open kernel driver", "sudo apt-get install nvidia-open"),
        (not old, "Linux 5.12", "a kernel of Linux 5.12 or newer"),
        (not before(machine.software.cuda, (11, 7)), "CUDA 11.7", "a torch for CUDA 11.7 or newer"),
        (machine.variable("NCCL_DMABUF_ENABLE") != "0", "NCCL_DMABUF_ENABLE", "unset NCCL_DMABUF_ENABLE"),
    )
    return [(what, how) for there, what, how in needs if not there]


@check("gdr-level", "GPUs near adapters", "paths between GPUs and adapters", "PXB or nearer")
def level(machine: Machine) -> Iterator[Finding]:
    """Compare NCCL's own limit with how far GPUs and adapters really are apart."""
    if not needs_gpudirect(machine):
        return
    if machine.variable("NCCL_NET_GDR_LEVEL") or machine.variable("NCCL_IB_GDR_LEVEL"):
        return  # see the table of settings
    own_cpu = through_own_cpu(machine)
    if switches_hidden(machine):
        yield ok("unset", "unset; how far apart they are is for the provider's topology file to say")
        return
    near = nearest_ports(machine)
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
    elif far:
        # Through some CPUs GPUDirect is faster than a copy, through others slower: only a trial tells.
        expected = "PXB or nearer: NCCL does not use GPUDirect RDMA across a CPU unless it is told to"
        yield info(shown, expected, "try: export NCCL_NET_GDR_LEVEL=PHB (or SYS)", "medium")
    elif not unknown:
        yield ok("unset", f"unset: NCCL goes directly up to {'P2C' if own_cpu else 'PXB'}")


@check(
    "acs", "PCIe access control (ACS)", "/sys/bus/pci/devices/*/config (ACS control of bridges)", "off on bare metal"
)
def acs(machine: Machine) -> Iterator[Finding]:
    """With ACS a switch sends transfers between two devices below it up to the CPU and down again."""
    devices = _direct_devices(machine)
    if len(devices) < 2 or machine.virtual:  # of a virtual machine the provider turns on address translation (ATS)
        return
    slots = read_slots(machine.root)
    bridges = _shared(slots[busid].above for busid in devices if busid in slots)
    configs = {bridge: machine.content(f"sys/bus/pci/devices/{bridge}/config") for bridge in bridges}
    on = [bridge for bridge, config in configs.items() if _acs_control(config) & ACS_BITS]
    # Without privileges the kernel shows the first 64 bytes only; the capabilities begin at 256.
    hidden = sum(len(config) <= 256 for config in configs.values())
    if on:
        expected = "off: GPUs and adapters below one switch exchange data through the CPU otherwise"
        remedy = f"for b in {' '.join(on)}; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done (for good: in the BIOS)"
        yield warning(f"on: {', '.join(on)}", expected, remedy)
    if hidden:
        remedy = "sudo lspci -vvv | grep ACSCtl (bad: SrcValid+)"
        yield unread(f"only root may read it ({hidden} of {len(bridges)} bridges)", remedy)


def _shared(paths: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the bridges with several devices below, and those under them: others part no two devices.

    paths: the bridges above each device, from the host bridge down.
    """
    paths = list(paths)
    count = Counter(bridge for path in paths for bridge in path)
    found = set()
    for path in paths:
        first = next((place for place, bridge in enumerate(path) if count[bridge] > 1), len(path))
        found |= set(path[first:])
    return sorted(found)


def _direct_devices(machine: Machine) -> list[str]:
    """Bus ids of GPUs, and of adapters with RDMA: what exchanges data without the CPU."""
    nics = {nic.busid for nic in machine.hardware.nics if not nic.virtual and nic.port is not None and nic.busid}
    gpus = [gpu.busid for gpu in machine.hardware.gpus if gpu.busid is not None]
    return gpus + (sorted(nics) if gpus else [])


def _acs_control(config: bytes) -> int:
    """Return the ACS control register, 0 when the device has none: walk the extended capabilities."""
    place, seen = 256, set()
    while 256 <= place <= len(config) - 8 and place not in seen:
        seen.add(place)
        header = int.from_bytes(config[place : place + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(config[place + 6 : place + 8], "little")
        place = header >> 20
    return 0


@check("iommu", "IOMMU", "/sys/kernel/iommu_groups/*/type, /proc/cmdline", "off, or passing through (identity)")
def iommu(machine: Machine) -> Iterator[Finding]:
    """An IOMMU that translates sends direct transfers through the CPU; one that passes through does not."""
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
        yield unread("no group names a GPU", "sudo dmesg | grep -i iommu")
    translated = sorted(busid for busid, kind in kinds.items() if kind != "identity")
    if not translated:
        return
    value = f"on, type {kinds[translated[0]]} for {', '.join(translated)}"
    remedy = f"""sudo sed -i 's/^GRUB_CMDLINE_LINUX="/&{through} /' /etc/default/grub && sudo update-grub"""
    remedy += f" (Red Hat: sudo grubby --update-kernel=ALL --args={through}); then reboot"
    if machine.coherent:  # peer transfers there go over NVLink, which the IOMMU does not touch
        yield warning(value, "identity: an IOMMU that translates costs each adapter bandwidth", remedy, "medium")
    else:
        expected = "identity on bare metal: through an IOMMU that translates, direct transfers are slow, hang, or "
        yield error(value, expected + "corrupt data in silence", remedy)


@check(
    "pcie-link", "PCIe links", "/sys/bus/pci/devices/*/{current,max}_link_{speed,width}", "as wide and fast as can be"
)
def links(machine: Machine) -> Iterator[Finding]:
    """A card that sits badly, or in a slot that is too small, comes up with fewer lanes or slower."""
    unknown, idle = [], []
    for device in machine.hardware.pci:
        now, best = device.link, device.link_max
        if device.kind not in ("gpu", "nic"):
            continue
        if now.width is None or best.width is None or now.gts is None or best.gts is None:
            unknown.append(device.busid)
            continue
        expected = f"{_link(best)}: bandwidth is {100 * (now.gbps or 0) / (best.gbps or 1):.0f} % of that"
        read, look = f"/sys/bus/pci/devices/{device.busid}", f"sudo lspci -vv -s {device.busid} | grep LnkSta"
        if now.width < best.width:
            # A single GPU exchanges data with nothing but the CPU; laptops have half the lanes by design.
            alone = device.kind == "gpu" and len(_direct_devices(machine)) < 2
            remedy = f"reseat the card, or move it to a wider slot; {look}"
            yield (info if alone else warning)(f"{_link(now)} ({device.kind})", expected, remedy, read=read)
        elif now.gts < best.gts and device.kind == "gpu":
            idle.append(f"{device.busid} {_link(now)} of {_link(best)}")
        elif now.gts < best.gts and (now.gbps or 0) < _carried_gbps(machine, device):
            yield warning(_link(now), expected, f"BIOS: PCIe generation of the slot; {look}", "medium", read)
    if idle:
        expected = "full speed under load; GPUs slow their link down when idle"
        yield info(", ".join(idle), expected, "nvidia-smi -q -d PCIE, while the GPUs work", "low")
    if unknown:
        shown = f"not stated for {', '.join(unknown)} (normal in virtual machines)"
        yield unread(shown, "sudo lspci -vv | grep LnkSta")


def _carried_gbps(machine: Machine, device: PciDevice) -> float:
    """Return what the ports of an adapter can send together: a slot that is faster is fast enough."""
    speeds = [nic.speed_gbps for nic in machine.hardware.nics if nic.busid == device.busid and not nic.virtual]
    return sum(speed or float("inf") for speed in speeds) if speeds else float("inf")


def _link(link: PciLink) -> str:
    return f"{link.gts:g} GT/s x{link.width}"
