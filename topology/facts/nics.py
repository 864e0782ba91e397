"""Which network ports count, and what they carry together."""

from __future__ import annotations

from topology.model import Topology


def usable_nics(topology: Topology) -> tuple[int, ...]:
    """Return the places of the ports that can be rails, in order.

    Ports on a PCI device; where there is none (a virtual machine that hides it, a matrix without bus ids), every port
    that is not known to be virtual. Bridges, veth and docker0 never count, whatever speed they claim.
    """
    real = [place for place, nic in enumerate(topology.nics) if not nic.virtual]
    return tuple([place for place in real if topology.nics[place].busid is not None] or real)


def rail_nics(topology: Topology) -> tuple[int, ...]:
    """Return the places of the ports that training uses, in order.

    The usable ones that do GPUDirect RDMA; where none is known to, those that may; else all usable ones. Beside such
    ports, the others are there for storage and log-in.
    """
    usable = usable_nics(topology)
    surely = tuple(place for place in usable if topology.nics[place].gdr)
    perhaps = tuple(place for place in usable if topology.nics[place].gdr is None)
    return surely or perhaps or usable


def node_nic_gbps(topology: Topology) -> float | None:
    """Return what this node can send at once, in Gb/s: the sum over its rails whose speed is known.

    Ports without a speed add nothing; None when no speed is known.
    """
    speeds = [topology.nics[place].speed_gbps for place in rail_nics(topology)]
    known = [speed for speed in speeds if speed is not None]
    return sum(known) if known else None
