"""What was simulated: a table, a JSON document, and a picture of efficiency against GPUs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, TextIO

from commopt.display import require_drawable, show_table
from commopt.errors import ConfigurationError
from commopt.simulate.scaling import ScalingPoint
from commopt.version import __version__

FORMAT = 1
# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS = ("#444444", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C6D31")
_MARKERS = "os^DvP*X"
_MOST_NOTES = 6

CAPTION = (
    "Simulated, not measured. compute: of a usual rank; waiting: for the slowest; exposed: communication that nothing "
    "hides.\nMB sent: by a node to others in a step. efficiency: against one GPU, and one node with the same strategy."
)


def show(title: str, rows: Sequence[ScalingPoint], stream: TextIO | None = None) -> None:
    """Print a table of all rows, and below it what their figures leave out."""
    stream = sys.stdout if stream is None else stream
    headings = ["strategy", "fastest", "nodes", "GPUs", "batch", "step ms", "compute ms", "waiting ms", "exposed ms"]
    headings += ["MB sent", "samples /s", "% of GPU", "% of node"]
    show_table(title, [headings, *map(_cells, rows)], 2, CAPTION, stream)
    notes = list(dict.fromkeys(note for row in rows for note in row.outcome.notes))
    for note in notes[:_MOST_NOTES]:
        print(f"note: {note}", file=stream)
    if len(notes) > _MOST_NOTES:
        print(f"note: {len(notes) - _MOST_NOTES} more, which -o FILE writes", file=stream)


def _cells(row: ScalingPoint) -> list[str]:
    outcome = row.outcome
    times_us = (outcome.step_us, outcome.compute_us, outcome.waiting_us, outcome.exposed_us)
    return [
        row.strategy,
        "" if row.chosen == row.strategy else row.chosen,
        str(row.nodes),
        str(row.ranks),
        str(row.batch or "-"),
        *(f"{time_us / 1e3:.1f}" for time_us in times_us),
        f"{outcome.inter_bytes_per_node / 1e6:.1f}",
        f"{row.samples_per_s:.4g}" if row.batch else "-",
        f"{row.gpu_efficiency:.1%}",
        f"{row.node_efficiency:.1%}",
    ]


def show_smallest(
    batches: Mapping[str, int | None], efficiency: float, gpus: int, stream: TextIO | None = None
) -> None:
    """Print the smallest batch of each strategy."""
    stream = sys.stdout if stream is None else stream
    rows = [["strategy", "smallest batch"], *([name, str(batch or "none")] for name, batch in batches.items())]
    title = f"Samples per GPU that keep {efficiency:.0%} of one GPU's speed on {gpus} GPUs"
    show_table(title, rows, 1, "none: not with 65536 either.", stream)


def as_document(
    inputs: Mapping[str, Any], rows: Sequence[ScalingPoint], batches: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return what a file of results holds."""
    return {
        "format": FORMAT,
        "version": __version__,
        "inputs": dict(inputs),
        "rows": [_entry(row) for row in rows],
        "smallest_batch": dict(batches),
    }


def _entry(row: ScalingPoint) -> dict[str, Any]:
    entry: dict[str, Any] = asdict(row)
    outcome: dict[str, Any] = entry.pop("outcome")
    outcome["buckets"] = [{"nbytes": bucket.nbytes, "parameters": len(bucket.names)} for bucket in row.outcome.buckets]
    return entry | outcome | {"exposed_share": row.exposed_share}


def require_picture(path: Path, nodes: Sequence[int]) -> None:
    """Raise ConfigurationError where there will be nothing to draw, or nothing to draw it with."""
    require_drawable(path)
    if len(nodes) < 2:
        raise ConfigurationError(f"{path}: a curve needs two numbers of nodes or more; pass for example --nodes 1..64")


def draw(title: str, foot: str, rows: Sequence[ScalingPoint], path: Path) -> None:
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
