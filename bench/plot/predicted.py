"""How models are predicted to scale to thousands of GPUs: one panel for each model."""

from __future__ import annotations

from pathlib import Path

from bench.plot.style import panels, save, styles, unframe
from bench.scaling.predicted import FLOOR, GBPS, STRATEGIES, read

_NAMES = {"stock": "stock DDP", "lossless": "best exact average", "lossy": "best with compression"}
_LINES = {"stock": ":", "lossless": "--", "lossy": "-."}


def draw_file(file: Path, path: Path) -> None:
    """Draw efficiency against GPUs: a colour for each network, a kind of line for each strategy."""
    given, predictions, _ = read(file)
    models = list(dict.fromkeys(each.model for each in predictions))
    title = f"Predicted, not measured: efficiency against one {given.gpu.upper()}"
    figure, axes = panels(len(models), title)
    colours = dict(zip(GBPS, (colour for colour, _ in styles([f"{gbps}" for gbps in GBPS])), strict=True))
    for name, panel in zip(models, axes, strict=False):
        own = [each for each in predictions if each.model == name]
        for gbps in GBPS:
            for strategy in STRATEGIES:
                line = [each for each in own if (each.gbps, each.strategy) == (gbps, strategy)]
                panel.plot(
                    [each.gpus for each in line],
                    [each.efficiency for each in line],
                    color=colours[gbps],
                    ls=_LINES[strategy],
                    lw=1.8,
                    label=f"{gbps} Gb/s, {_NAMES[strategy]}",
                )
        panel.axhline(FLOOR, color="#999999", lw=0.8)
        ticks = sorted({each.gpus for each in own})[::3]
        panel.set_xscale("log", base=2)
        panel.set_xticks(ticks, [str(gpus) for gpus in ticks])
        panel.set_ylim(0, 1.05)
        unframe(panel, f"{name}, batch {own[0].batch}", "GPUs", "efficiency")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        title=f"{given.gpus_per_node} GPUs to a node, {given.precision}, float32 gradients; grey line: {FLOOR}",
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    save(figure, path)
