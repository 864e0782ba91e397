"""How far apart the devices of a machine are, in NCCL's classes.

Distances that the source states itself win. Otherwise they are counted in the PCI tree: one switch is PIX, several are
PXB, a CPU is PHB. A tree knows no host bridges, so PHB may be what nvidia-smi calls NODE; NCCL says PHB for both.
"""

from __future__ import annotations

from topology.facts.nics import usable_nics
from topology.model import Distance, Topology


def nic_distance(topology: Topology, gpu_place: int, nic_place: int) -> Distance | None:
    """Return the distance between a GPU and a network port; None when unknown."""
    return Paths(topology).nic(gpu_place, nic_place)


def gpu_distance(topology: Topology, a: int, b: int) -> Distance | None:
    """Return the distance between two GPUs by place: NVL where NVLinks join them, else over PCIe; None when unknown.

    Where the source does not tell about NVLink (`topology.nvlinks` is None) it is the way over PCIe, which may not be
    the best. Raises ValueError for a GPU and itself.
    """
    return Paths(topology).gpu(a, b)


def nearest_nics(topology: Topology, gpu_place: int) -> tuple[list[int], Distance] | None:
    """Return the places of the usable ports at the least known distance from a GPU, in file order, and that distance.

    None when no distance is known.
    """
    return Paths(topology).nearest(gpu_place)


class Paths:
    """The same questions, for callers with many of them about one machine."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._devices = {device.busid: device for device in topology.pci}
        self._chains: dict[str, list[str]] = {}
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

    def nearest(self, gpu_place: int) -> tuple[list[int], Distance] | None:
        """See `nearest_nics`."""
        known = [(place, distance) for place in self._usable if (distance := self.nic(gpu_place, place))]
        if not known:
            return None
        least = min((distance for _, distance in known), key=lambda distance: distance.rank)
        return [place for place, distance in known if distance is least], least

    def _joined_by_nvlink(self, a: int, b: int) -> bool:
        """Directly, or both to switches, which are one fabric inside a machine."""
        return frozenset((a, b)) in self._linked or {a, b} <= self._switched

    def _between(self, a: str | None, b: str | None) -> Distance | None:
        switches_a, switches_b = self._switches(a), self._switches(b)
        if switches_a is None or switches_b is None:
            return None
        if a == b:
            return Distance.PIX
        for above_a, switch in enumerate(switches_a):
            if switch in switches_b:
                return Distance.PIX if above_a + switches_b.index(switch) == 0 else Distance.PXB
        return self._between_cpus(self._cpu(a), self._cpu(b))

    def _switches(self, busid: str | None) -> list[str] | None:
        """Bus ids from a device up to its CPU, without its own unless it is a switch; None when not in the tree."""
        device = self._devices.get(busid) if busid else None
        if device is None:
            return None
        if device.busid not in self._chains:
            chain = [device.busid] if device.kind == "switch" else []
            above = device.parent
            while above is not None and above not in chain:
                chain.append(above)
                above = self._devices[above].parent if above in self._devices else None
            self._chains[device.busid] = chain
        return self._chains[device.busid]

    def _cpu(self, busid: str | None) -> int | None:
        device = self._devices.get(busid) if busid else None
        return None if device is None else device.cpu

    def _cpu_of_numa(self, numa: int | None) -> int | None:
        """Where a port without a PCI device sits: the only CPU of that number (of no number, if it has none)."""
        found = [place for place, cpu in enumerate(self._topology.cpus) if cpu.numa == numa]
        return found[0] if len(found) == 1 else None

    def _between_cpus(self, a: int | None, b: int | None) -> Distance | None:
        if a is None or b is None:
            return None
        return Distance.PHB if a == b else Distance.SYS
