# SPDX-License-Identifier: Apache-2.0
"""Pictures of the evidence: buckets, bandwidth, convergence, predictions, scaling and tuning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from bench.evidence.bucketing import DEFAULT
from bench.evidence.convergence.report import PERCENT_ALLOWED, POINTS_ALLOWED, Run, Summary, summarize
from bench.evidence.convergence.report import read as read_convergence
from bench.evidence.prediction.report import read as read_prediction
from bench.evidence.scaling.predicted import GBPS, STRATEGIES
from bench.evidence.scaling.predicted import read as read_predicted
from bench.evidence.scaling.report import Point
from bench.evidence.scaling.report import read as read_scaling
from bench.evidence.training_run import NOTHING
from bench.evidence.tuning.report import read as read_tuning
from bench.plot.style import GREY, LIGHT_GREY, label_ends, label_of, log_bytes, panels, save, shades, style_of, unframe
from commopt.cost import Curve, Links
from commopt.probe.prober import nbytes_text

_ADAPTIVE = "adaptive"
_BUCKETING_TITLE = "Buckets that adapt, and buckets that were chosen by hand"


def draw_bucketing(file: Path, path: Path) -> None:
    """Draw a panel for each line of a file of bench.evidence.bucketing."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    figure, axes = panels(len(records), _BUCKETING_TITLE, columns=len(records))
    for panel, record in zip(axes, records, strict=True):
        _draw_contest(panel, record)
        if panel is not axes[0]:
            panel.set_yticklabels([])
    lines = "milliseconds of a step; ticks: of its turns; dashed: without communication"
    figure.supxlabel(lines, fontsize=9, color=GREY)
    save(figure, path)


def _draw_contest(axes: Axes, record: dict[str, Any]) -> None:
    standings = [standing for standing in record["standings"] if standing["name"] != NOTHING]
    nothing_ms = next(standing["step_ms"] for standing in record["standings"] if standing["name"] == NOTHING)
    for row, standing in enumerate(standings):
        name, step_ms, turns_ms = standing["name"], standing["step_ms"], standing["turns_ms"]
        axes.barh(row, step_ms, color=GREY if name == DEFAULT else _bucket_colour(name))
        axes.plot(turns_ms, [row] * len(turns_ms), "|", color="black", ms=7)
        where = (max(step_ms, *turns_ms), row)
        axes.annotate(f"{step_ms:.0f}", where, xytext=(4, 0), textcoords="offset points", va="center")
    axes.axvline(nothing_ms, color=GREY, ls="--", lw=1.2)
    rate = record["emulated_rate"] or "links not emulated"
    unframe(axes, f"{record['model']}, batch {record['batch']},\n{record['world_size']} ranks, {rate}", "")
    axes.grid(False)
    axes.set_yticks(range(len(standings)), [standing["name"] for standing in standings])
    axes.margins(x=0.18)  # room for the figures
    axes.invert_yaxis()


def _bucket_colour(name: str) -> str:
    return style_of(name).colour if name.endswith(_ADAPTIVE) else LIGHT_GREY


_FAR = 20  # from the least to the most: beyond, the axis is one of factors


def draw_busbw(files: Sequence[Path], path: Path) -> None:
    """Draw what every file has; rows in place, where there are such."""
    documents = [json.loads(file.read_text()) for file in files]
    figure, axes = panels(len(documents), "Bus bandwidth of collectives, GB/s")
    for panel, document in zip(axes, documents, strict=True):
        _draw_bandwidth(panel, document["rows"])
        collectives = ", ".join(dict.fromkeys(row["collective"] for row in document["rows"]))
        (first, *others) = sorted({row["nbytes"] for row in document["rows"]})
        unframe(
            panel,
            f"{collectives}\n{_world(document['environment'])}",
            "bytes of the message" if others else f"GB/s, messages of {nbytes_text(first)}",
        )
    save(figure, path)


def _draw_bandwidth(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line for each aggregator; bars where there is one length only."""
    names, sizes = list(dict.fromkeys(row["aggregator"] for row in rows)), {row["nbytes"] for row in rows}
    busbw = {
        name: [
            (row["nbytes"], (row["in_place"] or row["out_of_place"])["busbw_gbps"])
            for row in rows
            if row["aggregator"] == name
        ]
        for name in names
    }
    if len(sizes) == 1:
        for row, name in enumerate(names):
            axes.barh(row, busbw[name][0][1], color=style_of(name).colour)
            where = (busbw[name][0][1], row)
            axes.annotate(f"{where[0]:.3g}", where, xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.locator_params(axis="x", nbins=4)
        return
    for name in names:
        style = style_of(name)
        axes.plot(*zip(*busbw[name], strict=True), color=style.colour, marker=style.marker, ms=5, lw=1.8)
    axes.set_xscale("log", base=2)
    every = [value for line in axes.lines for value in np.asarray(line.get_ydata())]
    if max(every) > _FAR * min(every):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda nbytes, _: nbytes_text(nbytes))
    label_ends(axes, [(*busbw[name][-1], name, style_of(name).colour) for name in names])


def _world(environment: dict[str, Any]) -> str:
    ranks = "+".join(str(len(node)) for node in environment["nodes"])
    rate = environment["emulated_link_rate"]
    links = "links not emulated" if rate is None else f"{rate} links"
    return f"{ranks} ranks on {len(environment['nodes'])} node(s), {links}"


_OPTIMIZERS = {"sgd": "SGD with momentum", "adamw": "AdamW"}
# What is tried to understand a preset and is none that anybody would choose; tables have them.
_ABLATIONS = ("feedback=", "alternating", "min_elements", "momentum", "warmup", "start_step")


def draw_learning(file: Path, path: Path) -> None:
    """Draw a panel for every task and optimizer of a file of bench.evidence.convergence."""
    _, runs = read_convergence(file)
    found = [each for each in summarize(runs) if not any(word in each.strategy for word in _ABLATIONS)]
    pairs = sorted({(each.task, each.optimizer) for each in found}, key=lambda pair: (pair[0], pair[1] != "sgd"))
    figure, axes = panels(len(pairs), "How much worse than stock DDP it learns, by what it sends", height=3.9)
    for panel, (task, optimizer) in zip(axes, pairs, strict=True):
        own = [run for run in runs if (run.task, run.optimizer) == (task, optimizer)]
        _draw_learning(panel, [each for each in found if (each.task, each.optimizer) == (task, optimizer)], own)
    lines = "marks: means over the seeds, bars: their standard deviation; white: within what is promised"
    figure.supxlabel(lines, fontsize=9, color=GREY)
    save(figure, path)


def _draw_learning(axes: Axes, found: Sequence[Summary], runs: Sequence[Run]) -> None:
    """Draw a mark with its name for each strategy that compresses between nodes only."""
    sent = {
        run.strategy: run.inter_bytes_per_step * run.curve[-1].step / 2**20
        for run in runs
        if run.inter_bytes_per_step is not None
    }
    by_points = found[0].points is not None
    ends = []
    for each in found:
        if each.strategy not in sent or not each.strategy.startswith(("hierarchical", "LocalSGD", "Hierarchical")):
            continue  # stock DDP's bytes are not known, and flat presets send for four ranks
        style, worse = style_of(each.strategy), [-one if by_points else one for one in each.each]
        x, y = sent[each.strategy], each.percent_of_loss if each.points is None else -each.points
        spread = stdev(worse) if len(worse) > 1 else 0.0
        axes.errorbar(x, y, yerr=spread, color=style.colour, marker=style.marker, ms=6, capsize=2)
        ends.append((x, y, each.strategy.removeprefix("hierarchical_"), style.colour))
    allowed, (low, high) = POINTS_ALLOWED if by_points else PERCENT_ALLOWED, axes.get_ylim()
    axes.set_ylim(low, max(high, 1.2 * allowed))
    axes.axhline(0, color=GREY, lw=1)
    axes.axhspan(allowed, axes.get_ylim()[1], color=LIGHT_GREY, alpha=0.5, lw=0)
    what = "points of accuracy" if by_points else "% of the held-out loss"
    title = f"{found[0].task}, {_OPTIMIZERS.get(found[0].optimizer, found[0].optimizer)}: {what}"
    unframe(axes, title, "MiB sent between the nodes, in all")
    log_bytes(axes)
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


_MODEL_MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_prediction(file: Path, path: Path) -> None:
    """Draw by how much each prediction of a file of bench.evidence.prediction is off."""
    found = [each for _, configurations in read_prediction([file]) for each in configurations]
    errors = [abs(each.error) for each in found]
    off = f"off by {median(errors):.1%} in the median, {max(errors):.0%} at worst"
    figure, (panel,) = panels(1, f"{len(found)} steps predicted from probed links: {off}", columns=1)
    for band in (0.25, 0.10):  # the worst and the median error that were asked for
        panel.axhspan(-100 * band, 100 * band, color=LIGHT_GREY, alpha=0.4, lw=0)
    panel.axhline(0, color=GREY, lw=0.8)
    models = dict(zip(dict.fromkeys(each.model for each in found), _MODEL_MARKERS, strict=False))
    for each in found:
        colour = style_of(each.strategy).colour
        panel.plot(each.measured_ms, 100 * each.error, models[each.model], color=colour, ms=6, alpha=0.85)
    for strategy in dict.fromkeys(each.strategy for each in found):
        panel.plot([], [], "s", color=style_of(strategy).colour, label=strategy)
    for model, marker in models.items():
        panel.plot([], [], marker, color="white", mec=GREY, label=model)
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_ylim(-30, 30)
    unframe(panel, "Prediction less measurement, % of it; grey: 10 and 25 %", "measured step, ms")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def draw_scaling(file: Path, path: Path) -> None:
    """Draw a panel for every mode of a file of bench.evidence.scaling: what the network leaves of a step, by world."""
    environment, points = read_scaling(file)
    modes = list(dict.fromkeys(point.mode for point in points))
    model = f"{environment.parameters / 1e6:.1f}M-parameter {environment.model}"
    title = f"Share of a step that is no communication: {model}, {environment.emulated_rate} links"
    figure, axes = panels(len(modes), title)
    for mode, panel in zip(modes, axes, strict=True):
        _draw_points(panel, [point for point in points if point.mode == mode])
        unframe(panel, f"{mode} scaling", "nodes x ranks on each")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        title="filled: measured, hollow: predicted from probed links",
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    save(figure, path)


def _draw_points(axes: Axes, points: Sequence[Point]) -> None:
    """Draw a mark for each strategy in each world, and a hollow one where it was predicted."""
    worlds = sorted({(point.ranks, point.nodes) for point in points})
    strategies = list(dict.fromkeys(point.strategy for point in points))
    for number, strategy in enumerate(strategies):
        style, aside = style_of(strategy), 0.15 * (number - (len(strategies) - 1) / 2)
        own = [point for point in points if point.strategy == strategy]
        for part, face, label in ((own, style.colour, label_of(strategy)), (as_predicted(own), "white", None)):
            x = [worlds.index((point.ranks, point.nodes)) + aside for point in part]
            y = [point.communication_efficiency for point in part]
            axes.plot(x, y, style.marker, color=style.colour, mfc=face, ms=6, label=label)
    axes.set_xticks(range(len(worlds)), [f"{nodes} x {ranks // nodes}" for ranks, nodes in worlds])
    axes.set_ylim(0, 1.15)


def as_predicted(points: Sequence[Point]) -> list[Point]:
    """Return the points as they were predicted, those that were."""
    return [replace(point, step_ms=point.predicted_ms) for point in points if point.predicted_ms is not None]


def draw_tuning(file: Path, path: Path) -> None:
    """Draw three marks for each configuration of a file of bench.evidence.tuning: shares of stock DDP's step."""
    found = [(world, each) for world, configurations in read_tuning([file]) for each in configurations]
    figure, (panel,) = panels(1, "A step with auto, as a share of stock DDP's in the same run", columns=1, height=6.6)
    marks = (
        ("without communication", "|", LIGHT_GREY, [each.compute_ms / each.stock_ms for _, each in found]),
        ("fastest of all tried by hand", "o", GREY, [each.best_ms / each.stock_ms for _, each in found]),
        ("auto", "D", style_of("auto").colour, [each.to_stock for _, each in found]),
    )
    for label, marker, colour, shares in marks:
        face = colour if label == "auto" else "white"
        panel.plot(shares, range(len(found)), marker, color=colour, mfc=face, ms=7, mew=1.8, label=label)
    for row, (_, each) in enumerate(found):
        text = f"{each.tuned}: {each.to_best:.2f} of the fastest"
        where = (max(each.to_stock, each.best_ms / each.stock_ms), row)
        panel.annotate(text, where, xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)
    names = [f"{world.cluster}\n{each.model.split(':')[0]}: {'+'.join(each.allow)}" for world, each in found]
    panel.set_yticks(range(len(found)), names, fontsize=8.5)
    panel.invert_yaxis()
    panel.axvline(1.0, color=GREY, lw=0.8)
    panel.set_xlim(0, 1.75)  # room for what was chosen
    panel.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    unframe(panel, "", "share of stock DDP's step")
    figure.legend(loc="outside lower center", ncols=len(marks), frameon=False)
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
