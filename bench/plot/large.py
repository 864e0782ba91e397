# SPDX-License-Identifier: Apache-2.0
"""The larger models of the convergence benchmark: what a method costs in loss by what it sends, and the way there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from bench.evidence.convergence.large import TASKS
from bench.evidence.convergence.large_table import sent_bytes
from bench.evidence.convergence.report import OPTIMIZER_TITLES, Run, Summary, read, summarize
from bench.plot.style import GREY, label_of, log_bytes, save, style_of, unframe
from bench.training.report import STOCK

_MODELS = {"gpt-5m": "GPT of 5.1 million parameters", "resnet18": "ResNet-18"}
_SHORTER = {
    "hierarchical_": "",
    ":density=0.015": "",
    "quantized:bits=2": "2 bits",
    "onebit_local:period=16:delay=4:fragments=4": "local SGD,\none bit",
    "onebit": "one bit",
    "dgc": "DGC",
    "powersgd": "PowerSGD",
    ":adam=True": "\nafter Adam",
}


def draw(file: Path, path: Path) -> None:
    """Draw a row for each model and optimizer: how much worse by bytes, loss by steps, loss by bytes."""
    environment, runs = read(file)
    nodes, summaries = len(environment.ranks_per_node), summarize(runs)
    by_kind: dict[tuple[str, str], list[Summary]] = {
        (task.name, optimizer): [each for each in summaries if each.key[:2] == (task.name, optimizer)]
        for task in TASKS
        for optimizer, _ in task.learning_rates
    }
    shown = {kind: own for kind, own in by_kind.items() if len(own) > 1}
    if not shown:
        raise ValueError(f"{file} has no two methods for the same model and optimizer")
    figure = Figure(figsize=(10.0, 3.7 * len(shown) + 0.6), layout="constrained")
    figure.suptitle("What is lost by sending less")
    panels = figure.subplots(len(shown), 3, squeeze=False, width_ratios=(1.7, 1, 1))
    for (front, by_steps, by_bytes), ((task, optimizer), own) in zip(panels, shown.items(), strict=True):
        trainings = {each.strategy: [run for run in runs if run.key[:3] == each.key] for each in own}
        sent = {name: mean(sent_bytes(run, nodes) for run in each) / 2**20 for name, each in trainings.items()}
        steps = trainings[own[0].strategy][0].curve[-1].step
        _draw_front(front, own, {name: steps * mib for name, mib in sent.items()})
        what = "% of loss" if own[0].points is None else "points of accuracy"
        title = f"{_MODELS[task]}, {OPTIMIZER_TITLES[optimizer]}: {what} lost"
        unframe(front, title, "MiB sent between the nodes, in all")
        _draw_curves(by_steps, trainings, dict.fromkeys(sent, 1.0))
        unframe(by_steps, "Held-out loss by steps", "steps")
        _draw_curves(by_bytes, trainings, sent)
        unframe(by_bytes, "Held-out loss by MiB", "MiB sent")
        for axes in (front, by_bytes):
            log_bytes(axes)
            axes.xaxis.set_major_locator(LogLocator())
    lines = "bars: standard deviation over the seeds; dashed line: nothing is better with fewer bytes"
    figure.supxlabel(f"{lines}; dashed curve: stock DDP, its bytes a ring's", fontsize=9, color=GREY)
    save(figure, path)


def front_of(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the names of those (bytes, loss) that none beats in both, from the fewest bytes on."""
    found: list[str] = []
    for name in sorted(points, key=lambda name: points[name]):
        if not found or points[name][1] < points[found[-1]][1]:
            found.append(name)
    return found


def _draw_front(axes: Axes, own: Sequence[Summary], sent: Mapping[str, float]) -> None:
    """Draw a mark with its name for each method, and a line through those that none beats."""
    points = {}
    for each in own:
        style = style_of(each.strategy)
        y = each.percent_of_loss if each.points is None else -each.points
        points[each.strategy] = where = (sent[each.strategy], y)
        spread = stdev(each.each) if len(each.each) > 1 else 0.0
        axes.errorbar(*where, yerr=spread, color=style.colour, marker=style.marker, ms=7, capsize=2, zorder=3)
        strategy, _, how = each.strategy.partition(", ")
        name = label_of(strategy) + (",\nshort first moment" if "betas" in how else "")
        for long, short in _SHORTER.items():
            name = name.replace(long, short)
        axes.annotate(name, where, (-6, 3), textcoords="offset points", ha="right", color=style.colour, fontsize=8)
    best = [points[name] for name in front_of(points)]
    axes.plot(*zip(*best, strict=True), color=GREY, lw=1, ls="--", zorder=1)
    axes.axhline(0, color=GREY, lw=0.8)
    axes.set_xlim(min(sent.values()) / 8, max(sent.values()) * 1.5)  # names stand on the left
    axes.margins(y=0.16)


def _draw_curves(axes: Axes, trainings: Mapping[str, Sequence[Run]], scale: Mapping[str, float]) -> None:
    """Draw the mean held-out loss by steps times `scale`, a line for each method."""
    for name, runs in trainings.items():
        style = style_of(name)
        looks = zip(*(run.curve for run in runs), strict=True)
        curve = [(look[0].step, [point.held_out_loss for point in look]) for look in looks]
        xs = [scale[name] * step for step, _ in curve]
        ys = [mean(inf if loss is None else loss for loss in losses) for _, losses in curve]
        axes.plot(xs, ys, color=style.colour, lw=1.4, ls="--" if name in STOCK else "-")
    lowest = min(min(np.asarray(line.get_ydata())) for line in axes.lines)
    early = max(np.asarray(line.get_ydata())[len(curve) // 8] for line in axes.lines)
    axes.set_ylim(lowest - 0.05 * (early - lowest), early)  # where curves part, not where they begin
    axes.yaxis.set_major_locator(MaxNLocator(5))
