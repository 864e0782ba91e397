# SPDX-License-Identifier: Apache-2.0
"""What all pictures have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

# Okabe and Ito's colours, which the colour-blind can tell apart, and two more.
COLOURS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#6A3D9A", "#8C6D31", "#882255", "#44AA99")
MARKERS = ("s", "D", "o", "^", "v", "P", "*", "p", "<", ">")
GREY = "#555555"
LIGHT_GREY = "#D9D9D9"
_STOCK_STYLE = (GREY, "X")  # what the rest stands against
_STOCK = ("ddp", "hsdp", "fsdp", "torch", "ddp default")

Style = tuple[str, str]


def styles(names: Sequence[str]) -> list[Style]:
    """Return a colour and a marker for each strategy; stock DDP and torch's own are grey."""
    spare = cycle(zip(COLOURS, MARKERS, strict=True))
    style_of = {name: _STOCK_STYLE if name in _STOCK else next(spare) for name in dict.fromkeys(names)}
    return [style_of[name] for name in names]


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


def panels(
    count: int, title: str, *, columns: int = 2, width: float = 6.6, height: float = 4.6
) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels in rows of `columns`, and its panels; inches of one panel."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=15, fontweight="bold")
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def save(figure: Figure, path: Path) -> None:
    """Write the picture in the format of its suffix."""
    figure.savefig(path, dpi=110)
