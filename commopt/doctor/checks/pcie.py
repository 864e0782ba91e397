"""PCIe: are direct transfers sent through the CPU (ACS, IOMMU), do links run at full width, is a NIC near each GPU?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.nearness import nearest_ports
from commopt.doctor.facts.network import active_ports
from commopt.doctor.facts.surroundings import arm, coherent, virtual_machine
from commopt.doctor.finding import Check, Finding
from topology.model import Distance, PciDevice, PciLink
from topology.sysfs import read_slots

ACS = Check("acs", "PCIe access control (ACS)")
IOMMU = Check("iommu", "IOMMU")
LINKS = Check("pcie-link", "PCIe links")
AFFINITY = Check("gpu-nic", "GPUs near network adapters")

ACS_CAPABILITY = 0x000D
# Source validation, request and completion redirect, egress control: each can send peer transfers to the CPU.
ACS_BITS = 0b101101


def acs(machine: Machine) -> list[Finding]:
    """With ACS a switch sends transfers between two devices below it up to the CPU and down again."""
    read = "/sys/bus/pci/devices/*/config (ACS control of bridges)"
    devices = _of_interest(machine)
    if len(devices) < 2:
        return [ACS.ok(read, "not needed", "two devices that exchange data directly")]
    if virtual_machine(machine):
        return [ACS.ok(read, "virtual machine", "not visible here; the provider turns on address translation (ATS)")]
    slots = read_slots(machine.root)
    bridges = _shared(slots[busid].above for busid in devices if busid in slots)
    # Without privileges the kernel shows the first 64 bytes only; the capabilities begin at 256.
    configs = {bridge: machine.content(f"sys/bus/pci/devices/{bridge}/config") for bridge in bridges}
    hidden = [bridge for bridge, config in configs.items() if len(config) <= 256]
    on = [bridge for bridge, config in configs.items() if (_acs_control(config) or 0) & ACS_BITS]
    found = []
    if on:
        expected = "off on bare metal: GPUs and adapters below one switch exchange data through the CPU otherwise"
        remedy = f"for b in {' '.join(on)}; do sudo setpci -s $b ECAP_ACS+0x6.w=0000; done (for good: in the BIOS)"
        found.append(ACS.warning(read, f"on: {', '.join(on)}", expected, remedy))
    if hidden:
        remedy = "sudo lspci -vvv | grep ACSCtl (bad: SrcValid+)"
        found.append(ACS.unread(read, f"only root may read it ({len(hidden)} of {len(bridges)} bridges)", remedy))
    return found or [ACS.ok(read, f"off on {len(bridges)} bridges", "off")]


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


def _of_interest(machine: Machine) -> list[str]:
    """Bus ids of GPUs, and of adapters with RDMA: what exchanges data without the CPU."""
    rdma = {nic.busid for nic in machine.hardware.nics if not nic.virtual and nic.port is not None}
    gpus = [gpu.busid for gpu in machine.hardware.gpus if gpu.busid is not None]
    return gpus + [busid for busid in sorted(busid for busid in rdma if busid) if gpus]


def _acs_control(config: bytes) -> int | None:
    """Return the ACS control register, None when the device has none: walk the extended capabilities."""
    place, seen = 256, set()
    while 256 <= place <= len(config) - 8 and place not in seen:
        seen.add(place)
        header = int.from_bytes(config[place : place + 4], "little")
        if header & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(config[place + 6 : place + 8], "little")
        place = header >> 20
    return None


def iommu(machine: Machine) -> list[Finding]:
    """An IOMMU that translates sends direct transfers through the CPU; one that passes through does not."""
    read = "/sys/kernel/iommu_groups/*/type, /proc/cmdline"
    gpus = {gpu.busid for gpu in machine.hardware.gpus}
    if len(_of_interest(machine)) < 2:
        return [IOMMU.ok(read, "not needed", "two devices that exchange data directly")]
    if virtual_machine(machine):
        return [IOMMU.ok(read, "virtual machine", "up to the provider")]
    if not machine.listing("sys/class/iommu"):
        return [IOMMU.ok("/sys/class/iommu", "off", "off, or passing through")]
    through = "iommu.passthrough=1" if arm(machine) else "iommu=pt"
    kinds: dict[str, str] = {}
    for group in machine.listing("sys/kernel/iommu_groups"):
        inside = set(machine.listing(f"sys/kernel/iommu_groups/{group}/devices"))
        kind = machine.text(f"sys/kernel/iommu_groups/{group}/type")
        kinds |= {busid: kind for busid in inside & {gpu for gpu in gpus if gpu} if kind}
    if not kinds:
        line = machine.text("proc/cmdline") or ""
        if said := {through, "iommu.passthrough=1"}.intersection(line.split()):
            return [IOMMU.ok("/proc/cmdline", ", ".join(said), "off, or passing through")]
        return [IOMMU.unread("/sys/kernel/iommu_groups/*/type", "no group names a GPU", "sudo dmesg | grep -i iommu")]
    translated = sorted(busid for busid, kind in kinds.items() if kind != "identity")
    if not translated:
        return [IOMMU.ok(read, "identity", "off, or passing through")]
    value = f"on, type {kinds[translated[0]]} for {', '.join(translated)}"
    remedy = f"""sudo sed -i 's/^GRUB_CMDLINE_LINUX="/&{through} /' /etc/default/grub && sudo update-grub"""
    remedy += f" (Red Hat: sudo grubby --update-kernel=ALL --args={through}); then reboot"
    if coherent(machine):  # peer transfers there go over NVLink, which the IOMMU does not touch
        expected = "identity: an IOMMU that translates costs each adapter bandwidth"
        return [IOMMU.warning(read, value, expected, remedy, "medium")]
    expected = "identity on bare metal: CUDA does not support direct transfers through an IOMMU that translates. "
    expected += "They are slow, hang, or corrupt data in silence"
    return [IOMMU.error(read, value, expected, remedy)]


def links(machine: Machine) -> list[Finding]:
    """A card that sits badly, or in a slot that is too small, comes up with fewer lanes or slower."""
    read = "/sys/bus/pci/devices/*/{current,max}_link_{speed,width}"
    devices = [device for device in machine.hardware.pci if device.kind in ("gpu", "nic")]
    if not devices:
        return [LINKS.ok(read, "no GPU or network adapter on PCIe", "nothing to check")]
    found, unknown, idle = [], [], []
    # A single GPU exchanges data with nothing but the CPU; laptops have half the lanes by design.
    narrow = LINKS.warning if len(_of_interest(machine)) > 1 else LINKS.info
    for device in devices:
        now, best = device.link, device.link_max
        if now.width is None or best.width is None or now.gts is None or best.gts is None:
            unknown.append(device.busid)
        elif now.width < best.width:
            expected = f"{_link(best)}: bandwidth is {_share(now, best)} of that"
            remedy = f"reseat the card, or move it to a wider slot; sudo lspci -vv -s {device.busid} | grep LnkSta"
            kind = LINKS.warning if device.kind == "nic" else narrow
            found.append(kind(_place(device), f"{_link(now)} ({device.kind})", expected, remedy))
        elif now.gts < best.gts and device.kind == "nic":
            if (now.gbps or 0) >= (_carried_gbps(machine, device) or float("inf")):
                continue  # an older slot, still faster than the network
            expected = f"{_link(best)}: bandwidth is {_share(now, best)} of that"
            remedy = f"BIOS: PCIe generation of the slot; sudo lspci -vv -s {device.busid} | grep LnkSta"
            found.append(LINKS.warning(_place(device), _link(now), expected, remedy, "medium"))
        elif now.gts < best.gts:
            idle.append(f"{device.busid} {_link(now)} of {_link(best)}")
    if idle:
        expected = "full speed under load; GPUs slow their link down when idle"
        remedy = "nvidia-smi -q -d PCIE, while the GPUs work"
        found.append(LINKS.info(read, ", ".join(idle), expected, remedy, "low"))
    if unknown:
        shown = f"not stated for {', '.join(unknown)} (normal in virtual machines)"
        found.append(LINKS.unread(read, shown, "sudo lspci -vv | grep LnkSta"))
    return found or [LINKS.ok(read, f"{len(devices)} devices at their best", "as wide and fast as the device can")]


def _place(device: PciDevice) -> str:
    return f"/sys/bus/pci/devices/{device.busid}/current_link_*"


def _carried_gbps(machine: Machine, device: PciDevice) -> float | None:
    """Return what the ports of an adapter can send together; None where one does not say."""
    speeds = [nic.speed_gbps for nic in machine.hardware.nics if nic.busid == device.busid and not nic.virtual]
    return sum(speed or 0 for speed in speeds) if speeds and None not in speeds else None


def _link(link: PciLink) -> str:
    return f"{link.gts:g} GT/s x{link.width}"


def _share(now: PciLink, best: PciLink) -> str:
    return f"{100 * (now.gbps or 0) / (best.gbps or 1):.0f} %"


def gpu_nic(machine: Machine) -> list[Finding]:
    """A GPU whose nearest adapter hangs on another processor sends everything across the link between them."""
    read = f"{machine.topology.source}: paths between GPUs and adapters"
    if not machine.topology.gpus or not active_ports(machine):
        return [AFFINITY.ok(read, "not needed", "GPUs and an active RDMA port, which this machine does not have")]
    nearest = nearest_ports(machine)
    far = [near.gpu for near in nearest if near.distance is Distance.SYS]
    unknown = [near.gpu for near in nearest if near.distance is None]
    found = []
    if far:
        expected = "an adapter on the GPU's own processor"
        remedy = "python -m topology; unset NCCL_PXN_DISABLE (GPUs near an adapter then send for others); "
        remedy += "or move an adapter"
        found.append(AFFINITY.warning(read, f"SYS for {', '.join(far)}", expected, remedy, "medium"))
    if unknown:
        found.append(AFFINITY.unread(read, f"no path known for {', '.join(unknown)}", "nvidia-smi topo -m"))
    return found or [AFFINITY.ok(read, "every GPU has an adapter on its processor", "NODE or nearer")]
