"""The PCI devices of /sys: where each sits below its host bridge, and how far two are apart."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from topology.kernel_files import link_target, names, number, text
from topology.model import Distance, PciLink

_BUSID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.IGNORECASE)
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


@dataclass(frozen=True)
class Slot:
    """One PCI device and the files about it."""

    busid: str
    folder: Path
    bridge: str | None
    """Host bridge, as in "pci0000:16"; None when unknown."""
    above: tuple[str, ...]
    """Bus ids of the bridges above, from the host bridge down."""

    @property
    def switches(self) -> tuple[str, ...]:
        """The PCIe switches above, nearest first, each known by its upstream port.

        A switch shows up as two bridges, upstream and downstream port; the root port is left over. NCCL counts alike.
        """
        return self.above[-2::-2]

    @property
    def pci_class(self) -> int | None:
        """0x030200 for a 3D controller."""
        return number(self.folder / "class")

    @property
    def vendor(self) -> int | None:
        """0x10de for NVIDIA."""
        return number(self.folder / "vendor")

    @property
    def device(self) -> int | None:
        """The vendor's number of the model."""
        return number(self.folder / "device")

    @property
    def numa(self) -> int | None:
        """NUMA node; None where the firmware tells none (-1)."""
        node = number(self.folder / "numa_node")
        return None if node is None or node < 0 else node

    def link(self, which: str) -> PciLink:
        """The "current" or the "max" link; virtual machines often say Unknown, or a width of 0 or 255."""
        speed = re.match(r"(\d+(\.\d+)?) GT/s", text(self.folder / f"{which}_link_speed") or "")
        width = number(self.folder / f"{which}_link_width")
        return PciLink(float(speed[1]) if speed else None, width if width in _WIDTHS else None)


def read_slots(root: Path) -> dict[str, Slot]:
    """Every PCI device below `root` by bus id, in the order of bus ids."""
    bus = root / "sys/bus/pci/devices"
    found = {name.lower(): _slot(bus / name, link_target(bus / name)) for name in names(bus) if _BUSID.fullmatch(name)}
    if any(slot.bridge is None for slot in found.values()):  # a copy that has lost the links
        for folder, _, _ in os.walk(root / "sys/devices"):
            name = Path(folder).name.lower()
            if name in found and found[name].bridge is None:
                found[name] = _slot(found[name].folder, os.path.relpath(folder, root))
    for slot in list(found.values()):
        for depth, name in enumerate(slot.above):  # a copy of the devices of interest only
            found.setdefault(name, Slot(name, bus / name, slot.bridge, slot.above[:depth]))
    return dict(sorted(found.items(), key=lambda item: busid_order(item[0])))


def slot_distance(a: Slot, b: Slot, one_node: bool) -> Distance | None:
    """How far two devices are apart over PCIe; `one_node`: the machine has a single NUMA node. None when unknown."""
    if a.numa is not None and b.numa is not None and a.numa != b.numa:
        return Distance.SYS
    if a.bridge is None or b.bridge is None:
        return None
    shared = next((switch for switch in a.switches if switch in b.switches), None)
    if shared is not None:
        nearest = a.switches[0] == b.switches[0]
        return Distance.PIX if nearest else Distance.PXB
    if a.bridge == b.bridge:
        return Distance.PHB
    return Distance.NODE if one_node or (a.numa is not None and a.numa == b.numa) else None


def _slot(folder: Path, path: str) -> Slot:
    above = pci_path(path)
    bridge = next((part.lower() for part in path.split("/") if _HOST_BRIDGE.fullmatch(part)), None)
    return Slot(folder.name.lower(), folder, bridge, above[:-1])


def pci_path(path: str) -> tuple[str, ...]:
    """The bus ids on a path like "../pci0000:16/0000:16:01.0/0000:17:00.0/net/eth0", from the host bridge down."""
    return tuple(part.lower() for part in path.split("/") if _BUSID.fullmatch(part))


def busid_order(busid: str) -> tuple[int, ...]:
    """Sort key: bus ids as numbers, the order in which NVIDIA's driver counts its GPUs."""
    return tuple(int(part, 16) for part in re.split("[:.]", busid))
