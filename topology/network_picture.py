# SPDX-License-Identifier: Apache-2.0
"""Picture of a network: sites and racks as nested boxes with their nodes, and the links between them (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from topology.network import Network, between, rate_text
from topology.picture import Box, canvas, draw_box, drawable, save, write

# In inches: a node, the room around a box, for its label, and for the link that joins the boxes inside.
_WIDTH, _HEIGHT, _PAD, _LABEL, _LINK = 1.5, 0.46, 0.12, 0.34, 0.34
_COLUMNS = 4
_RED, _GREY = "#d64545", "#616e7c"


def boxes_of_network(network: Network) -> tuple[list[Box], list[tuple[float, float, float]]]:
    """Return the boxes, outer ones first, with y downwards from 0; and of each link its x and the y of two ends.

    A link that joins sites is a vertical line, with a horizontal one to each.
    """
    layout = _NestedBoxes(network)
    layout.add(range(len(network.nodes)), 0, 0.0, 0.0)
    return layout.boxes, layout.lines


class _NestedBoxes:
    def __init__(self, network: Network) -> None:
        self.network = network
        self.boxes: list[Box] = []
        self.lines: list[tuple[float, float, float]] = []  # x, y, to y; or x, y, y for one that leads to the right

    def add(self, nodes: Sequence[int], depth: int, x: float, y: float) -> tuple[float, float]:
        """Add the box of some nodes, of one site down to this depth. Return its right end and its lower end."""
        place = len(self.boxes)
        leaf = depth == len(self.network.levels)
        right, bottom = (self._nodes if leaf else self._parts)(nodes, depth, x, y + _LABEL)
        kind = "node" if depth % 2 == 0 else "switch"
        box = Box("node" if kind == "node" else "switch", x, bottom, right - x, bottom - y, self._label(nodes, depth))
        self.boxes.insert(place, box)
        return right, bottom

    def _label(self, nodes: Sequence[int], depth: int) -> tuple[str, ...]:
        levels = self.network.levels
        counted = f"{len(nodes)} nodes" if len(nodes) > 1 else "1 node"
        if depth == 0:
            return (
                f"{counted}, in {len(levels[0].counts)} {levels[0].name}s" if levels else f"{counted}, equally near",
            )
        name = self.network.sites[nodes[0]].split("/")[depth - 1]
        return (f"{name}: {counted}",)

    def _nodes(self, nodes: Sequence[int], depth: int, x: float, y: float) -> tuple[float, float]:
        rates = dict(zip(self.network.nodes, self.network.gbps, strict=False))
        for number, node in enumerate(nodes):
            name = self.network.nodes[node]
            text = (name, rate_text(rates[name])) if name in rates else (name,)
            left = x + _PAD + number % _COLUMNS * (_WIDTH + _PAD)
            low = y + (number // _COLUMNS + 1) * (_HEIGHT + _PAD) - _PAD
            self.boxes.append(Box("nic", left, low, _WIDTH, _HEIGHT, text, node, name in self.network.slow))
        columns, rows = min(len(nodes), _COLUMNS), -(-len(nodes) // _COLUMNS)
        return x + _PAD + columns * (_WIDTH + _PAD), y + rows * (_HEIGHT + _PAD)

    def _parts(self, nodes: Sequence[int], depth: int, x: float, y: float) -> tuple[float, float]:
        parts: dict[tuple[str, ...], list[int]] = {}
        for node in nodes:
            parts.setdefault(tuple(self.network.sites[node].split("/")[: depth + 1]), []).append(node)
        right, link, ends = x, x + _LINK / 2, []
        for path in sorted(parts, key=lambda path: parts[path][0]):
            end, low = self.add(parts[path], depth + 1, x + _LINK, y)
            ends.append(y + _LABEL / 2)
            right, y = max(right, end), low + _PAD
        self.lines += [(link, end, end) for end in ends]
        self.lines.append((link, ends[0], ends[-1]))
        return right + _PAD, y


def draw_network(network: Network, path: str | Path) -> None:
    """Draw a network into a file, in the format of its suffix; raises as `draw` of a machine does."""
    path = drawable(path)
    boxes, lines = boxes_of_network(network)
    right, bottom, edge = max(box.x + box.width for box in boxes), max(box.y for box in boxes), 0.03
    right = max(right, 6.4)
    axes = canvas(-edge, -bottom - edge, right + edge, edge)
    for box in boxes:
        draw_box(axes, Box(box.kind, box.x, -box.y, box.width, box.height, box.text, box.place, box.narrow))
    shared = any(level.shared for level in network.levels)
    _draw_lines(axes, lines, _RED if shared else _GREY)
    foot = [f"{level.name}s: {between(level)}" for level in network.levels]
    foot += ["red boxes: slow to all others"] if network.slow else []
    foot += [f"! not all was looked into: {network.unmeasured}"] if network.unmeasured else []
    write(axes, ["Network: the best rate of each node, and sites"], right, 0.2, 13, weight="bold", va="bottom")
    write(axes, foot, right, -bottom - 0.15, 9, va="top")
    save(axes, path)


def _draw_lines(axes: Any, lines: Sequence[tuple[float, float, float]], colour: str) -> None:
    for x, y, to_y in lines:
        to_x = x + _LINK / 2 if y == to_y else x
        axes.plot([x, to_x], [-y, -to_y], color=colour, linewidth=2.2, solid_capstyle="round")
