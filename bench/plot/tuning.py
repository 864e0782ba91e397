"""The tuner's choice beside the fastest of all that could have been chosen, and stock DDP."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.plot.style import COLOURS, GREY, LIGHT_GREY, panels, save, unframe
from bench.tuning.record import read

_WIDTH = 0.27


def draw_file(file: Path, path: Path) -> None:
    """Draw three bars for each configuration of a file of bench.tuning: the step as a share of stock DDP's."""
    found = [(world, each) for world, configurations in read([file]) for each in configurations]
    figure, (panel,) = panels(1, "A step, as a share of stock DDP's in the same run", columns=1, width=11, height=6.5)
    places = np.arange(len(found))
    names = [f"{world.cluster}\n{each.model.split(':')[0]}, {'+'.join(each.allow)}" for world, each in found]
    bars = (
        ("without communication", LIGHT_GREY, [each.compute_ms / each.stock_ms for _, each in found]),
        ("fastest of all tried", GREY, [each.best_ms / each.stock_ms for _, each in found]),
        ("auto", COLOURS[1], [each.to_stock for _, each in found]),
    )
    for offset, (label, colour, shares) in zip((-1, 0, 1), bars, strict=True):
        panel.barh(places + offset * _WIDTH, shares, _WIDTH, color=colour, label=label)
    for place, (_, each) in zip(places, found, strict=True):
        panel.annotate(
            f"{each.tuned}: {each.to_best:.2f} of the fastest",
            (each.to_stock, place + _WIDTH),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    panel.set_yticks(places, names, fontsize=7)
    panel.invert_yaxis()
    panel.axvline(1.0, color="#999999", lw=0.8)
    unframe(panel, "", "share of stock DDP's step")
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=len(bars))
    save(figure, path)
