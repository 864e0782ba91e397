# SPDX-License-Identifier: Apache-2.0
"""Picture of a machine: NUMA nodes and switches as nested boxes, GPUs, network ports, NVLinks (needs matplotlib).

All GPUs are in one row, with the network ports of their switch above and NVLinks below.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

from topology.model import Topology, TopologyError
from topology.queries import direct_links, links_per_gpu, nvlink_kind
from topology.text import (
    OutlinePart,
    cpu_text,
    gpu_text,
    is_narrow,
    link_text,
    notes,
    nvlink_text,
    outline,
    speed_text,
    summary,
)

FORMATS = (".svg", ".png", ".pdf")

_INK, _RED, _GREEN = "#1f2933", "#d64545", "#4d7c0f"
_COLOURS = {  # fill and edge
    "node": ("#f5f7fa", "#9aa5b1"),
    "switch": ("#e4e9ef", "#616e7c"),
    "gpu": ("#b9de8f", _GREEN),
    "nic": ("#a9cdf0", "#2b6cb0"),
    "fabric": ("#8cbf4d", _GREEN),
}
# In inches: the width of a device, heights, the room around a box, for its label, and around the picture.
_COLUMN, _GPU, _NIC, _FABRIC, _PAD, _LABEL, _MARGIN = 1.25, 0.7, 0.6, 0.32, 0.12, 0.42, 0.2
_MOST_STACKED = 4  # network ports on top of each other
_NARROWEST = 6.4  # for the text
_CHARACTER = 0.58  # width of a character in font sizes
_MOST_WARNINGS = 4


@dataclass(frozen=True)
class Box:
    """A rectangle, in inches with y upwards, and lines of text: in its middle, or above the boxes inside."""

    kind: Literal["node", "switch", "gpu", "nic", "fabric"]
    x: float
    y: float
    width: float
    height: float
    text: tuple[str, ...]
    place: int | None = None
    """Index of the GPU or port in the topology."""
    narrow: bool = False
    """Whether its PCIe link uses fewer lanes than possible."""


@dataclass(frozen=True)
class Arc:
    """Direct NVLinks between the lower edges of two GPUs."""

    x: float
    to_x: float
    depth: float
    links: int


def boxes_of(topology: Topology) -> list[Box]:
    """Return the boxes of a machine, outer ones first, without NUMA nodes that have nothing attached."""
    nodes = [node for node in outline(topology) if node.parts]
    row = _PictureRow(topology, nodes)
    x, level = 0.0, max(map(_levels, nodes), default=0)
    for node in nodes:
        x = row.add(node, x, level) + _PAD
    if nvlink_kind(topology) == "switch":
        bottom = -level * _PAD - 2 * _FABRIC
        row.boxes.append(Box("fabric", 0.0, bottom, x - _PAD, _FABRIC, (nvlink_text(topology),)))
    return row.boxes


def _levels(part: OutlinePart) -> int:
    """Return the number of nested boxes, this one included."""
    return 1 + max(map(_levels, part.own("switch")), default=0)


def _groups(parts: Sequence[OutlinePart]) -> list[OutlinePart]:
    """Return the nodes and switches, inner ones too."""
    return [group for part in parts if part.parts for group in (part, *_groups(part.parts))]


class _PictureRow:
    """Nodes side by side, with the lower edge of the GPUs at y 0."""

    def __init__(self, topology: Topology, nodes: Sequence[OutlinePart]) -> None:
        self.topology = topology
        self.boxes: list[Box] = []
        # Ports are stacked so high that the columns of the GPUs suffice for them.
        heights = [ceil(len(part.own("nic")) / len(part.own("gpu"))) for part in _groups(nodes) if part.own("gpu")]
        self.stacked = min(_MOST_STACKED, max([1, *heights]))
        self.nic_y = _GPU + _PAD if topology.gpus else 0.0
        has_nics = any(node.within("nic") for node in nodes)
        self.top = self.nic_y + self.stacked * _NIC if has_nics else _GPU

    def add(self, part: OutlinePart, left: float, level: int) -> float:
        """Add a box with its devices and then its inner switches. Return its right end."""
        place, x = len(self.boxes), left + _PAD
        gpus, nics = part.own("gpu"), part.own("nic")
        columns = max(len(gpus), ceil(len(nics) / self.stacked))
        for number, gpu in enumerate(gpus):
            self._device(gpu, x + columns * _COLUMN * (number + 0.5) / len(gpus), 0.0, _GPU - _PAD)
        stacks = min(len(nics), columns)
        for number in range(stacks):
            middle = x + columns * _COLUMN * (number + 0.5) / stacks
            some = nics[len(nics) * number // stacks : len(nics) * (number + 1) // stacks]
            for height, nic in enumerate(reversed(some)):
                self._device(nic, middle, self.nic_y + height * _NIC, _NIC - _PAD)
        x += columns * _COLUMN
        for inner in part.own("switch"):
            x = self.add(inner, x, level - 1) + _PAD
        kind: Literal["node", "switch"] = "switch" if part.kind == "switch" else "node"
        bottom, top = -_PAD * level, self.top + _LABEL * level
        self.boxes.insert(place, Box(kind, left, bottom, x - left, top - bottom, self._label(part)))
        return x

    def _label(self, part: OutlinePart) -> tuple[str, ...]:
        if part.kind == "switch":  # distances alone neither name switches nor separate them
            words = (f"PCIe switch {_short(part.label)}" if part.label else "PCIe switches", link_text(part.device))
        else:
            cpus = "" if part.place is None else cpu_text(self.topology.cpus[part.place]).split(" (")[0]
            words = (part.label, cpus)
        return tuple(filter(None, words))

    def _device(self, part: OutlinePart, middle: float, y: float, height: float) -> None:
        width, place, link = _COLUMN - 2 * _PAD, part.place or 0, link_text(part.device)
        kind: Literal["gpu", "nic"] = "gpu" if part.kind == "gpu" else "nic"
        if kind == "gpu":
            gpu = self.topology.gpus[place]
            alike = len({gpu_text(each) for each in self.topology.gpus}) == 1
            words = [part.label, _short(gpu.busid or ""), "" if alike else gpu_text(gpu), link]
        else:
            nic = self.topology.nics[place]
            port = f" port {nic.port}" if sum(each.name == nic.name for each in self.topology.nics) > 1 else ""
            words = [_short(part.label) + port, speed_text(nic.speed_gbps), link]
        text = tuple(filter(None, words))
        self.boxes.append(Box(kind, middle - width / 2, y, width, height, text, place, is_narrow(part.device)))


def _short(busid: str) -> str:
    return busid.removeprefix("0000:")


def arcs_of(topology: Topology, boxes: Sequence[Box]) -> list[Arc]:
    """Return the direct NVLinks. At a GPU, links to near peers are on the outside, so that arcs nest and few cross."""
    direct = direct_links(topology)
    gpus = {box.place: box for box in boxes if box.kind == "gpu"}
    peers: dict[int, list[int]] = {}
    for a, b in direct:
        peers.setdefault(a, []).append(b)
        peers.setdefault(b, []).append(a)
    for place, others in peers.items():
        others.sort(key=lambda other, own=gpus[place].x: (gpus[other].x > own, -gpus[other].x))  # type: ignore[misc]

    def start_of(place: int, peer: int) -> float:
        return gpus[place].x + gpus[place].width * (peers[place].index(peer) + 1) / (len(peers[place]) + 1)

    ends = [(start_of(a, b), start_of(b, a), links) for (a, b), links in direct.items()]
    return [Arc(x, to_x, 0.2 + 0.16 * abs(x - to_x) / _COLUMN, links) for x, to_x, links in ends]


def draw(topology: Topology, path: str | Path) -> None:
    """Draw a machine into a file, in the format of its suffix: .svg, .png or .pdf.

    Raises TopologyError for another suffix or without matplotlib, OSError if the file cannot be written.
    """
    path = drawable(path)
    boxes = boxes_of(topology)
    arcs = arcs_of(topology, boxes)
    right = max([_NARROWEST] + [box.x + box.width for box in boxes])
    top = max((box.y + box.height for box in boxes), default=0.0)
    bottom = min([box.y for box in boxes] + [-arc.depth for arc in arcs], default=-0.1)
    edge = 0.03  # half the line width of a box at the border
    axes = canvas(-edge, bottom - edge, right + edge, top + edge)
    for box in boxes:
        draw_box(axes, box)
    _draw_nvlinks(axes, topology, boxes, arcs)
    source = re.sub(r"\S*/(?=\S)", "", topology.source)  # without folders
    write(axes, [source], right, top + 0.6, 13, weight="bold", va="bottom")
    write(axes, [summary(topology)], right, top + 0.45, 10, va="top")
    write(axes, _foot(topology, arcs), right, bottom - 0.15, 8, va="top")
    save(axes, path)


def drawable(path: str | Path) -> Path:
    """Return the path of a picture. Raises TopologyError for another suffix or without matplotlib."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise TopologyError(f"{path}: unknown picture format; pass a name that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise TopologyError("--plot needs matplotlib: pip install matplotlib") from None
    return path


def canvas(left: float, bottom: float, right: float, top: float) -> Any:
    """Return axes without ticks, whose units are inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(right - left, top - bottom), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(left, right), ylim=(bottom, top))
    axes.set_axis_off()
    return axes


def save(axes: Any, path: Path) -> None:
    """Write a picture, the same file for the same content. Raises OSError if it cannot be written."""
    import matplotlib

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "topology"}):
        axes.figure.savefig(path, dpi=150, metadata=metadata, bbox_inches="tight", pad_inches=_MARGIN)


def write(axes: Any, texts: list[str], width: float, y: float, points: float, **style: str) -> None:
    """Write lines that fit `width` inches. Numbers stay with their units, and `$` is escaped."""
    texts = [text.replace("$", r"\$").replace(" Gb/s", "\N{NO-BREAK SPACE}Gb/s") for text in texts]
    lines = [line for text in texts for line in textwrap.wrap(text, int(width * 72 / (points * _CHARACTER)))]
    axes.text(0.0, y, "\n".join(lines), fontsize=points, color=_INK, **style)


def _foot(topology: Topology, arcs: Sequence[Arc]) -> list[str]:
    counts = sorted({arc.links for arc in arcs})
    span = "" if not counts else f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    lines = [f"green lines: {span} NVLink(s), the more the thicker"] if counts else []
    lines += notes(topology) + [f"! {warning}" for warning in topology.warnings[:_MOST_WARNINGS]]
    more = len(topology.warnings) - _MOST_WARNINGS
    return lines + ([f"! {more} more warnings"] if more > 0 else [])


def draw_box(axes: Any, box: Box) -> None:
    """Draw one box, with its text scaled to fit."""
    from matplotlib.patches import FancyBboxPatch

    fill, edge = _COLOURS[box.kind]
    axes.add_patch(
        FancyBboxPatch(
            (box.x, box.y),
            box.width,
            box.height,
            boxstyle="round,pad=0,rounding_size=0.05",
            facecolor=fill,
            edgecolor=_RED if box.narrow else edge,
            linewidth=2.2 if box.narrow else 1.0,
        )
    )
    around = box.kind in ("node", "switch")
    step = 0.16 if around else box.height / (len(box.text) + 0.2)
    first = box.y + (box.height - 0.14 if around else box.height / 2 + (len(box.text) - 1) / 2 * step)
    for number, text in enumerate(box.text):
        axes.text(
            box.x + (0.1 if around else box.width / 2),
            first - number * step,
            text,
            fontsize=min(9.0 if number == 0 else 8.0, (box.width - 0.1) * 72 / (_CHARACTER * 1.15 * len(text))),
            weight="bold" if number == 0 else "normal",
            color=_INK,
            ha="left" if around else "center",
            va="center_baseline",
        )


def _draw_nvlinks(axes: Any, topology: Topology, boxes: Sequence[Box], arcs: Sequence[Arc]) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    counts = links_per_gpu(topology)
    for fabric in (box for box in boxes if box.kind == "fabric"):
        for gpu in (box for box in boxes if box.kind == "gpu" and counts[box.place or 0]):
            middle = gpu.x + gpu.width / 2
            axes.plot([middle, middle], [fabric.y + fabric.height, gpu.y], color=_GREEN, linewidth=2.2)
    for arc in arcs:
        low = -arc.depth * 4 / 3  # a cubic curve reaches three quarters of the way to its control points
        points = [(arc.x, 0.0), (arc.x, low), (arc.to_x, low), (arc.to_x, 0.0)]
        curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
        width = 1.0 + 2.0 * arc.links / max(each.links for each in arcs)
        axes.add_patch(PathPatch(curve, fill=False, edgecolor=_GREEN, linewidth=width, alpha=0.85))
