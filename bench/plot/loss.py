"""Held-out loss against wall time, or against bytes sent, in every training benchmark: a panel for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.plot.curves import Against, draw_curves
from bench.plot.style import panels, save, styles
from bench.plot.training import world
from bench.training.report import read


def draw_by_time(files: Sequence[Path], path: Path) -> None:
    """Draw the loss against the time of training."""
    _draw(files, path, "seconds", "Held-out loss by time of training")


def draw_by_bytes(files: Sequence[Path], path: Path) -> None:
    """Draw the loss against the bytes that left the nodes."""
    _draw(files, path, "mib", "Held-out loss by bytes sent between the nodes")


def _draw(files: Sequence[Path], path: Path, against: Against, title: str) -> None:
    found = [read(file) for file in files]
    figure, axes = panels(len(found), title, width=7.6, height=5.2)
    for panel, (environment, outcomes) in zip(axes, found, strict=True):
        looks = styles([outcome.strategy for outcome in outcomes])
        draw_curves(panel, environment, outcomes, looks, against, world(environment))
        if panel.lines:
            panel.legend(fontsize=7.5, frameon=False)
    save(figure, path)
