"""What two GPUs of one machine can send each other."""

from __future__ import annotations

from topology.facts.nvlink import links_between
from topology.model import PciDevice, PciLink, Topology

NVLINK_GBPS = {60: 160.0, 70: 200.0, 75: 200.0, 80: 200.0, 86: 112.5, 90: 200.0, 100: 400.0, 103: 400.0}
"""Line rate of one NVLink in one direction, in Gb/s, by compute capability."""


def peer_bandwidth_gbps(topology: Topology, a: int, b: int) -> float | None:
    """Line rate in Gb/s, in one direction, between two GPUs (by place): over their NVLinks, else over PCIe.

    Over PCIe it is the slowest link on the way through the tree; the link between two CPUs is not known and does not
    count. None when NVLinks join them but their generation is unknown, when it is unknown whether NVLinks do, or when
    the source lacks the speed of a PCIe link on the way. Raises ValueError for a GPU and itself.
    """
    if a == b:
        raise ValueError(f"GPU {a} has no link to itself; ask for two places")
    links = links_between(topology, a, b)
    if links is None:
        return None
    if links:
        rates = [NVLINK_GBPS.get(topology.gpus[place].sm or 0) for place in (a, b)]
        return links * min(rate for rate in rates if rate is not None) if None not in rates else None
    return _pcie_gbps(topology, a, b)


def _pcie_gbps(topology: Topology, a: int, b: int) -> float | None:
    devices = {device.busid: device for device in topology.pci}
    up_a, up_b = (_chain(devices, topology.gpus[place].busid) for place in (a, b))
    if not up_a or not up_b or up_a[0] == up_b[0]:
        return None
    shared = {device.busid for device in up_a} & {device.busid for device in up_b}
    rates = [_attainable(device).gbps for device in (*up_a, *up_b) if device.busid not in shared]
    return min(rate for rate in rates if rate is not None) if rates and None not in rates else None


def _chain(devices: dict[str, PciDevice], busid: str | None) -> list[PciDevice]:
    """A device and the switches above it, nearest first; empty when it is not in the tree."""
    chain: list[PciDevice] = []
    device = devices.get(busid) if busid else None
    while device is not None and device not in chain:
        chain.append(device)
        device = devices.get(device.parent) if device.parent else None
    return chain


def _attainable(device: PciDevice) -> PciLink:
    """Lanes as they run, at the best speed: an idle link clocks down, but keeps its lanes."""
    return PciLink(device.link_max.gts or device.link.gts, device.link.width or device.link_max.width)
