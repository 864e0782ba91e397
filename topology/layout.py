"""Where everything in the picture of a machine goes, in inches, as plain data.

Each PCIe switch is a bar with network ports above and GPUs below it, so that no line crosses another; NUMA nodes and
outer switches are boxes around. NVLinks are below the GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from topology.model import Topology
from topology.queries import direct_links, links_per_gpu, nvlink_kind
from topology.text import Part, cpu_words, gpu_words, is_narrow, link_words, outline, speed_words

_COLUMN, _GPU, _NIC, _BAR, _WIRE, _LABEL, _PAD = 1.25, 0.62, 0.44, 0.38, 0.36, 0.3, 0.12
_FABRIC, _REACH = 0.32, 0.5  # height of the NVSwitch bar, and from there to the GPUs
_MOST_STACKED = 4  # network ports on top of each other


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text: in its middle, or at its outer edge where it is around others."""

    kind: Literal["node", "outer", "switch", "gpu", "nic", "fabric"]
    x: float
    y: float
    width: float
    height: float
    text: tuple[str, ...]
    place: int | None = None
    """Of a GPU or port in the topology."""


@dataclass(frozen=True)
class Wire:
    """A vertical line between two boxes."""

    kind: Literal["pcie", "narrow", "nvlink"]
    x: float
    y: float
    to_y: float
    text: str


@dataclass(frozen=True)
class Arc:
    """Direct NVLinks between two GPUs."""

    x: float
    to_x: float
    y: float
    depth: float
    links: int


@dataclass(frozen=True)
class Layout:
    """The whole picture; y grows upwards."""

    boxes: tuple[Box, ...]
    wires: tuple[Wire, ...]
    arcs: tuple[Arc, ...]

    @property
    def span(self) -> tuple[float, float, float, float]:
        """Left, bottom, right, top."""
        return (
            min((box.x for box in self.boxes), default=0.0),
            min([box.y for box in self.boxes] + [arc.y - arc.depth for arc in self.arcs], default=0.0),
            max((box.x + box.width for box in self.boxes), default=0.0),
            max((box.y + box.height for box in self.boxes), default=0.0),
        )


def layout(topology: Topology) -> Layout:
    """Place the parts of a machine; NUMA nodes with nothing attached are left out."""
    nodes = [node for node in outline(topology) if node.parts]
    direct, switched = direct_links(topology), nvlink_kind(topology) == "switch"
    row = _Row(topology, nodes, _stacked(nodes))
    boxes, wires = row.boxes, row.wires
    gpus = {box.place: box for box in boxes if box.kind == "gpu" and box.place is not None}
    if switched:
        right = max(box.x + box.width for box in boxes)
        boxes.append(Box("fabric", 0.0, -_REACH - _FABRIC, right, _FABRIC, ("NVSwitch",)))
        wires += _into_fabric(topology, gpus)
    return Layout(tuple(boxes), tuple(wires), tuple(_arcs(direct, gpus)))


def _stacked(nodes: Sequence[Part]) -> int:
    """How many network ports go on top of each other, so that the columns of the GPUs are enough for them."""
    groups = [part for part in _groups(nodes) if part.own("gpu")]
    return min(
        _MOST_STACKED, max((ceil(len(part.own("nic")) / len(part.own("gpu"))) for part in groups), default=1) or 1
    )


def _groups(parts: Sequence[Part]) -> list[Part]:
    """The nodes and switches, inner ones too."""
    return [group for part in parts if part.parts for group in (part, *_groups(part.parts))]


def _own_columns(part: Part, stacked: int) -> int:
    return max(len(part.own("gpu")), ceil(len(part.own("nic")) / stacked))


class _Row:
    """Nodes side by side, with the lower edge of the GPUs at y 0."""

    def __init__(self, topology: Topology, nodes: Sequence[Part], stacked: int) -> None:
        self.topology, self.stacked = topology, stacked
        self.boxes: list[Box] = []
        self.wires: list[Wire] = []
        self.x = 0.0
        self.bar_y = _GPU + _WIRE if any(node.within("gpu") for node in nodes) else 0.0
        self.nic_y = self.bar_y + _BAR + _WIRE
        self.top = self.nic_y + stacked * _NIC if any(node.within("nic") for node in nodes) else self.bar_y + _BAR
        for node in nodes:
            self._around(node, "node", max(_depth(each) for each in nodes))

    def _around(self, part: Part, kind: Literal["node", "outer"], level: int) -> None:
        """A box, in it the devices directly below, then the inner switches."""
        left, place = self.x, len(self.boxes)
        self.x += _PAD
        if _own_columns(part, self.stacked):
            self._group(part, (part.label,) if kind == "outer" else (self._attachment(part),))
        for inner in part.parts:
            if inner.kind == "switch" and any(deeper.kind == "switch" for deeper in inner.parts):
                self._around(inner, "outer", level - 1)
            elif inner.kind == "switch":
                self._group(inner, _switch_words(inner))
        bottom, top = -_PAD * level, self.top + _PAD / 2 + _LABEL * level
        self.boxes.insert(place, Box(kind, left, bottom, self.x - left, top - bottom, self._label(part, kind)))
        self.x += _PAD if kind == "outer" else 2 * _PAD

    def _label(self, part: Part, kind: str) -> tuple[str, ...]:
        if kind == "outer":
            return (" · ".join(_switch_words(part)),)
        cpus = "" if part.place is None else cpu_words(self.topology.cpus[part.place]).split(" (")[0]
        return (" · ".join(filter(None, (part.label, cpus))),)

    def _attachment(self, part: Part) -> str:
        return "CPU" if self.topology.pci and part.place is not None else "PCIe"

    def _group(self, part: Part, words: tuple[str, ...]) -> None:
        """A bar with its GPUs below and its network ports above."""
        gpus, nics = part.own("gpu"), part.own("nic")
        columns = _own_columns(part, self.stacked)
        width = columns * _COLUMN
        self.boxes.append(Box("switch", self.x, self.bar_y, width - _PAD, _BAR, words))
        for number, gpu in enumerate(gpus):
            middle = self.x - _PAD / 2 + width * (number + 0.5) / len(gpus)
            self._device(gpu, middle, 0.0, _GPU, self._gpu_words(gpu))
            self._wire(middle, _GPU, self.bar_y, [gpu])
        stacks = min(len(nics), columns)
        for number in range(stacks):
            middle = self.x - _PAD / 2 + width * (number + 0.5) / stacks
            some = nics[len(nics) * number // stacks : len(nics) * (number + 1) // stacks]
            for height, nic in enumerate(reversed(some)):
                self._device(nic, middle, self.nic_y + height * _NIC, _NIC, self._nic_words(nic))
            self._wire(middle, self.bar_y + _BAR, self.nic_y, some)
        self.x += width

    def _device(self, part: Part, middle: float, y: float, height: float, words: tuple[str, ...]) -> None:
        width = _COLUMN - 2 * _PAD
        kind: Literal["gpu", "nic"] = "gpu" if part.kind == "gpu" else "nic"
        self.boxes.append(Box(kind, middle - width / 2, y, width, height, words, part.place))

    def _wire(self, x: float, y: float, to_y: float, parts: Sequence[Part]) -> None:
        words = list(dict.fromkeys(link_words(part.device) for part in parts))
        kind: Literal["pcie", "narrow"] = "narrow" if any(is_narrow(part.device) for part in parts) else "pcie"
        self.wires.append(Wire(kind, x, y, to_y, words[0] if len(words) == 1 else "various"))

    def _gpu_words(self, part: Part) -> tuple[str, ...]:
        gpu = self.topology.gpus[part.place or 0]
        alike = len({gpu_words(each) for each in self.topology.gpus}) == 1
        return tuple(filter(None, (part.label, _short(gpu.busid or ""), "" if alike else gpu_words(gpu))))

    def _nic_words(self, part: Part) -> tuple[str, ...]:
        nic = self.topology.nics[part.place or 0]
        port = f" port {nic.port}" if sum(each.name == nic.name for each in self.topology.nics) > 1 else ""
        return tuple(filter(None, (_short(part.label) + port, speed_words(nic.speed_gbps))))


def _depth(part: Part) -> int:
    """Boxes around the innermost switches, this one included."""
    return 1 + max((_depth(inner) for inner in part.parts if any(p.kind == "switch" for p in inner.parts)), default=0)


def _switch_words(part: Part) -> tuple[str, ...]:
    """Name and link towards the CPU; distances alone name no switch, and do not tell one from several."""
    if not part.label:
        return ("PCIe switches",)
    return tuple(filter(None, (f"PCIe switch {_short(part.label)}", link_words(part.device))))


def _short(busid: str) -> str:
    return busid.removeprefix("0000:")


def _into_fabric(topology: Topology, gpus: dict[int, Box]) -> list[Wire]:
    counts = links_per_gpu(topology)
    return [
        Wire(
            "nvlink",
            box.x + box.width / 2,
            -_REACH,
            box.y,
            str(counts[place] or "?"),
        )
        for place, box in gpus.items()
        if counts[place] != 0
    ]


def _arcs(direct: dict[tuple[int, int], int], gpus: dict[int, Box]) -> list[Arc]:
    """Links leave a GPU side by side, those to near peers outside, so that they nest and few cross."""
    arcs = []
    for (a, b), links in direct.items():
        x, to_x = _way_out(direct, gpus, a, b), _way_out(direct, gpus, b, a)
        arcs.append(Arc(x, to_x, gpus[a].y, 0.2 + 0.16 * abs(x - to_x) / _COLUMN, links))
    return arcs


def _way_out(direct: dict[tuple[int, int], int], gpus: dict[int, Box], place: int, peer: int) -> float:
    """Where the links to a peer leave a GPU."""
    own = gpus[place]
    peers = [b if a == place else a for a, b in direct if place in (a, b)]
    peers.sort(key=lambda other: (gpus[other].x > own.x, -gpus[other].x))
    return own.x + own.width * (peers.index(peer) + 1) / (len(peers) + 1)
