# SPDX-License-Identifier: Apache-2.0
"""A machine as JSON, and as readable text: a tree, a matrix of distances, notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from textwrap import wrap
from typing import Any, Literal

from topology.kernel_files import ranges
from topology.model import Cpu, Distance, Gpu, Nic, PciDevice, Topology
from topology.queries import (
    Paths,
    connected,
    links_between,
    links_per_gpu,
    node_nic_gbps,
    nvlink_kind,
    peer_bandwidth_gbps,
    usable_nics,
)

_WIDTH = 80


@dataclass(frozen=True)
class OutlinePart:
    """A NUMA node, a switch, a GPU or a network port."""

    kind: Literal["node", "switch", "gpu", "nic"]
    label: str
    place: int | None = None
    """Index in Topology.cpus, .gpus or .nics; None for a switch, and for a node inferred from distances."""
    device: PciDevice | None = None
    """Device in the PCI tree, with its link to the parent."""
    parts: tuple[OutlinePart, ...] = ()

    def within(self, kind: str) -> tuple[OutlinePart, ...]:
        """Return all parts of one kind inside, in order."""
        return tuple(found for part in self.parts for found in ((part,) if part.kind == kind else part.within(kind)))

    def own(self, kind: str) -> tuple[OutlinePart, ...]:
        """Return the parts of one kind directly inside."""
        return tuple(part for part in self.parts if part.kind == kind)


def outline(topology: Topology) -> tuple[OutlinePart, ...]:
    """Return the NUMA nodes in order, and a last node "place unknown" for parts without a place. No virtual ports."""
    nodes = _by_tree(topology) if topology.pci else _by_distance(topology)
    placed = {(part.kind, part.place) for node in nodes for kind in ("gpu", "nic") for part in node.within(kind)}
    lost = tuple(leaf for leaf in _leaves(topology) if (leaf.kind, leaf.place) not in placed)
    return (*nodes, OutlinePart("node", "place unknown", parts=lost)) if lost else tuple(nodes)


def _leaves(topology: Topology) -> list[OutlinePart]:
    gpus = [OutlinePart("gpu", f"GPU {gpu.index}", place) for place, gpu in enumerate(topology.gpus)]
    return gpus + [OutlinePart("nic", nic.name, place) for place, nic in enumerate(topology.nics) if not nic.virtual]


def _node_label(cpu: Cpu) -> str:
    return "NUMA node unknown" if cpu.numa is None else f"NUMA {cpu.numa}"


def _by_tree(topology: Topology) -> list[OutlinePart]:
    """Return the outline from the PCI tree. Parts without a PCI device are in the NUMA node that they name."""
    leaves: dict[str | None, list[OutlinePart]] = {}
    for leaf in _leaves(topology):
        leaves.setdefault(_subject(topology, leaf).busid, []).append(leaf)
    below: dict[str | None, list[OutlinePart]] = {}
    nodes: list[list[OutlinePart]] = [[] for _ in topology.cpus]
    for device in reversed(topology.pci):  # children before parents
        parts = [replace(leaf, device=device) for leaf in leaves.get(device.busid, [])]
        inside = tuple(below.pop(device.busid, []))
        if inside:
            parts = [OutlinePart("switch", device.busid, parts=inside, device=device), *parts]
        if device.parent is not None:
            below[device.parent] = parts + below.get(device.parent, [])
        elif device.cpu is not None:
            nodes[device.cpu][:0] = parts
    for place, cpu in enumerate(topology.cpus):
        for leaf in leaves.get(None, []):
            if cpu.numa is not None and _subject(topology, leaf).numa == cpu.numa:
                nodes[place].append(leaf)
    return [
        OutlinePart("node", _node_label(cpu), place, parts=tuple(nodes[place]))
        for place, cpu in enumerate(topology.cpus)
    ]


def _by_distance(topology: Topology) -> list[OutlinePart]:
    """Return the outline from distances and NUMA numbers: below SYS parts share a node, at PIX or PXB a switch."""
    leaves = {f"{leaf.kind.upper()}{leaf.place}": leaf for leaf in _leaves(topology)}
    near = [(a, b, far) for a, b, far in topology.stated or () if a in leaves and b in leaves]
    numas = {label: _subject(topology, leaf).numa for label, leaf in leaves.items()}
    same_node = [(a, b) for a, b, far in near if far not in (Distance.NVL, Distance.SYS)]
    same_node = [(a, b) for a, b in same_node if numas[a] == numas[b] or None in (numas[a], numas[b])]
    same_node += [(a, b) for a, b in combinations(leaves, 2) if numas[a] is not None and numas[a] == numas[b]]
    pairs = set(same_node)
    same_switch = [(a, b) for a, b, far in near if far in (Distance.PIX, Distance.PXB) and (a, b) in pairs]
    parts = []
    for group in connected(leaves, same_node):
        known = {numa for label in group if (numa := numas[label]) is not None}
        if len(group) == 1 and not known:
            continue
        cpu = next((place for place, cpu in enumerate(topology.cpus) if {cpu.numa} == known), None)
        switches = connected(group, [pair for pair in same_switch if pair[0] in group])
        inside = [[leaves[label] for label in switch] for switch in switches]
        parts.append(
            OutlinePart(
                "node",
                f"NUMA {known.pop()}" if len(known) == 1 else "NUMA node unknown",
                cpu,
                parts=tuple(
                    OutlinePart("switch", "", parts=tuple(some)) if len(some) > 1 else some[0] for some in inside
                ),
            )
        )
    return parts


def _subject(topology: Topology, leaf: OutlinePart) -> Gpu | Nic:
    place = leaf.place or 0
    return topology.gpus[place] if leaf.kind == "gpu" else topology.nics[place]


_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
_NVLINK = {
    "switch": "NVSwitch",
    "mesh": "NVLinks from each GPU to each other",
    "pairs": "NVLinks between pairs of GPUs",
    "hybrid_cube_mesh": "NVLinks as a hybrid cube mesh",
    "irregular": "irregular NVLinks",
    "none": "no NVLinks",
    "unknown": "NVLinks unknown",
}


def cpu_text(cpu: Cpu) -> str:
    """Return text such as "64 CPUs (0-31,64-95)"."""
    return f"{len(cpu.affinity)} CPUs ({ranges(cpu.affinity)})" if cpu.affinity else ""


def gpu_text(gpu: Gpu) -> str:
    """Return the model without its maker, otherwise the compute capability."""
    return gpu.name.removeprefix("NVIDIA ") if gpu.name else f"sm_{gpu.sm}" if gpu.sm is not None else ""


def nic_text(nic: Nic) -> str:
    """Return text such as "400 Gb/s InfiniBand"."""
    return " ".join(filter(None, (speed_text(nic.speed_gbps), nic.link_layer)))


def speed_text(gbps: float | None) -> str:
    """Return text such as "25 Gb/s"."""
    return "" if gbps is None else f"{gbps:.4g} Gb/s"


def link_text(device: PciDevice | None) -> str:
    """Return text such as "Gen5 x16", or "Gen5 x8 (of x16)" if the device supports more lanes.

    The generation is the best possible one: idle devices slow their links down.
    """
    if device is None:
        return ""
    gts = device.link_max.gts or device.link.gts
    width = device.link.width or device.link_max.width
    speed = "" if gts is None else f"Gen{_GENERATIONS[gts]}" if gts in _GENERATIONS else f"{gts:g} GT/s"
    lanes = f"x{width}" if width else ""
    if is_narrow(device):
        lanes += f" (of x{device.link_max.width})"
    return " ".join(filter(None, (speed, lanes)))


def is_narrow(device: PciDevice | None) -> bool:
    """Return whether a link uses fewer lanes than the device has."""
    return device is not None and bool(device.link.width) and (device.link.width or 0) < (device.link_max.width or 0)


def nvlink_text(topology: Topology) -> str:
    """Return text such as "NVSwitch, 18 NVLinks per GPU"."""
    linked = [count for count in links_per_gpu(topology) if count]
    counts = "-".join(map(str, sorted({min(linked), max(linked)}))) if linked else ""
    gpus = len(topology.gpus)
    where = "per GPU" if len(linked) == gpus else f"at {len(linked)} of {gpus} GPUs"
    kind = nvlink_kind(topology)
    if kind == "unknown" and linked:
        return f"{counts} NVLinks {where}, directly or through switches"
    return _NVLINK[kind] + (f", {counts} NVLinks {where}" if linked else "")


def summary(topology: Topology) -> str:
    """Return the machine in one line."""
    models = list(dict.fromkeys(filter(None, map(gpu_text, topology.gpus))))
    ports = [nic for nic in topology.nics if not nic.virtual]
    parts = [
        _counted(len(topology.gpus), "GPU") + (f" ({', '.join(models)})" if models else ""),
        nvlink_text(topology) if len(topology.gpus) > 1 else "",
        _counted(len(ports), "network port"),
        speed_text(node_nic_gbps(topology)) or ("speed unknown" if ports else ""),
    ]
    return " · ".join(filter(None, parts))


def notes(topology: Topology) -> list[str]:
    """Return further facts, a line each, without the warnings."""
    found = []
    pairs = list(combinations(range(len(topology.gpus)), 2))
    rates = [peer_bandwidth_gbps(topology, a, b) for a, b in pairs]
    known = sorted({rate for rate in rates if rate is not None})
    if known:
        span = speed_text(known[0]) + (f" to {speed_text(known[-1])}" if len(known) > 1 else "")
        some = "" if None not in rates else ", where known"
        found.append(f"GPU to GPU: {span} in each direction{some}")
    virtual = [nic.name for nic in topology.nics if nic.virtual]
    if virtual:
        more = f" and {len(virtual) - 6} more" if len(virtual) > 6 else ""
        found.append(f"without hardware of their own: {', '.join(virtual[:6])}{more}")
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def as_json(topology: Topology) -> dict[str, Any]:
    """Return plain values in a stable form for other tools; None if unknown.

    "nvlinks" is the number of links of a GPU. "nearest_nics" is [] if there are no ports, and None if their distances
    are unknown. "nics" has all ports, virtual ones too. Speeds are in Gb/s.
    """
    paths = Paths(topology)
    nearest = [paths.nearest(place) for place in range(len(topology.gpus))]
    unknown: list[str] | None = None if usable_nics(topology) else []
    gpus = [
        {
            **_fields(gpu, "index", "busid", "numa"),
            "nvlinks": links,
            "nearest_nics": [topology.nics[place].name for place in near[0]] if near else unknown,
            "nearest_distance": near[1].value if near else None,
        }
        for gpu, links, near in zip(topology.gpus, links_per_gpu(topology), nearest, strict=True)
    ]
    return {
        "gpus": gpus,
        "nics": [_fields(nic, "name", "busid", "port", "numa", "speed_gbps") for nic in topology.nics],
        "nvlink": nvlink_kind(topology),
        "node_nic_gbps": node_nic_gbps(topology),
        "warnings": list(topology.warnings),
    }


def _fields(of: Gpu | Nic, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def as_text(topology: Topology) -> list[str]:
    """Return all facts of a machine as lines for a terminal."""
    lines = [topology.source, summary(topology), *tree(topology)]
    if len(topology.gpus) + len(usable_nics(topology)) > 1 and topology.gpus:
        lines += ["", *matrix(topology)]
    remarks = [*notes(topology), *(f"! {warning}" for warning in topology.warnings)]
    return [*lines, *(["", *remarks] if remarks else [])]


def tree(topology: Topology) -> list[str]:
    """Return the tree of NUMA nodes, switches, GPUs and network ports."""
    paths = Paths(topology)
    return [line for node in outline(topology) for line in _branch(topology, paths, node, "", "")]


def _branch(topology: Topology, paths: Paths, part: OutlinePart, first: str, rest: str) -> Iterator[str]:
    label = f"switch {part.label}" if part.kind == "switch" and part.label else part.label or "switches"
    words = [word for word in (label, *_facts(topology, paths, part)) if word]
    yield first + " · ".join(words)
    for number, inside in enumerate(part.parts, 1):
        last = number == len(part.parts)
        yield from _branch(
            topology, paths, inside, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")
        )


def _facts(topology: Topology, paths: Paths, part: OutlinePart) -> list[str]:
    link = link_text(part.device)
    if part.kind == "switch" or part.place is None:
        return [link]
    if part.kind == "node":
        cpu = topology.cpus[part.place]
        # Devices that are neither GPUs nor network ports are not parts, but they are mentioned.
        others = [device for device in topology.pci if device.cpu == part.place and device.kind == "other"]
        unknown = any(device.pci_class is None for device in others)
        words = f"{_counted(len(others), 'device')} {'of unknown kind' if unknown else 'of other kinds'}"
        nothing = words if others else "nothing attached"
        return [cpu_text(cpu), cpu.vendor or "", "" if part.parts else nothing]
    if part.kind == "nic":
        nic = topology.nics[part.place]
        return ["" if nic.busid in (nic.name, None) else str(nic.busid), nic_text(nic), link]
    gpu = topology.gpus[part.place]
    near = paths.nearest(part.place)
    nearest = f"nearest {', '.join(topology.nics[nic].name for nic in near[0])} ({near[1].value})" if near else ""
    return [gpu.busid or "", gpu_text(gpu), link, nearest]


def matrix(topology: Topology) -> list[str]:
    """Return the distances of the GPUs to each other and to network ports, NV# for a number of NVLinks.

    Columns beyond a width of 80 characters follow below, with the row names repeated.
    """
    paths = Paths(topology)
    gpus, nics = range(len(topology.gpus)), usable_nics(topology)
    names = [topology.nics[nic].name for nic in nics]
    legend = []
    if any(len(name) > 8 for name in names):
        legend = wrap(", ".join(f"NIC{place} = {name}" for place, name in enumerate(names)), _WIDTH)
        names = [f"NIC{place}" for place in range(len(names))]
    rows = [["", *(f"GPU{topology.gpus[gpu].index}" for gpu in gpus), *names]]
    for a in gpus:
        cells = ["X" if a == b else _cell(topology, paths.gpu(a, b), a, b) for b in gpus]
        rows.append([rows[0][a + 1], *cells, *(_distance(paths.nic(a, nic)) for nic in nics)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    begin = 1
    while begin < len(widths):
        end, used = begin, widths[0]
        while end < len(widths) and (end == begin or used + 2 + widths[end] <= _WIDTH):
            used += 2 + widths[end]
            end += 1
        for row in rows:
            cells = [row[0].ljust(widths[0])]
            cells += [cell.ljust(width) for cell, width in zip(row[begin:end], widths[begin:end], strict=True)]
            lines.append("  ".join(cells).rstrip())
        begin = end
    return [*lines, *legend]


def _cell(topology: Topology, distance: Distance | None, a: int, b: int) -> str:
    return f"NV{links_between(topology, a, b) or '?'}" if distance is Distance.NVL else _distance(distance)


def _distance(distance: Distance | None) -> str:
    return "?" if distance is None else distance.value
