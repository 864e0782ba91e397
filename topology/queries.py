# SPDX-License-Identifier: Apache-2.0
"""Queries about a topology: usable ports, the shape of NVLinks, distances, bandwidth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from itertools import combinations
from typing import Literal, TypeVar

from topology.model import Distance, PciDevice, PciLink, Topology

_T = TypeVar("_T", bound=Hashable)


def usable_nics(topology: Topology) -> tuple[int, ...]:
    """Return the indices of the ports that can be rails, in order.

    These are the ports on PCI devices. If there are none (hidden by a virtual machine, or a matrix without bus ids),
    all ports not known to be virtual. Bridges, veth and docker0 never count, whatever speed they claim.
    """
    real = [place for place, nic in enumerate(topology.nics) if not nic.virtual]
    return tuple([place for place in real if topology.nics[place].busid is not None] or real)


def rail_nics(topology: Topology) -> tuple[int, ...]:
    """Return the indices of the ports that training uses, in order.

    These are the usable ports with GPUDirect RDMA; if none is known to have it, those that may; else all usable ports.
    Other ports beside them are for storage and log-in.
    """
    usable = usable_nics(topology)
    surely = tuple(place for place in usable if topology.nics[place].gdr)
    perhaps = tuple(place for place in usable if topology.nics[place].gdr is None)
    return surely or perhaps or usable


def node_nic_gbps(topology: Topology) -> float | None:
    """Return the total speed of this node's rails in Gb/s.

    Ports of unknown speed add nothing; None if no speed is known.
    """
    speeds = [topology.nics[place].speed_gbps for place in rail_nics(topology)]
    known = [speed for speed in speeds if speed is not None]
    return sum(known) if known else None


NvlinkKind = Literal["switch", "mesh", "pairs", "hybrid_cube_mesh", "irregular", "none", "unknown"]


def nvlink_kind(topology: Topology) -> NvlinkKind:
    """Return the shape of the NVLinks between GPUs. GPUs without any NVLink (a display GPU) do not count.

    "switch": through NVSwitches.
    "mesh": every GPU of a group of three or more is directly linked to every other, with any numbers of links.
    "pairs": each GPU is linked to one other.
    "hybrid_cube_mesh": two full quads, linked one to one (DGX-1 and similar machines).
    "irregular": any other shape.
    "none": the source states that no two GPUs are linked.
    "unknown": the source does not state it, or not whether there is a switch in between.
    """
    links = topology.nvlinks
    if links is None or not topology.gpus:
        return "unknown"
    switched = {link.gpu for link in links if link.kind == "switch"}
    joined = direct_links(topology)
    if switched:
        return "switch" if all(a in switched and b in switched for a, b in joined) else "irregular"
    if any(link.kind == "unknown" for link in links):
        return "unknown"
    groups = [set(group) for group in connected(range(len(topology.gpus)), joined) if len(group) > 1]
    if not groups:
        return "none"
    kinds = {_kind_of_group(group, set(joined)) for group in groups}
    return kinds.pop() if len(kinds) == 1 else "irregular"


def links_per_gpu(topology: Topology) -> tuple[int | None, ...]:
    """Return the number of NVLinks of each GPU, with any other end; None if unknown."""
    links = topology.nvlinks
    if links is None:
        return (None,) * len(topology.gpus)
    counts = [0] * len(topology.gpus)
    for (a, b), count in direct_links(topology).items():
        counts[a] += count
        counts[b] += count
    for link in links:
        if link.peer is None:
            counts[link.gpu] += link.count
    return tuple(counts)


def links_between(topology: Topology, a: int, b: int) -> int | None:
    """Return the number of NVLinks between two GPUs (by index): direct ones plus the smaller number into switches.

    None if unknown.
    """
    if topology.nvlinks is None:
        return None
    into_switches = [
        sum(link.count for link in topology.nvlinks if link.kind == "switch" and link.gpu == place) for place in (a, b)
    ]
    return direct_links(topology).get((min(a, b), max(a, b)), 0) + min(into_switches)


def direct_links(topology: Topology) -> dict[tuple[int, int], int]:
    """Return the NVLinks between GPUs without a switch: number by pair of indices, the smaller index first."""
    one_way: dict[tuple[int, int], int] = defaultdict(int)
    for link in topology.nvlinks or ():
        if link.peer is not None and link.peer != link.gpu:
            one_way[link.gpu, link.peer] += link.count
    pairs = {(min(pair), max(pair)) for pair in one_way}
    return {(a, b): max(one_way.get((a, b), 0), one_way.get((b, a), 0)) for a, b in sorted(pairs)}


def connected(members: Iterable[_T], pairs: Iterable[tuple[_T, _T]]) -> list[list[_T]]:
    """Return the connected groups of members, directly or indirectly; groups and members keep their order."""
    group_of = {member: [member] for member in members}
    order = list(group_of)
    for a, b in pairs:
        if group_of[a] is not group_of[b]:
            group_of[a] += group_of[b]
            group_of |= dict.fromkeys(group_of[b], group_of[a])
    groups = {id(group): group for group in group_of.values()}
    return [sorted(group, key=order.index) for group in groups.values()]


def _kind_of_group(group: set[int], pairs: set[tuple[int, int]]) -> NvlinkKind:
    if len(group) == 2:
        return "pairs"
    if _is_full(group, pairs):
        return "mesh"
    return "hybrid_cube_mesh" if _is_cube_mesh(group, pairs) else "irregular"


def _is_full(group: set[int], pairs: set[tuple[int, int]]) -> bool:
    return all(pair in pairs for pair in combinations(sorted(group), 2))


def _is_cube_mesh(group: set[int], pairs: set[tuple[int, int]]) -> bool:
    """Return whether eight GPUs with four peers each form two full quads, for any numbering.

    With four peers each, one full quad implies the other.
    """
    if len(group) != 8 or any(sum(place in pair for pair in pairs) != 4 for place in group):
        return False
    first, *others = sorted(group)
    quads = ({first, *three} for three in combinations(others, 3))
    return any(_is_full(quad, pairs) for quad in quads)


def nic_distance(topology: Topology, gpu_place: int, nic_place: int) -> Distance | None:
    """Return the distance between a GPU and a network port; None if unknown."""
    return Paths(topology).nic(gpu_place, nic_place)


def gpu_distance(topology: Topology, a: int, b: int) -> Distance | None:
    """Return the distance between two GPUs by index: NVL with NVLinks between them, else over PCIe; None if unknown.

    If NVLinks are unknown (`topology.nvlinks` is None), it is the path over PCIe, perhaps not the best one. Raises
    ValueError for a GPU and itself.
    """
    return Paths(topology).gpu(a, b)


def nearest_nics(topology: Topology, gpu_place: int) -> tuple[list[int], Distance] | None:
    """Return the indices of the usable ports nearest to a GPU, in file order, and their distance.

    None if no distance is known.
    """
    return Paths(topology).nearest(gpu_place)


class Paths:
    """Distances of one machine, for callers with many queries."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._devices = {device.busid: device for device in topology.pci}
        self._switches: dict[str | None, list[str] | None] = {}
        self._stated = {frozenset((a, b)): distance for a, b, distance in topology.stated or ()}
        self._usable = usable_nics(topology)
        links = topology.nvlinks or ()
        self._linked = {frozenset((link.gpu, link.peer)) for link in links if link.peer is not None}
        self._switched = {link.gpu for link in links if link.kind == "switch"}

    def nic(self, gpu_place: int, nic_place: int) -> Distance | None:
        """See `nic_distance`."""
        if self._topology.stated is not None:
            return self._stated.get(frozenset((f"GPU{gpu_place}", f"NIC{nic_place}")))
        nic = self._topology.nics[nic_place]
        gpu_busid = self._topology.gpus[gpu_place].busid
        if nic.busid is None:
            return self._between_cpus(self._cpu(gpu_busid), self._cpu_of_numa(nic.numa))
        return self._between(gpu_busid, nic.busid)

    def gpu(self, a: int, b: int) -> Distance | None:
        """See `gpu_distance`."""
        if a == b:
            raise ValueError(f"GPU {a} has no distance to itself; ask for two places")
        if self._joined_by_nvlink(a, b):
            return Distance.NVL
        if self._topology.stated is not None:
            return self._stated.get(frozenset((f"GPU{a}", f"GPU{b}")))
        return self._between(self._topology.gpus[a].busid, self._topology.gpus[b].busid)

    def nearest(self, gpu_place: int, nics: Iterable[int] | None = None) -> tuple[list[int], Distance] | None:
        """See `nearest_nics`. With `nics`, only these ports count."""
        places = self._usable if nics is None else nics
        known = [(place, distance) for place in places if (distance := self.nic(gpu_place, place))]
        if not known:
            return None
        least = min((distance for _, distance in known), key=lambda distance: distance.rank)
        return [place for place, distance in known if distance is least], least

    def _joined_by_nvlink(self, a: int, b: int) -> bool:
        """Return whether two GPUs are linked directly, or both to the switches, which form one fabric."""
        return frozenset((a, b)) in self._linked or {a, b} <= self._switched

    def _between(self, a: str | None, b: str | None) -> Distance | None:
        above_a, above_b = self._above(a), self._above(b)
        if above_a is None or above_b is None:
            return None
        if a == b:
            return Distance.PIX
        for steps, switch in enumerate(above_a):
            if switch in above_b:
                return Distance.PIX if steps + above_b.index(switch) == 0 else Distance.PXB
        return self._between_cpus(self._cpu(a), self._cpu(b))

    def _above(self, busid: str | None) -> list[str] | None:
        """Return the bus ids of the switches above a device, nearest first; None if it is not in the tree.

        For a switch the list begins with its own bus id.
        """
        if busid not in self._switches:
            chain = _chain(self._devices, busid)
            first = 0 if chain and chain[0].kind == "switch" else 1
            self._switches[busid] = [device.busid for device in chain[first:]] if chain else None
        return self._switches[busid]

    def _cpu(self, busid: str | None) -> int | None:
        device = self._devices.get(busid) if busid else None
        return None if device is None else device.cpu

    def _cpu_of_numa(self, numa: int | None) -> int | None:
        """Return the only CPU with this NUMA number, for ports without a PCI device; None if there are several."""
        found = [place for place, cpu in enumerate(self._topology.cpus) if cpu.numa == numa]
        return found[0] if len(found) == 1 else None

    def _between_cpus(self, a: int | None, b: int | None) -> Distance | None:
        if a is None or b is None:
            return None
        return Distance.PHB if a == b else Distance.SYS


NVLINK_GBPS = {60: 160.0, 70: 200.0, 75: 200.0, 80: 200.0, 86: 112.5, 90: 200.0, 100: 400.0, 103: 400.0}
"""Line rate of one NVLink in one direction, in Gb/s, by compute capability."""


def peer_bandwidth_gbps(topology: Topology, a: int, b: int) -> float | None:
    """Return the line rate in Gb/s, in one direction, between two GPUs (by index): over NVLinks, else over PCIe.

    Over PCIe it is the slowest link on the path; the unknown link between two CPUs does not count. None if the NVLinks
    or their generation are unknown, or if the source lacks the speed of a PCIe link on the path. Raises ValueError for
    a GPU and itself.
    """
    if a == b:
        raise ValueError(f"GPU {a} has no link to itself; ask for two places")
    links = links_between(topology, a, b)
    if links is None:
        return None
    if links:
        rates = [NVLINK_GBPS.get(topology.gpus[place].sm or 0) for place in (a, b)]
        return links * min(rate for rate in rates if rate is not None) if None not in rates else None
    devices = {device.busid: device for device in topology.pci}
    up_a, up_b = (_chain(devices, topology.gpus[place].busid) for place in (a, b))
    if not up_a or not up_b or up_a[0] == up_b[0]:
        return None
    shared = {device.busid for device in up_a} & {device.busid for device in up_b}
    speeds = [_attainable(device).gbps for device in (*up_a, *up_b) if device.busid not in shared]
    return min(speed for speed in speeds if speed is not None) if speeds and None not in speeds else None


def _chain(devices: dict[str, PciDevice], busid: str | None) -> list[PciDevice]:
    """Return a device and the switches above it, nearest first; empty if it is not in the tree."""
    chain: list[PciDevice] = []
    device = devices.get(busid or "")
    while device is not None and device not in chain:
        chain.append(device)
        device = devices.get(device.parent or "")
    return chain


def _attainable(device: PciDevice) -> PciLink:
    """Return the best state of a link with its present lanes: an idle link lowers its speed, not its lanes."""
    return PciLink(device.link_max.gts or device.link.gts, device.link.width or device.link_max.width)
