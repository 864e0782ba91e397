# SPDX-License-Identifier: Apache-2.0
"""Reads GPUs, network cards, NUMA nodes and the PCI tree from /sys and /proc, of the live machine or of a copy."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

from topology.kernel_files import cpu_list, fields, link_target, names, number, text
from topology.model import Cpu, Distance, Gpu, Nic, PciDevice, PciLink, Topology, device_kind

_BUSID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", re.IGNORECASE)
_WIDTHS = (1, 2, 4, 8, 12, 16, 32)


@dataclass(frozen=True)
class Slot:
    """One PCI device and its files."""

    busid: str
    folder: Path
    bridge: str | None
    """Host bridge, such as "pci0000:16"; None if unknown."""
    above: tuple[str, ...]
    """Bus ids of the bridges above, from the host bridge down."""

    @property
    def switches(self) -> tuple[str, ...]:
        """The PCIe switches above, nearest first, each by its upstream port.

        A switch appears as two bridges, its upstream and downstream ports; the root port remains. NCCL counts the same.
        """
        return self.above[-2::-2]

    def number(self, name: str) -> int | None:
        """Return the number in a file: "class" is 0x030200 for a 3D controller, "vendor" 0x10de for NVIDIA."""
        return number(self.folder / name)

    @property
    def numa(self) -> int | None:
        """NUMA node; None if the firmware gives none (-1)."""
        node = self.number("numa_node")
        return None if node is None or node < 0 else node

    def link(self, which: str) -> PciLink:
        """Return the "current" or the "max" link. Virtual machines often give Unknown, or a width of 0 or 255."""
        speed = re.match(r"(\d+(\.\d+)?) GT/s", text(self.folder / f"{which}_link_speed") or "")
        width = self.number(f"{which}_link_width")
        return PciLink(float(speed[1]) if speed else None, width if width in _WIDTHS else None)


def read_slots(root: Path) -> dict[str, Slot]:
    """Return all PCI devices below `root` by bus id, in the order of bus ids."""
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
    """Return the distance between two devices over PCIe; None if unknown.

    one_node: whether the machine has a single NUMA node.
    """
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
    """Return the bus ids on a path like "../pci0000:16/0000:16:01.0/0000:17:00.0/net/eth0", host bridge first."""
    return tuple(part.lower() for part in path.split("/") if _BUSID.fullmatch(part))


def busid_order(busid: str) -> tuple[int, ...]:
    """Return a sort key for bus ids as numbers, the order of GPUs in NVIDIA's driver."""
    return tuple(int(part, 16) for part in re.split("[:.]", busid))


GDR_FILES = (
    "sys/module/nvidia_peermem/version",
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
)
"""If any exists, the kernel module that lets RDMA cards read GPU memory is loaded. NCCL checks the same files."""

_RDMA = "sys/class/infiniband"
_NET = "sys/class/net"
_ETHERNET, _IP_OVER_INFINIBAND, _LOOPBACK = 1, 32, 772  # sys/class/net/*/type


def read_nics(root: Path, slots: dict[str, Slot]) -> tuple[tuple[Nic, ...], tuple[str, ...]]:
    """Return all ports but loopback, RDMA devices before interfaces, and warnings about them.

    An RDMA card is listed by its RDMA devices only, as in NCCL and nvidia-smi: its interfaces are the same ports. A
    virtual function is marked virtual if its card is visible too.
    """
    rdma = [port for name in names(root / _RDMA) for port in _rdma_ports(root, name, slots)]
    rdma_cards = {nic.busid for nic in rdma if nic.busid is not None}
    interfaces = [_interface(root, name, slots) for name in names(root / _NET)]
    nics = [*rdma, *(nic for nic in interfaces if nic is not None and nic.busid not in rdma_cards)]
    cards = {nic.busid for nic in nics}
    nics = [replace(nic, virtual=True) if _whole_card(nic, slots) in cards else nic for nic in nics]
    return tuple(nics), tuple(_nic_warnings(root, [nic for nic in nics if not nic.virtual]))


def _rdma_ports(root: Path, name: str, slots: dict[str, Slot]) -> list[Nic]:
    folder = root / _RDMA / name
    busid = _busid(folder)
    loaded = any((root / file).exists() for file in GDR_FILES)
    return [
        Nic(
            name=name,
            busid=busid,
            port=int(port),
            numa=slots[busid].numa if busid in slots else None,
            speed_gbps=_rdma_gbps(folder / "ports" / port),
            link_layer=_link_layer(text(folder / "ports" / port / "link_layer")),
            gdr=True if loaded and busid else None,  # without the module DMA-BUF may support it, which no file shows
            virtual=busid is None,  # RDMA in software, over an interface that is listed itself
        )
        for port in names(folder / "ports")
        if port.isdecimal()
    ]


def _rdma_gbps(port: Path) -> float | None:
    """Return Gb/s of "400 Gb/sec (4X NDR)"; None unless the port is active: an inactive one gives the slowest rate."""
    rate = re.match(r"(\d+(\.\d+)?) Gb/sec", text(port / "rate") or "")
    return float(rate[1]) if rate and _is_active(port) else None


def _is_active(port: Path) -> bool:
    return (text(port / "state") or "").startswith("4:")


def _link_layer(stated: str | None) -> Literal["InfiniBand", "Ethernet"] | None:
    return "InfiniBand" if stated == "InfiniBand" else "Ethernet" if stated == "Ethernet" else None


def _interface(root: Path, name: str, slots: dict[str, Slot]) -> Nic | None:
    folder = root / _NET / name
    kind = number(folder / "type")
    if kind == _LOOPBACK or not folder.is_dir():  # sys/class/net also holds files (bonding_masters)
        return None
    busid = _busid(folder)
    mbps = number(folder / "speed")
    is_hardware = busid is not None or "device" in names(folder)
    is_stacked = any(entry.startswith("lower_") for entry in names(folder))
    is_representor = re.search("pf[0-9]+([vs]f|hpf)", text(folder / "phys_port_name") or "")
    return Nic(
        name=name,
        busid=busid,
        port=None,
        numa=slots[busid].numa if busid in slots else None,
        speed_gbps=mbps / 1000 if mbps is not None and mbps > 0 else None,
        link_layer="Ethernet" if kind == _ETHERNET else "InfiniBand" if kind == _IP_OVER_INFINIBAND else None,
        gdr=False,  # sockets never do
        virtual=not is_hardware or is_stacked or is_representor is not None,
    )


def _busid(folder: Path) -> str | None:
    """Return the PCI device of an entry of sys/class: from its own link, its device's link, or its device's uevent."""
    for path in (link_target(folder), link_target(folder / "device")):
        if "/usb" in path:
            return None  # on a bus of its own: the PCI device on the path is the USB controller
        if pci_path(path):
            return pci_path(path)[-1]
    stated = re.search(r"^PCI_SLOT_NAME=(\S+)", text(folder / "device/uevent") or "", re.MULTILINE)
    return stated[1].lower() if stated else None


def _whole_card(nic: Nic, slots: dict[str, Slot]) -> str | None:
    """Return the bus id of the card of a virtual function; "" for any other device."""
    path = pci_path(link_target(slots[nic.busid].folder / "physfn")) if nic.busid in slots else ()
    return path[-1] if path else ""


def _nic_warnings(root: Path, nics: list[Nic]) -> list[str]:
    if not nics:
        return ["no network card found"]
    dead = [nic for nic in nics if not _has_link(root, nic)]
    silent = [nic for nic in nics if nic.speed_gbps is None and nic not in dead]
    return [
        *([f"no link: {_listed(dead)}"] if dead else []),
        *([f"no speed stated: {_listed(silent)} (NCCL then assumes 10 Gb/s)"] if silent else []),
    ]


def _has_link(root: Path, nic: Nic) -> bool:
    if nic.port is not None:
        return _is_active(root / _RDMA / nic.name / "ports" / str(nic.port))
    return text(root / _NET / nic.name / "operstate") not in ("down", "lowerlayerdown", "notpresent")


def _listed(nics: list[Nic]) -> str:
    return ", ".join(nic.name if nic.port is None else f"{nic.name} port {nic.port}" for nic in nics)


_Kind = Literal["switch", "gpu", "nic", "nvswitch", "other"]
_NVIDIA = 0x10DE
_CARD_CLASSES = (0x0200, 0x0207)  # Ethernet, InfiniBand
_VENDORS = {"0x41": "ARM", "0x48": "HiSilicon", "0x4e": "NVIDIA"}  # "CPU implementer" of /proc/cpuinfo


def read_sysfs(root: Path = Path("/")) -> Topology:
    """Return the machine whose files are below `root`. Raises nothing: missing facts are None, or cause a warning.

    GPUs are in the order of their bus ids, as in NVIDIA's driver. NVLinks and compute capability are not in these files
    (topology.machine gets them from the driver).
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
    """Return the kind of an NVIDIA device; None for others, such as a server's VGA chip."""
    vendor = slot.number("vendor")
    kind = device_kind(slot.number("class"), vendor, ()) if vendor == _NVIDIA else "other"
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
    """Return the NUMA nodes with CPUs or devices, and one of unknown number for devices without a node.

    On a machine with one node, all devices belong to it.
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
        )
        for numa in found
    )


def _arch(info: dict[str, str]) -> str | None:
    if "vendor_id" in info:
        return "x86_64"
    if "CPU implementer" in info:
        return "arm64"
    return "ppc64" if info.get("cpu", "").startswith("POWER") else None


def _tree(slots: dict[str, Slot], kinds: dict[str, _Kind], cpus: tuple[Cpu, ...]) -> tuple[PciDevice, ...]:
    """Return the devices of interest and the switches above them."""
    numas = [cpu.numa for cpu in cpus]
    tree: dict[str, PciDevice] = {}
    for busid in (busid for busid in slots if busid in kinds):
        chain = (*reversed(slots[busid].switches), busid)
        # A single node has all devices; the devices below one switch share the node of the first.
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
                    pci_class=slot.number("class"),
                    link=slot.link("current"),
                    link_max=slot.link("max"),
                ),
            )
    return tuple(tree.values())


def _stated(
    gpus: list[str], nics: tuple[Nic, ...], slots: dict[str, Slot], one_node: bool
) -> tuple[tuple[str, str, Distance], ...]:
    """Return distances that distinguish PHB from NODE, which the model's tree cannot."""
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
        if (slot.number("class") or 0) >> 8 in _CARD_CLASSES
        and slot.busid not in kinds
        and not _is_virtual_function(slot)
    ]
    if hidden:
        found.append(f"network cards without an interface here (no driver, or a container): {', '.join(hidden)}")
    return found


def _is_virtual_function(slot: Slot) -> bool:
    return "physfn" in names(slot.folder)
