"""Steps as predicted against steps as measured: on the line a prediction is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bench.plot.style import LIGHT_GREY, panels, save, styles, unframe
from bench.prediction.record import Configuration, read

_BANDS = (0.25, 0.10)  # the worst and the median error that were asked for


def draw_file(file: Path, path: Path) -> None:
    """Draw a mark for each configuration of a file of bench.prediction: by strategy, and by model."""
    found = [each for _, configurations in read([file]) for each in configurations]
    errors = [abs(each.error) for each in found]
    off = f"off by {median(errors):.1%} in the median, {max(errors):.0%} at worst"
    figure, axes = panels(2, f"{len(found)} steps predicted from probed links: {off}")
    low, high = min(each.measured_ms for each in found) / 1.3, max(each.measured_ms for each in found) * 1.3
    for panel, what in zip(axes, ("strategy", "model"), strict=True):
        for band in _BANDS:
            below, above = ([factor * low, factor * high] for factor in (1 - band, 1 + band))
            panel.fill_between((low, high), below, above, color=LIGHT_GREY, alpha=0.5, lw=0)
        panel.plot((low, high), (low, high), color="#999999", lw=0.8)
        names = list(dict.fromkeys(getattr(each, what) for each in found))
        for name, (colour, marker) in zip(names, styles(names), strict=True):
            own: Sequence[Configuration] = [each for each in found if getattr(each, what) == name]
            measured, predicted = [each.measured_ms for each in own], [each.predicted_ms for each in own]
            panel.plot(measured, predicted, color=colour, marker=marker, ms=6, ls="", alpha=0.85, label=name)
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_xlim(low, high)
        panel.set_ylim(low, high)
        unframe(panel, f"by {what}; grey: 10 % and 25 %", "measured step, ms", "predicted step, ms")
        panel.legend(fontsize=8, frameon=False)
    save(figure, path)
