"""The picture of a machine: NUMA nodes, switches, GPUs, network ports and the links between them (needs matplotlib)."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from topology.layout import Arc, Box, Layout, Wire, layout
from topology.model import Topology, TopologyError
from topology.text import notes, summary

FORMATS = (".svg", ".png", ".pdf")

_INK = "#1f2933"
_COLOURS = {  # fill and edge
    "node": ("#f5f7fa", "#9aa5b1"),
    "outer": ("#e4e9ef", "#9aa5b1"),
    "switch": ("#cbd2d9", "#616e7c"),
    "gpu": ("#b9de8f", "#4d7c0f"),
    "nic": ("#a9cdf0", "#2b6cb0"),
    "fabric": ("#8cbf4d", "#4d7c0f"),
}
_WIRES = {"pcie": "#616e7c", "narrow": "#d64545", "nvlink": "#4d7c0f"}
_MARGIN = 0.2
_NARROWEST = 6.4  # inches: room for the text
_LINE = 1.5  # line height in font sizes
_CHARACTER = 0.58  # width of a character in font sizes
_MOST_WARNINGS = 4


def draw(topology: Topology, path: str | Path) -> None:
    """Draw a machine into a file, in the format of its suffix: .svg, .png or .pdf.

    Raises TopologyError for another suffix and where matplotlib is missing, OSError when the file cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise TopologyError(f"{path}: no format to draw in; pass a name that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise TopologyError("--plot needs matplotlib: pip install matplotlib") from None
    placed = layout(topology)
    left, bottom, right, top = placed.span
    width = max(right - left, _NARROWEST)
    left = (left + right - width) / 2
    blocks = [
        (_wrapped([re.sub(r"\S*/(?=\S)", "", topology.source)], width, 13), 13, "bold"),  # without folders
        (_wrapped([summary(topology)], width, 10), 10, "normal"),
    ]
    foot = _wrapped(_foot(topology, placed), width, 8)
    head_height = sum(_height(lines, points) for lines, points, _ in blocks) + 0.15
    foot_height = _height(foot, 8) + 0.15
    x0, y0 = left - _MARGIN, bottom - foot_height - _MARGIN
    wide, high = width + 2 * _MARGIN, top - bottom + head_height + foot_height + 2 * _MARGIN
    figure = Figure(figsize=(wide, high), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(x0, x0 + wide), ylim=(y0, y0 + high))
    axes.set_axis_off()
    for box in placed.boxes:
        _box(axes, box)
    for wire in placed.wires:
        _wire(axes, wire)
    for arc in placed.arcs:
        _arc(axes, arc, max(each.links for each in placed.arcs))
    y = top + head_height
    for lines, points, weight in blocks:
        axes.text(left, y, "\n".join(lines), fontsize=points, weight=weight, color=_INK, va="top")
        y -= _height(lines, points)
    axes.text(left, bottom - 0.15, "\n".join(foot), fontsize=8, color=_INK, va="top")
    with matplotlib.rc_context({"svg.hashsalt": "topology"}):  # the same file for the same machine
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _foot(topology: Topology, placed: Layout) -> list[str]:
    counts = sorted({arc.links for arc in placed.arcs})
    lines = notes(topology)
    if len(counts) > 1:
        lines.insert(0, f"green lines: {counts[0]} to {counts[-1]} NVLinks, the more the thicker")
    elif counts:
        lines.insert(0, f"green lines: {counts[0]} NVLink{'s' if counts[0] > 1 else ''} each")
    lines += [f"! {warning}" for warning in topology.warnings[:_MOST_WARNINGS]]
    more = len(topology.warnings) - _MOST_WARNINGS
    return lines + ([f"! {more} more warnings"] if more > 0 else [])


def _wrapped(texts: list[str], width: float, points: float) -> list[str]:
    """Lines that fit `width` inches, each number on one line with its unit; `$` is no formula."""
    characters = int(width * 72 / (points * _CHARACTER))
    texts = [text.replace("$", r"\$").replace(" Gb/s", "\N{NO-BREAK SPACE}Gb/s") for text in texts]
    return [line for text in texts for line in textwrap.wrap(text, characters)]


def _height(lines: list[str], points: float) -> float:
    return len(lines) * points * _LINE / 72


def _box(axes: Any, box: Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, edge = _COLOURS[box.kind]
    around = box.kind in ("node", "outer")
    axes.add_patch(
        FancyBboxPatch(
            (box.x, box.y),
            box.width,
            box.height,
            boxstyle="round,pad=0,rounding_size=0.05",
            facecolor=fill,
            edgecolor=edge,
            linewidth=1.0,
            zorder=0 if around else 2,
        )
    )
    if around:
        points = _fitting(box.text[0], box.width - 0.2, 9.5, bold=True)
        top = box.y + box.height - 0.07
        axes.text(box.x + 0.1, top, box.text[0], fontsize=points, weight="bold", color=_INK, va="top")
        return
    step = box.height / (len(box.text) + 0.5)
    for number, text in enumerate(box.text):
        y = box.y + box.height / 2 + ((len(box.text) - 1) / 2 - number) * step
        strong = number == 0 and box.kind in ("gpu", "nic", "fabric")
        axes.text(
            box.x + box.width / 2,
            y,
            text,
            fontsize=_fitting(text, box.width - 0.08, 9.5 if strong else 8, bold=strong),
            weight="bold" if strong else "normal",
            color=_INK,
            ha="center",
            va="center_baseline",
            zorder=3,
        )


def _wire(axes: Any, wire: Wire) -> None:
    colour = _WIRES[wire.kind]
    axes.plot([wire.x, wire.x], [wire.y, wire.to_y], color=colour, linewidth=2.2, solid_capstyle="butt", zorder=1)
    axes.text(
        wire.x + 0.06,
        wire.y + (wire.to_y - wire.y) * (0.3 if wire.kind == "nvlink" else 0.5),  # outside the NUMA box
        wire.text,
        fontsize=7 if wire.kind != "narrow" else 6,
        color=colour,
        va="center_baseline",
        zorder=3,
    )


def _arc(axes: Any, arc: Arc, most: int) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Curve

    low = arc.y - arc.depth * 4 / 3  # a cubic curve reaches three quarters of the way to its control points
    points = [(arc.x, arc.y), (arc.x, low), (arc.to_x, low), (arc.to_x, arc.y)]
    curve = Curve(points, [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4])
    width = 1.0 + 2.0 * arc.links / most
    axes.add_patch(PathPatch(curve, fill=False, edgecolor=_WIRES["nvlink"], linewidth=width, zorder=1, alpha=0.85))


def _fitting(text: str, width: float, points: float, bold: bool) -> float:
    """The font size, at most `points`, at which `text` is not wider than `width` inches."""
    return min(points, width * 72 / (_CHARACTER * (1.15 if bold else 1.0) * max(len(text), 1)))
