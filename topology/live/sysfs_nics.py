"""Network cards from sys/class/infiniband and sys/class/net: one Nic per port of hardware, the rest marked virtual."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from topology.kernel_files import link_target, names, number, text
from topology.live.pci_slots import Slot, pci_path
from topology.model import Nic

GDR_FILES = (
    "sys/module/nvidia_peermem/version",
    "sys/kernel/mm/memory_peers/nv_mem/version",
    "sys/kernel/mm/memory_peers/nv_mem_nc/version",
)
"""Any of them there: the kernel module that lets RDMA cards read GPU memory is loaded (NCCL looks at the same)."""

_RDMA = "sys/class/infiniband"
_NET = "sys/class/net"
_ETHERNET, _IP_OVER_INFINIBAND, _LOOPBACK = 1, 32, 772  # sys/class/net/*/type


def read_nics(root: Path, slots: dict[str, Slot]) -> tuple[tuple[Nic, ...], tuple[str, ...]]:
    """All ports but loopback, RDMA devices first, then interfaces, with warnings about them.

    A card that does RDMA is listed by its RDMA devices only, as NCCL and nvidia-smi do: its interfaces are the same
    ports. A virtual function is marked virtual when the card that it is a part of is in sight.
    """
    rdma = [port for name in names(root / _RDMA) for port in _rdma_ports(root, name, slots)]
    rdma_cards = {nic.busid for nic in rdma if nic.busid is not None}
    interfaces = [_interface(root, name, slots) for name in names(root / _NET)]
    nics = [*rdma, *(nic for nic in interfaces if nic is not None and nic.busid not in rdma_cards)]
    cards = {nic.busid for nic in nics}
    nics = [replace(nic, virtual=True) if _whole_card(nic, slots) in cards else nic for nic in nics]
    return tuple(nics), tuple(_warnings(root, [nic for nic in nics if not nic.virtual]))


def _rdma_ports(root: Path, name: str, slots: dict[str, Slot]) -> list[Nic]:
    folder = root / _RDMA / name
    busid = _busid(folder)
    loaded = any((root / file).exists() for file in GDR_FILES)
    guid = text(folder / "sys_image_guid") or text(folder / "node_guid") or ""
    return [
        Nic(
            name=name,
            busid=busid,
            port=int(port),
            numa=slots[busid].numa if busid in slots else None,
            speed_gbps=_rdma_gbps(folder / "ports" / port),
            link_layer=_link_layer(text(folder / "ports" / port / "link_layer")),
            gdr=True if loaded and busid else None,  # without the module DMA-BUF may do it, which no file tells
            guid=int(guid.replace(":", ""), 16) if re.fullmatch("[0-9a-f]{4}(:[0-9a-f]{4}){3}", guid) else None,
            virtual=busid is None,  # RDMA in software, over an interface that is listed itself
        )
        for port in names(folder / "ports")
        if port.isdecimal()
    ]


def _rdma_gbps(port: Path) -> float | None:
    """Gb/s of "400 Gb/sec (4X NDR)"; None unless the port is active: a dead one states the slowest rate there is."""
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
    """The PCI device of an entry of sys/class, by its own link, its device's link, or its device's word."""
    for path in (link_target(folder), link_target(folder / "device")):
        if "/usb" in path:
            return None  # on a bus of its own: the PCI device on the path is the USB controller
        if pci_path(path):
            return pci_path(path)[-1]
    stated = re.search(r"^PCI_SLOT_NAME=(\S+)", text(folder / "device/uevent") or "", re.MULTILINE)
    return stated[1].lower() if stated else None


def _whole_card(nic: Nic, slots: dict[str, Slot]) -> str | None:
    """The bus id of the card that a virtual function is a part of; "" for what is no virtual function."""
    path = pci_path(link_target(slots[nic.busid].folder / "physfn")) if nic.busid in slots else ()
    return path[-1] if path else ""


def _warnings(root: Path, nics: list[Nic]) -> list[str]:
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
