# SPDX-License-Identifier: Apache-2.0
"""Pictures of convergence, predicted scaling and a probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator

from bench.evidence.convergence import report
from bench.evidence.convergence.plan import NULL
from bench.evidence.scaling.predicted import GBPS, STRATEGIES
from bench.evidence.scaling.predicted import read as read_predicted
from bench.plot.style import GREY, LIGHT_GREY, label_ends, panels, save, shades, style_of, unframe
from commopt.cost import Curve, Links
from commopt.probe.prober import nbytes_text

# Variants that explain a preset and that nobody would choose; tables have them.
_ABLATIONS = ("feedback=", "min_elements", "start_step", "scale=", "block=", "delay=", ", rate x")


def draw_learning(file: Path, path: Path) -> None:
    """Draw a panel for every optimizer of a file of bench.evidence.convergence."""
    summaries = report.compared(*report.read(file))
    found = [each for each in summaries if not any(word in each.strategy for word in _ABLATIONS)]
    optimizers = [name for name in report.OPTIMIZER_TITLES if any(each.optimizer == name for each in found)]
    figure, axes = panels(len(optimizers), "How much worse than stock DDP it learns, by what it sends", height=3.9)
    for panel, optimizer in zip(axes, optimizers, strict=True):
        _draw_learning(panel, [each for each in found if each.optimizer == optimizer])
    lines = "marks: means over paired seeds, bars: 95 % intervals; band: dense against itself, sums in another order"
    figure.supxlabel(f"{lines}; grey: worse than is promised", fontsize=9, color=GREY)
    save(figure, path)


def _draw_learning(axes: Axes, found: Sequence[report.Summary]) -> None:
    """Draw a mark with its name for each strategy whose bytes are known."""
    ends = []
    for each in found:
        middle, half = report.interval(each.each)
        if each.strategy == NULL:
            axes.axhspan(middle - half, middle + half, color="#56B4E9", alpha=0.3, lw=0)
        if each.sent is None:
            continue
        style = style_of(each.strategy)
        axes.errorbar(each.sent, middle, yerr=half, color=style.colour, marker=style.marker, ms=6, capsize=2)
        ends.append((each.sent, middle, each.strategy.removeprefix("hierarchical_"), style.colour))
    low, high = axes.get_ylim()
    axes.set_ylim(low, max(high, 1.2 * report.PERCENT_ALLOWED))
    axes.axhline(0, color=GREY, lw=1)
    axes.axhspan(report.PERCENT_ALLOWED, axes.get_ylim()[1], color=LIGHT_GREY, alpha=0.5, lw=0)
    title = f"{report.OPTIMIZER_TITLES[found[0].optimizer]}: % of the held-out loss"
    unframe(axes, title, "bytes between nodes, of float32's")
    axes.set_xscale("log")
    label_ends(axes, ends)


_STRATEGIES = {  # name, and a preset of its colour
    "stock": ("stock DDP", "ddp"),
    "lossless": ("best exact average", "hierarchical"),
    "lossy": ("best with compression", "powersgd"),
}
_SHOWN_MODELS = {"resnet50": "-", "bert-large": "--"}


def draw_predicted_scaling(file: Path, path: Path) -> None:
    """Draw efficiency against GPUs: a panel for each network, a colour for each strategy, a line for each model."""
    given, predictions, _ = read_predicted(file)
    models = [name for name in _SHOWN_MODELS if any(each.model == name for each in predictions)]
    title = f"Predicted, not measured: efficiency against one {given.gpu.upper()}"
    figure, axes = panels(len(GBPS), title, height=3.4)
    for gbps, panel in zip(GBPS, axes, strict=True):
        ends = []
        for model in models:
            for strategy in STRATEGIES:
                name, colour = _STRATEGIES[strategy][0], style_of(_STRATEGIES[strategy][1]).colour
                wanted = (model, gbps, strategy)
                own = [each for each in predictions if (each.model, each.gbps, each.strategy) == wanted]
                points = [(each.gpus, each.efficiency) for each in own]
                panel.plot(*zip(*points, strict=True), color=colour, ls=_SHOWN_MODELS[model], lw=1.8)
                ends.append((*points[-1], f"{name}, {model}", colour))
        panel.set_xscale("log", base=2)
        ticks = [each.gpus for each in (own[0], *own[2:])]
        panel.set_xticks(ticks, [str(count) for count in ticks])
        panel.set_ylim(0, 1.05)
        unframe(panel, f"{gbps:g} Gb/s between nodes", f"GPUs, {given.gpus_per_node} to a node")
        label_ends(panel, ends, gap=0.08)
    save(figure, path)


# ------------------------------------------------------------------------------------------------- probe

_LEVELS = {"intra": "Inside a node", "inter": "Between the nodes", "world": "All ranks as one group"}
_REACH = 4.0  # where curves are taken for extrapolated


def draw_probe(file: Path, path: Path) -> None:
    """Draw points and curves of a file of links, a panel for each level and one for encoding; one group at a time."""
    links = Links.load(file)
    shown: dict[str, dict[str, Curve]] = {}
    for key, curve in sorted(links.curves.items(), key=lambda item: ([*_LEVELS].index(item[0].level), item[0])):
        if key.groups == 1:
            shown.setdefault(f"{_LEVELS[key.level]}: {key.ranks} ranks", {})[key.primitive] = curve
    for work, curve in links.work.items():
        if work.kind == "encode":
            shown.setdefault("Encoding float32, on one rank", {})[work.what] = curve
    figure, axes = panels(len(shown), "What messages and compression cost", height=4.0)
    for panel_axes, (title, curves) in zip(axes, shown.items(), strict=True):
        _draw_curves(panel_axes, title, curves)
    header = links.header
    where = f"{len(header.nodes)} node(s), {'+'.join(map(str, header.nodes))} ranks, {header.device}"
    lines = "points: measured, the slowest rank's median; lines: fitted, dotted where extrapolated"
    how = f"{header.backend}, torch {header.torch}, {header.date[:10]}"
    figure.supxlabel(f"{lines}\n{where}, {how}", fontsize=9, color=GREY)
    save(figure, path)


def _draw_curves(axes: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    """Draw curves with their names at their ends; compressors have the colours of their methods."""
    known = [style_of(name).colour for name in curves]
    colours = known if set(known) != {GREY} else shades(len(curves))
    ends = []
    for (name, curve), colour in zip(curves.items(), colours, strict=True):
        nbytes, time_us = np.array(curve.points).T
        axes.plot(nbytes, time_us / 1e6, ls="", marker="o", ms=3.5, color=colour)
        last = nbytes[-1]
        for begin, end, line in ((nbytes[0], last, "-"), (last, last * _REACH, ":")):
            sizes = np.geomspace(begin, end, 160)
            axes.plot(sizes, [curve.time_us(each) / 1e6 for each in sizes], color=colour, ls=line, lw=1.4)
        kind, _, settings = name.rpartition("(")
        short = f"{kind}({settings.split(', ')[-1]}" if kind else name
        ends.append((sizes[-1], curve.time_us(sizes[-1]) / 1e6, short.replace("torch.", ""), colour))
    unframe(axes, f"{title} (fits: {mean(curve.mape for curve in curves.values()):.1%} off)", "bytes")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    (least, most), (fastest, slowest) = axes.get_xlim(), axes.get_ylim()
    axes.xaxis.set_major_locator(LogLocator(base=16 if most / least >= 16**3 else 4 if most / least >= 4**3 else 2))
    # Where all times are within a decade or two, powers of ten alone would be one tick or none.
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if slowest / fastest >= 1000 else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(lambda nbytes, _: nbytes_text(nbytes))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    label_ends(axes, ends)
