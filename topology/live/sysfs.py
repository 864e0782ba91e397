"""The live machine, or a copy of its files: GPUs, network cards, NUMA nodes and the PCI tree from /sys and /proc."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Literal

from topology.kernel_files import cpu_list, fields, names, text
from topology.live.pci_slots import Slot, read_slots, slot_distance
from topology.live.sysfs_nics import read_nics
from topology.model import Cpu, Distance, Gpu, Nic, PciDevice, Topology
from topology.pci_class import device_kind

_Kind = Literal["switch", "gpu", "nic", "nvswitch", "other"]
_NVIDIA = 0x10DE
_CARD_CLASSES = (0x0200, 0x0207)  # Ethernet, InfiniBand
_VENDORS = {"0x41": "ARM", "0x48": "HiSilicon", "0x4e": "NVIDIA"}  # "CPU implementer" of /proc/cpuinfo


def read_sysfs(root: Path = Path("/")) -> Topology:
    """Read the machine whose files lie below `root`. Raises nothing: what is missing is None, or a warning.

    GPUs are in the order of their bus ids, as NVIDIA's driver numbers them. NVLinks and compute capability are not in
    these files (topology.nvml has them).
    """
    slots = read_slots(root)
    nics, nic_warnings = read_nics(root, slots)
    kinds: dict[str, _Kind] = {nic.busid: "nic" for nic in nics if nic.busid in slots and nic.busid is not None}
    kinds |= {busid: kind for busid, slot in slots.items() if (kind := _nvidia_kind(slot))}
    gpus = [slot for slot in slots.values() if kinds.get(slot.busid) == "gpu"]
    cpus = _cpus(root, {slots[busid].numa for busid in kinds})
    return Topology(
        source="this machine" if root == Path("/") else f"files below {root}",
        gpus=tuple(_gpu(root, place, slot) for place, slot in enumerate(gpus)),
        nics=nics,
        cpus=cpus,
        pci=_tree(slots, kinds, cpus),
        stated=_stated([slot.busid for slot in gpus], nics, slots, one_node=len(cpus) == 1),
        warnings=(*_warnings(root, slots, kinds), *nic_warnings),
    )


def _nvidia_kind(slot: Slot) -> _Kind | None:
    """Graphics chips of others (a server's VGA) are no GPUs here."""
    kind = device_kind(slot.pci_class, slot.vendor, ()) if slot.vendor == _NVIDIA else "other"
    return kind if kind in ("gpu", "nvswitch") else None


def _gpu(root: Path, place: int, slot: Slot) -> Gpu:
    driver = fields(text(root / "proc/driver/nvidia/gpus" / slot.busid / "information"))
    return Gpu(
        index=place,
        busid=slot.busid,
        numa=slot.numa,
        name=driver.get("Model"),
        uuid=driver.get("GPU UUID"),
        affinity=text(slot.folder / "local_cpulist"),
    )


def _cpus(root: Path, of_devices: set[int | None]) -> tuple[Cpu, ...]:
    """The NUMA nodes that have CPUs or devices, then one of unknown number for devices that do not say theirs.

    With one node there is no doubt where a device is that does not say so.
    """
    info = fields(text(root / "proc/cpuinfo"))
    nodes = root / "sys/devices/system/node"
    numbers = [int(name[4:]) for name in names(nodes) if name.startswith("node") and name[4:].isdecimal()]
    affinities = {numa: cpu_list(text(nodes / f"node{numa}/cpulist")) for numa in numbers}
    known = {numa for numa, affinity in affinities.items() if affinity} | {
        numa for numa in of_devices if numa is not None
    }
    found: list[int | None] = [*sorted(known)]
    if not found or (None in of_devices and len(found) > 1):
        found.append(None)
    implementer = info.get("CPU implementer")
    return tuple(
        Cpu(
            numa=numa,
            arch=_arch(info),
            vendor=info.get("vendor_id") or _VENDORS.get(implementer or "", implementer),
            affinity=affinities.get(numa) if numa is not None else None,
            family=_whole(info.get("cpu family")),
            model=_whole(info.get("model")),
        )
        for numa in found
    )


def _arch(info: dict[str, str]) -> str | None:
    if "vendor_id" in info:
        return "x86_64"
    if "CPU implementer" in info:
        return "arm64"
    return "ppc64" if info.get("cpu", "").startswith("POWER") else None


def _whole(value: str | None) -> int | None:
    return int(value) if value and value.isdecimal() else None


def _tree(slots: dict[str, Slot], kinds: dict[str, _Kind], cpus: tuple[Cpu, ...]) -> tuple[PciDevice, ...]:
    """The devices of interest and the switches above them."""
    numas = [cpu.numa for cpu in cpus]
    tree: dict[str, PciDevice] = {}
    for busid in (busid for busid in slots if busid in kinds):
        chain = (*reversed(slots[busid].switches), busid)
        # With one node there is no doubt where a device is; below one switch all are on the node of the first.
        cpu = tree[chain[0]].cpu if chain[0] in tree else 0 if len(cpus) == 1 else numas.index(slots[busid].numa)
        for parent, place in zip((None, *chain), chain, strict=False):
            slot = slots[place]
            tree.setdefault(
                place,
                PciDevice(
                    busid=place,
                    kind=kinds.get(place, "switch"),
                    parent=parent,
                    cpu=cpu,
                    pci_class=slot.pci_class,
                    vendor=slot.vendor,
                    device=slot.device,
                    link=slot.link("current"),
                    link_max=slot.link("max"),
                ),
            )
    return tuple(tree.values())


def _stated(
    gpus: list[str], nics: tuple[Nic, ...], slots: dict[str, Slot], one_node: bool
) -> tuple[tuple[str, str, Distance], ...]:
    """Distances that tell PHB from NODE, which the tree of the model cannot."""
    places = {f"GPU{place}": slots[busid] for place, busid in enumerate(gpus)}
    places |= {f"NIC{place}": slots[nic.busid] for place, nic in enumerate(nics) if nic.busid in slots}
    return tuple(
        (a, b, distance)
        for a, b in combinations(places, 2)
        if (distance := slot_distance(places[a], places[b], one_node)) is not None
    )


def _warnings(root: Path, slots: dict[str, Slot], kinds: dict[str, _Kind]) -> list[str]:
    found = []
    if not slots:
        found.append(f"no PCI device below {root / 'sys/bus/pci/devices'}: a container or a system without PCI")
    if "gpu" not in kinds.values():
        found.append("no NVIDIA GPU found")
    if any(slots[busid].bridge is None for busid in kinds):
        found.append(f"the PCI devices below {root} have lost their place in the tree: switches unknown")
    hidden = [
        slot.busid
        for slot in slots.values()
        if (slot.pci_class or 0) >> 8 in _CARD_CLASSES and slot.busid not in kinds and not _is_virtual_function(slot)
    ]
    if hidden:
        found.append(f"network cards without an interface here (no driver, or a container): {', '.join(hidden)}")
    return found


def _is_virtual_function(slot: Slot) -> bool:
    return "physfn" in names(slot.folder)
