"""The machine as nested parts, for text and picture alike: NUMA nodes, the switches in them, what hangs below those."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from topology.model import Cpu, Distance, Gpu, Nic, PciDevice, Topology


@dataclass(frozen=True)
class Part:
    """A NUMA node, a switch, a GPU or a network port."""

    kind: Literal["node", "switch", "gpu", "nic"]
    label: str
    place: int | None = None
    """In Topology.cpus, .gpus or .nics; None for a switch, and for a node that only distances point to."""
    device: PciDevice | None = None
    """In the PCI tree, with its link towards what it is in."""
    parts: tuple[Part, ...] = ()

    def within(self, kind: str) -> tuple[Part, ...]:
        """All parts of one kind in here, in order."""
        return tuple(found for part in self.parts for found in ((part,) if part.kind == kind else part.within(kind)))

    def own(self, kind: str) -> tuple[Part, ...]:
        """The parts of one kind directly in here."""
        return tuple(part for part in self.parts if part.kind == kind)


def outline(topology: Topology) -> tuple[Part, ...]:
    """The NUMA nodes in order, and last a node "place unknown" if anything has no place. No virtual ports."""
    nodes = _by_tree(topology) if topology.pci else _by_distance(topology)
    placed = {(part.kind, part.place) for node in nodes for kind in ("gpu", "nic") for part in node.within(kind)}
    lost = tuple(leaf for leaf in _leaves(topology) if (leaf.kind, leaf.place) not in placed)
    return (*nodes, Part("node", "place unknown", parts=lost)) if lost else tuple(nodes)


def _leaves(topology: Topology) -> list[Part]:
    gpus = [Part("gpu", f"GPU {gpu.index}", place) for place, gpu in enumerate(topology.gpus)]
    return gpus + [Part("nic", nic.name, place) for place, nic in enumerate(topology.nics) if not nic.virtual]


def _node_label(cpu: Cpu) -> str:
    return "NUMA node unknown" if cpu.numa is None else f"NUMA {cpu.numa}"


def _by_tree(topology: Topology) -> list[Part]:
    """As the PCI tree has it; what has no PCI device is with the NUMA node that it names."""
    leaves: dict[str | None, list[Part]] = {}
    for leaf in _leaves(topology):
        leaves.setdefault(_subject(topology, leaf).busid, []).append(leaf)
    below: dict[str | None, list[Part]] = {}
    nodes: list[list[Part]] = [[] for _ in topology.cpus]
    for device in reversed(topology.pci):  # children before parents
        parts = [replace(leaf, device=device) for leaf in leaves.get(device.busid, [])]
        inside = tuple(below.pop(device.busid, []))
        if inside:
            parts = [Part("switch", device.busid, parts=inside, device=device), *parts]
        if device.parent is not None:
            below[device.parent] = parts + below.get(device.parent, [])
        elif device.cpu is not None:
            nodes[device.cpu][:0] = parts
    for place, cpu in enumerate(topology.cpus):
        for leaf in leaves.get(None, []):
            if cpu.numa is not None and _subject(topology, leaf).numa == cpu.numa:
                nodes[place].append(leaf)
    return [Part("node", _node_label(cpu), place, parts=tuple(nodes[place])) for place, cpu in enumerate(topology.cpus)]


def _by_distance(topology: Topology) -> list[Part]:
    """As distances and NUMA numbers point to it: what is nearer than SYS shares a node, what is PIX or PXB a switch."""
    leaves = {f"{leaf.kind.upper()}{leaf.place}": leaf for leaf in _leaves(topology)}
    near = [(a, b, far) for a, b, far in topology.stated or () if a in leaves and b in leaves]
    numas = {label: _subject(topology, leaf).numa for label, leaf in leaves.items()}
    same_node = {(a, b) for a, b, far in near if far not in (Distance.NVL, Distance.SYS) and _agree(numas[a], numas[b])}
    same_node |= {(a, b) for a, b in combinations(leaves, 2) if numas[a] is not None and numas[a] == numas[b]}
    same_switch = {(a, b) for a, b, far in near if far in (Distance.PIX, Distance.PXB)} & same_node
    nodes = [group for group in _joined(leaves, same_node) if len(group) > 1 or numas[group[0]] is not None]
    parts = []
    for group in nodes:
        known = {numa for label in group if (numa := numas[label]) is not None}
        cpu = next((place for place, cpu in enumerate(topology.cpus) if {cpu.numa} == known), None)
        inside = [[leaves[label] for label in switch] for switch in _joined(group, same_switch)]
        parts.append(
            Part(
                "node",
                f"NUMA {known.pop()}" if len(known) == 1 else "NUMA node unknown",
                cpu,
                parts=tuple(Part("switch", "", parts=tuple(some)) if len(some) > 1 else some[0] for some in inside),
            )
        )
    return parts


def _subject(topology: Topology, leaf: Part) -> Gpu | Nic:
    place = leaf.place or 0
    return topology.gpus[place] if leaf.kind == "gpu" else topology.nics[place]


def _agree(a: int | None, b: int | None) -> bool:
    return a is None or b is None or a == b


def _joined(labels: Iterable[str], pairs: set[tuple[str, str]]) -> list[list[str]]:
    """The labels in groups that the pairs connect, in the order of their first members."""
    groups: list[list[str]] = []
    for label in labels:
        partners = {b if a == label else a for a, b in pairs if label in (a, b)}
        touched = [group for group in groups if partners & set(group)]
        merged = [member for group in touched for member in group] + [label]
        groups = [group for group in groups if group not in touched]
        groups.append(merged)
    order = {label: place for place, label in enumerate(labels)}
    return sorted((sorted(group, key=order.__getitem__) for group in groups), key=lambda group: order[group[0]])
