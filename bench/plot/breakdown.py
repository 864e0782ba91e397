"""Where the time of a step goes, in every training benchmark: a panel for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.plot.bars import draw_bars
from bench.plot.style import panels, save, styles
from bench.plot.training import world
from bench.training.report import read


def draw_files(files: Sequence[Path], path: Path) -> None:
    """Draw a panel for every file of bench.training."""
    found = [read(file) for file in files]
    tallest = max(len(outcomes) for _, outcomes in found)
    title = "Time of one step: computing, and communication that it waits for"
    figure, axes = panels(len(found), title, width=8.4, height=1.6 + 0.5 * tallest)
    for panel, (environment, outcomes) in zip(axes, found, strict=True):
        looks = styles([outcome.strategy for outcome in outcomes])
        draw_bars(panel, outcomes, looks, environment.compute_ms, world(environment))
    save(figure, path)
