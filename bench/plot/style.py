# SPDX-License-Identifier: Apache-2.0
"""What all pictures have in common: sizes that can be read at 830 pixels, a colour for each method, labels at lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

_WIDTH = 10.0  # inches: shown 830 pixels wide, a point of 10 is 11.5 pixels high
_DPI = 160
rcParams.update({"font.size": 10, "axes.titlesize": 11, "figure.titlesize": 13, "figure.titleweight": "bold"})

GREY = "#555555"
LIGHT_GREY = "#D9D9D9"
# One colour for each method, in all pictures: Okabe and Ito's, which the colour-blind can tell apart, and some more.
# The first that fits a name counts.
_METHODS = (
    (("auto",), "#000000"),
    (("powersgd", "PowerSGD"), "#009E73"),
    (("dgc", "DGC"), "#CC79A7"),
    (("onebit", "OneBit"), "#6A3D9A"),
    (("bits=2",), "#882255"),
    (("bits=4",), "#D55E00"),
    (("quantized", "Quantize"), "#E69F00"),
    (("fp16", "bf16", "float16"), "#56B4E9"),
    (("period", "LocalSGD"), "#44AA99"),
    (("hierarchical", "Hierarchical", "lossless"), "#0072B2"),
    (("flat", "commopt"), "#8C6D31"),
)
_MARKERS = {"torch": "^", "unoverlapped": "v", "hierarchical": "o"}
_LABELS = {
    "ddp": "stock DDP",
    "torch_fp16": "torch's fp16 hook",
    "torch_bf16": "torch's bf16 hook",
    "torch_powersgd": "torch's PowerSGD hook",
    "unoverlapped_powersgd": "plain PowerSGD",
}


class Style(NamedTuple):
    """How a method is drawn: its colour; what is not commopt's has dashed lines and marks of its own."""

    colour: str
    marker: str
    line: str


def style_of(name: str) -> Style:
    """Return the style of a strategy; stock DDP and torch's own collectives are grey."""
    colour = next((colour for words, colour in _METHODS if any(word in name for word in words)), GREY)
    marker = next((marker for word, marker in _MARKERS.items() if name.startswith(word)), "s")
    line = {"torch": "--", "unoverlapped": ":"}.get(name.partition("_")[0], "-")
    return Style(colour, marker if colour != GREY else "X", line)


def label_of(name: str) -> str:
    """Return the name of a strategy for a reader."""
    return _LABELS.get(name, "auto" if name.startswith("auto:") else name)


def shades(count: int) -> list[str]:
    """Return colours of what is no method: networks, collectives."""
    return [colormaps["viridis"](share) for share in np.linspace(0, 0.9, count)]


def unframe(axes: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    """Give a panel its words, a faint grid and no box."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def log_bytes(axes: Axes) -> None:
    """Give a panel a horizontal axis of MiB by factors, with plain numbers."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda mib, _: f"{mib:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def label_ends(axes: Axes, ends: Iterable[tuple[float, float, str, str]], gap: float = 0.055) -> None:
    """Write (x, y, text, colour) beside a panel at the height of y, no closer than `gap` of the panel's height.

    To be called when limits and scales are final.
    """
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # so that they stay what the heights are reckoned with
    to_axes = axes.transData + axes.transAxes.inverted()
    placed = sorted(ends, key=lambda end: end[1])
    heights = _apart([to_axes.transform((x, y))[1] for x, y, _, _ in placed], gap)
    for (x, y, text, colour), height in zip(placed, heights, strict=True):
        axes.annotate(
            text,
            xy=(x, y),
            xytext=(1.04, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3},
            annotation_clip=False,
        )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return increasing heights moved up until they are `gap` apart, and all of them down again where they leave 1."""
    moved: list[float] = []
    for height in heights:
        moved.append(max([height, *(last + gap for last in moved[-1:])]))
    return [height - max(0.0, moved[-1] - 1.0) for height in moved]


def panels(count: int, title: str, *, columns: int = 2, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels in rows of `columns`, and its panels; height: of one, in inches."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(_WIDTH, height * rows + 0.6), layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def save(figure: Figure, path: Path) -> None:
    """Write the picture in the format of its suffix."""
    figure.savefig(path, dpi=_DPI)
