"""Adaptive buckets against DDP's default and every cap one could have tried: a panel for each model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.bucketing.contest import DEFAULT, NOTHING
from bench.plot.style import COLOURS, GREY, LIGHT_GREY, panels, save, unframe

_ADAPTIVE = "adaptive"
_TITLE = "Buckets that adapt, and buckets that were chosen by hand"


def draw_file(file: Path, path: Path) -> None:
    """Draw a panel for each line of a file of bench.bucketing."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    figure, axes = panels(len(records), _TITLE, columns=len(records), width=5.4)
    for panel, record in zip(axes, records, strict=True):
        _draw(panel, record)
    save(figure, path)


def _draw(axes: Axes, record: dict[str, Any]) -> None:
    standings = [standing for standing in record["standings"] if standing["name"] != NOTHING]
    nothing_ms = next(standing["step_ms"] for standing in record["standings"] if standing["name"] == NOTHING)
    rows = range(len(standings))
    axes.barh(rows, [standing["step_ms"] for standing in standings], color=[_colour(s["name"]) for s in standings])
    for row, standing in zip(rows, standings, strict=True):
        axes.plot(standing["turns_ms"], [row] * len(standing["turns_ms"]), "|", color="black", ms=9)
        axes.annotate(
            f"{standing['step_ms']:.0f}",
            (max(standing["step_ms"], *standing["turns_ms"]), row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.axvline(nothing_ms, color=GREY, ls="--", lw=1.2)
    rate = record["emulated_rate"] or "links not emulated"
    title = f"{record['model']}, batch {record['batch']}, {record['world_size']} ranks, {rate}"
    unframe(axes, title, "step, ms (ticks: turns)\ndashed: without communication")
    axes.grid(False)
    axes.set_yticks(rows, [standing["name"] for standing in standings])
    axes.margins(x=0.15)  # room for the figures
    axes.invert_yaxis()


def _colour(name: str) -> str:
    if name.endswith(_ADAPTIVE):
        return COLOURS[2]
    return GREY if name == DEFAULT else LIGHT_GREY
