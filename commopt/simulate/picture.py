"""The picture of a scaling: how efficient each strategy is on more and more GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from commopt.display import require_drawable
from commopt.errors import ConfigurationError
from commopt.simulate.scaling import Row

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#444444", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C6D31")
_MARKERS = "os^DvP*X"


def require_picture(path: Path, nodes: Sequence[int]) -> None:
    """Raise ConfigurationError where there will be nothing to draw, or nothing to draw it with."""
    require_drawable(path)
    if len(nodes) < 2:
        raise ConfigurationError(f"{path}: a curve needs two numbers of nodes or more; pass for example --nodes 1..64")


def draw(title: str, foot: str, rows: Sequence[Row], path: Path) -> None:
    """Draw efficiency against GPUs into a file, in the format of its suffix. Raises ConfigurationError, OSError."""
    require_drawable(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 5.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    names = list(dict.fromkeys(row.strategy for row in rows))
    for name, colour, marker in zip(names, cycle(_COLOURS), cycle(_MARKERS), strict=False):
        points = [(row.ranks, 100 * row.gpu_efficiency) for row in rows if row.strategy == name]
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, ms=5, lw=1.6, label=name)
    ranks = sorted({row.ranks for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(count) for count in ranks], minor=False)
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    axes.set_xlabel("GPUs")
    axes.set_ylabel("efficiency against one GPU")
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.supxlabel(foot, fontsize=8.5, color="#444444")
    figure.savefig(path, dpi=110)
