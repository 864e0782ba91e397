"""How far every GPU is from the nearest RDMA port that works."""

from __future__ import annotations

from dataclasses import dataclass

from commopt.doctor.facts.machine import Machine
from commopt.doctor.facts.network import active_ports
from commopt.doctor.facts.surroundings import coherent, virtual_machine
from topology.machine import VIRTUAL_TOPOLOGY
from topology.model import Distance
from topology.queries import Paths, usable_nics


@dataclass(frozen=True)
class Nearest:
    """One GPU's nearest ports."""

    gpu: str
    """ "GPU0"."""
    distance: Distance | None
    """None when no path is known."""
    nics: tuple[str, ...]


def nearest_ports(machine: Machine) -> list[Nearest]:
    """Answer for every GPU, among the ports that are active (other ports where none of these is in the topology)."""
    topology, paths = machine.topology, Paths(machine.topology)
    active = {port.device for port in active_ports(machine)}
    places = usable_nics(topology)
    places = tuple(place for place in places if topology.nics[place].name in active) or places
    found = []
    for gpu_place, gpu in enumerate(topology.gpus):
        known = [(place, distance) for place in places if (distance := paths.nic(gpu_place, place)) is not None]
        least = min((distance for _, distance in known), key=lambda distance: distance.rank, default=None)
        names = tuple(topology.nics[place].name for place, distance in known if distance is least)
        found.append(Nearest(f"GPU{gpu.index}", least, names))
    return found


def switches_hidden(machine: Machine) -> bool:
    """Whether a virtual machine with GPUs and RDMA hides which are near to each other, and no file tells NCCL.

    Of EFA the plugin brings the file.
    """
    ports = [port for port in active_ports(machine) if not port.elastic]
    # A Grace machine has no switches to hide.
    if len(machine.hardware.gpus) < 2 or not ports or not virtual_machine(machine) or coherent(machine):
        return False
    if machine.variable("NCCL_TOPO_FILE") or machine.exists(VIRTUAL_TOPOLOGY):
        return False
    near = nearest_ports(machine)
    return all(one.distance is None or one.distance.rank > Distance.PXB.rank for one in near)
