"""What training in a fixed number of steps ends with, against the bytes it sent: accuracy and loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from bench.convergence.plan import NO_FEEDBACK
from bench.convergence.plot import colour
from bench.convergence.report import Run, read
from bench.plot.style import GREY, MARKERS, log_bytes, panels, save, unframe

_OPTIMIZERS = {"sgd": "SGD with momentum", "adamw": "AdamW"}


def draw_file(file: Path, path: Path) -> None:
    """Draw a panel for every task and optimizer of a file of bench.convergence."""
    _, runs = read(file)
    pairs = sorted({(run.task, run.optimizer) for run in runs}, key=lambda pair: (pair[0], pair[1] != "sgd"))
    figure, axes = panels(len(pairs), "What training ends with, and what it sent for it", width=7.4, height=5.4)
    for panel, (task, optimizer) in zip(axes, pairs, strict=True):
        _draw_panel(panel, task, optimizer, [run for run in runs if (run.task, run.optimizer) == (task, optimizer)])
    save(figure, path)


def _draw_panel(axes: Axes, task: str, optimizer: str, runs: Sequence[Run]) -> None:
    by_accuracy = all(run.curve[-1].accuracy is not None for run in runs)
    shades: list[str] = []
    for strategy in dict.fromkeys(run.strategy for run in runs):
        own = [run for run in runs if run.strategy == strategy]
        ends = [100 * (run.curve[-1].accuracy or 0.0) if by_accuracy else run.loss for run in own]
        sent = [run.inter_bytes_per_step for run in own if run.inter_bytes_per_step is not None]
        if not sent:  # stock DDP is not commopt's: its bytes are not known, what it ends with is
            axes.axhline(mean(ends), color=GREY, lw=1, ls="--", label=strategy)
            continue
        mib = mean(sent) * own[0].curve[-1].step / 2**20
        shade = colour(strategy)
        marker = MARKERS[shades.count(shade) % len(MARKERS)]  # colours tell families apart, marks their members
        shades.append(shade)
        face = "white" if NO_FEEDBACK in strategy else shade
        axes.plot([mib], [mean(ends)], marker, color=shade, mfc=face, ms=7, label=strategy)
    what = "held-out accuracy, %" if by_accuracy else "held-out loss, nats per byte"
    unframe(axes, f"{task}, {_OPTIMIZERS.get(optimizer, optimizer)}", "MiB sent between the nodes, in all", what)
    log_bytes(axes)
    axes.legend(fontsize=6.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
