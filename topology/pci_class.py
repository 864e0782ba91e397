"""What the numbers of a PCI device say about it, read as NCCL reads them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

# GPUs of these vendors count; 0 and 0xffff stand for "any" in templates. Others in class 0x03 are a server's VGA chip.
_GPU_VENDORS = (None, 0x10DE, 0x1002, 0x0000, 0xFFFF)


def device_kind(
    pci_class: int | None, vendor: int | None, inside: Collection[str]
) -> Literal["switch", "gpu", "nic", "nvswitch", "other"]:
    """Return what a device is, by its 24-bit class and the tags inside its element, which say more than the class."""
    if "pci" in inside:
        return "switch"
    if "gpu" in inside:
        return "gpu"
    if "nic" in inside:
        return "nic"
    if pci_class is None:
        return "other"
    if pci_class >> 16 == 0x03:
        return "gpu" if vendor in _GPU_VENDORS else "other"
    if pci_class >> 16 == 0x02:
        return "nic"
    if pci_class == 0x068000:
        return "nvswitch"
    return "switch" if pci_class == 0x060400 else "other"


def link_layer(pci_class: int | None) -> Literal["InfiniBand"] | None:
    """Return "InfiniBand" for class 0x0207; class 0x0200 is Ethernet, but also EFA and others, so None."""
    return "InfiniBand" if pci_class is not None and pci_class >> 8 == 0x0207 else None


def nvlink_target(target_class: int | None) -> Literal["gpu", "switch", "cpu", "unknown"]:
    """Return what is at the other end of an NVLink, by the PCI class there."""
    if target_class == 0x068001:
        return "cpu"  # IBM's bridge into a POWER9
    if target_class == 0x068000:
        return "switch"
    return "gpu" if target_class is not None and target_class >> 16 == 0x03 else "unknown"
