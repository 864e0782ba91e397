"""A machine as JSON, and as text for people: a tree, a matrix of distances, notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from topology.facts.nics import node_nic_gbps, usable_nics
from topology.facts.nvlink import links_between, links_per_gpu, nvlink_kind
from topology.facts.paths import Paths
from topology.model import Distance, Topology
from topology.show.captions import cpu_words, gpu_words, link_words, nic_words, notes, summary
from topology.show.outline import Part, outline


def as_json(topology: Topology) -> dict[str, Any]:
    """Plain values that other tools may rely on; None for unknown.

    "nvlinks" counts the links that leave a GPU. "nearest_nics" is [] where there is no port to be near to, and None
    where there are some at an unknown distance. "nics" are all ports, virtual ones too; speeds are in Gb/s.
    """
    paths = Paths(topology)
    nearest = [paths.nearest(place) for place in range(len(topology.gpus))]
    unknown: list[str] | None = None if usable_nics(topology) else []
    return {
        "gpus": [
            {
                "index": gpu.index,
                "busid": gpu.busid,
                "numa": gpu.numa,
                "nvlinks": links,
                "nearest_nics": [topology.nics[place].name for place in near[0]] if near else unknown,
                "nearest_distance": near[1].value if near else None,
            }
            for gpu, links, near in zip(topology.gpus, links_per_gpu(topology), nearest, strict=True)
        ],
        "nics": [
            {
                "name": nic.name,
                "busid": nic.busid,
                "port": nic.port,
                "numa": nic.numa,
                "speed_gbps": nic.speed_gbps,
            }
            for nic in topology.nics
        ],
        "nvlink": nvlink_kind(topology),
        "node_nic_gbps": node_nic_gbps(topology),
        "warnings": list(topology.warnings),
    }


@dataclass(frozen=True)
class Line:
    """A line of text with what it is about, for colours."""

    text: str
    about: Literal["title", "node", "switch", "gpu", "nic", "plain", "warning"] = "plain"


def as_text(topology: Topology) -> list[Line]:
    """Everything about a machine, for a terminal."""
    lines = [Line(topology.source, "title"), Line(summary(topology)), *tree(topology)]
    if len(topology.gpus) + len(usable_nics(topology)) > 1 and topology.gpus:
        lines += [Line(""), *matrix(topology)]
    remarks = [Line(note) for note in notes(topology)] + [Line(f"! {text}", "warning") for text in topology.warnings]
    return [*lines, *([Line(""), *remarks] if remarks else [])]


def tree(topology: Topology) -> list[Line]:
    """NUMA nodes, switches, GPUs and network ports, as they hang together."""
    paths = Paths(topology)
    return [line for node in outline(topology) for line in _branch(topology, paths, node, "", "")]


def _branch(topology: Topology, paths: Paths, part: Part, first: str, rest: str) -> Iterator[Line]:
    label = f"switch {part.label}" if part.kind == "switch" and part.label else part.label or "switches"
    words = [word for word in (label, *_facts(topology, paths, part)) if word]
    yield Line(first + " · ".join(words), part.kind)
    for number, inside in enumerate(part.parts, 1):
        last = number == len(part.parts)
        yield from _branch(
            topology, paths, inside, rest + ("└─ " if last else "├─ "), rest + ("   " if last else "│  ")
        )


def _facts(topology: Topology, paths: Paths, part: Part) -> list[str]:
    link = link_words(part.device)
    if part.kind == "switch" or part.place is None:
        return [link]
    if part.kind == "node":
        cpu = topology.cpus[part.place]
        return [cpu_words(cpu), cpu.vendor or "", "" if part.parts else "nothing attached"]
    if part.kind == "nic":
        nic = topology.nics[part.place]
        return ["" if nic.busid in (nic.name, None) else str(nic.busid), nic_words(nic), link]
    gpu = topology.gpus[part.place]
    near = paths.nearest(part.place)
    nearest = f"nearest {', '.join(topology.nics[nic].name for nic in near[0])} ({near[1].value})" if near else ""
    return [gpu.busid or "", gpu_words(gpu), link, nearest]


def matrix(topology: Topology) -> list[Line]:
    """Distances of the GPUs to each other and to the network ports, NV# for a number of NVLinks."""
    paths = Paths(topology)
    gpus, nics = range(len(topology.gpus)), usable_nics(topology)
    names = [topology.nics[nic].name for nic in nics]
    legend = []
    if any(len(name) > 8 for name in names):
        legend = [Line(", ".join(f"NIC{place} = {name}" for place, name in enumerate(names)))]
        names = [f"NIC{place}" for place in range(len(names))]
    rows = [["", *(f"GPU{topology.gpus[gpu].index}" for gpu in gpus), *names]]
    for a in gpus:
        cells = ["X" if a == b else _cell(topology, paths.gpu(a, b), a, b) for b in gpus]
        rows.append([rows[0][a + 1], *cells, *(_distance(paths.nic(a, nic)) for nic in nics)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        Line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()) for row in rows
    ] + legend


def _cell(topology: Topology, distance: Distance | None, a: int, b: int) -> str:
    return f"NV{links_between(topology, a, b) or '?'}" if distance is Distance.NVL else _distance(distance)


def _distance(distance: Distance | None) -> str:
    return "?" if distance is None else distance.value
