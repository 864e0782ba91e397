# SPDX-License-Identifier: Apache-2.0
"""Pictures of the evidence: buckets, bandwidth, convergence, predictions, scaling and tuning."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from bench.evidence.bucketing import DEFAULT
from bench.evidence.convergence.plan import NO_FEEDBACK
from bench.evidence.convergence.report import Run
from bench.evidence.convergence.report import read as read_convergence
from bench.evidence.prediction.report import Configuration
from bench.evidence.prediction.report import read as read_prediction
from bench.evidence.scaling.predicted import FLOOR, GBPS, STRATEGIES
from bench.evidence.scaling.predicted import read as read_predicted
from bench.evidence.scaling.report import Point, efficiency_of_1_rank
from bench.evidence.scaling.report import read as read_scaling
from bench.evidence.training_run import NOTHING
from bench.evidence.tuning.report import read as read_tuning
from bench.plot.style import COLOURS, GREY, LIGHT_GREY, MARKERS, log_bytes, panels, save, styles, unframe
from commopt.cost import Curve, Links
from commopt.probe.prober import nbytes_text
from commopt.probe.report import gigabytes_per_s

_ADAPTIVE = "adaptive"
_BUCKETING_TITLE = "Buckets that adapt, and buckets that were chosen by hand"


def draw_bucketing(file: Path, path: Path) -> None:
    """Draw a panel for each line of a file of bench.evidence.bucketing."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    figure, axes = panels(len(records), _BUCKETING_TITLE, columns=len(records), width=5.4)
    for panel, record in zip(axes, records, strict=True):
        _draw_contest(panel, record)
    save(figure, path)


def _draw_contest(axes: Axes, record: dict[str, Any]) -> None:
    standings = [standing for standing in record["standings"] if standing["name"] != NOTHING]
    nothing_ms = next(standing["step_ms"] for standing in record["standings"] if standing["name"] == NOTHING)
    rows = range(len(standings))
    axes.barh(
        rows, [standing["step_ms"] for standing in standings], color=[_bucket_colour(s["name"]) for s in standings]
    )
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


def _bucket_colour(name: str) -> str:
    if name.endswith(_ADAPTIVE):
        return COLOURS[2]
    return GREY if name == DEFAULT else LIGHT_GREY


_FAR = 20  # from the least to the most: beyond, the axis is one of factors


def draw_busbw(files: Sequence[Path], path: Path) -> None:
    """Draw what every file has; rows in place, where there are such."""
    documents = [json.loads(file.read_text()) for file in files]
    figure, axes = panels(len(documents), "Bus bandwidth of collectives")
    for panel, document in zip(axes, documents, strict=True):
        _draw_bandwidth(panel, document["rows"])
        collectives = ", ".join(dict.fromkeys(row["collective"] for row in document["rows"]))
        unframe(panel, f"{collectives}, {_world(document['environment'])}", "bytes of the message", "GB/s")
    save(figure, path)


def _draw_bandwidth(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["aggregator"] for row in rows))
    for name, (colour, marker) in zip(names, styles(names), strict=True):
        own = [row for row in rows if row["aggregator"] == name]
        nbytes = [row["nbytes"] for row in own]
        busbw_gbps = [(row["in_place"] or row["out_of_place"])["busbw_gbps"] for row in own]
        axes.plot(nbytes, busbw_gbps, color=colour, marker=marker, ms=6, lw=1.8, label=name)
    axes.set_xscale("log", base=2)
    every = [value for line in axes.lines for value in np.asarray(line.get_ydata())]
    if max(every) > _FAR * min(every):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda nbytes, _: nbytes_text(nbytes))
    axes.legend(fontsize=8, frameon=False)


def _world(environment: dict[str, Any]) -> str:
    ranks = "+".join(str(len(node)) for node in environment["nodes"])
    rate = environment["emulated_link_rate"]
    links = "links not emulated" if rate is None else f"{rate} links"
    return f"{ranks} ranks on {len(environment['nodes'])} node(s), {links}"


# One colour for each way to compress; what is exact is grey.
_FAMILIES = {
    "quantized": "#E69F00",
    "onebit": "#D55E00",
    "dgc": "#0072B2",
    "powersgd": "#009E73",
    "bf16": "#56B4E9",
    "(period": "#CC79A7",
}
_OPTIMIZERS = {"sgd": "SGD with momentum", "adamw": "AdamW"}


def draw_learning(file: Path, path: Path) -> None:
    """Draw a panel for every task and optimizer of a file of bench.evidence.convergence."""
    _, runs = read_convergence(file)
    pairs = sorted({(run.task, run.optimizer) for run in runs}, key=lambda pair: (pair[0], pair[1] != "sgd"))
    figure, axes = panels(len(pairs), "What training ends with, and what it sent for it", width=7.4, height=5.4)
    for panel, (task, optimizer) in zip(axes, pairs, strict=True):
        _draw_learning(panel, task, optimizer, [run for run in runs if (run.task, run.optimizer) == (task, optimizer)])
    save(figure, path)


def _draw_learning(axes: Axes, task: str, optimizer: str, runs: Sequence[Run]) -> None:
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
        shade = next((colour for family, colour in _FAMILIES.items() if family in strategy), GREY)
        marker = MARKERS[shades.count(shade) % len(MARKERS)]  # colours tell families apart, marks their members
        shades.append(shade)
        face = "white" if NO_FEEDBACK in strategy else shade
        axes.plot([mib], [mean(ends)], marker, color=shade, mfc=face, ms=7, label=strategy)
    what = "held-out accuracy, %" if by_accuracy else "held-out loss, nats per byte"
    unframe(axes, f"{task}, {_OPTIMIZERS.get(optimizer, optimizer)}", "MiB sent between the nodes, in all", what)
    log_bytes(axes)
    axes.legend(fontsize=6.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


_STRATEGY_NAMES = {"stock": "stock DDP", "lossless": "best exact average", "lossy": "best with compression"}
_STRATEGY_LINES = {"stock": ":", "lossless": "--", "lossy": "-."}


def draw_predicted_scaling(file: Path, path: Path) -> None:
    """Draw efficiency against GPUs: a colour for each network, a kind of line for each strategy."""
    given, predictions, _ = read_predicted(file)
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
                    ls=_STRATEGY_LINES[strategy],
                    lw=1.8,
                    label=f"{gbps} Gb/s, {_STRATEGY_NAMES[strategy]}",
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


_BANDS = (0.25, 0.10)  # the worst and the median error that were asked for


def draw_prediction(file: Path, path: Path) -> None:
    """Draw a mark for each configuration of a file of bench.evidence.prediction: by strategy, and by model."""
    found = [each for _, configurations in read_prediction([file]) for each in configurations]
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


_Share = Callable[[Point], "float | None"]


def draw_scaling(file: Path, path: Path) -> None:
    """Draw two panels for every mode of a file of bench.evidence.scaling."""
    environment, points = read_scaling(file)
    modes = list(dict.fromkeys(point.mode for point in points))
    model = f"{environment.parameters / 1e6:.1f}M-parameter {environment.model}"
    figure, axes = panels(2 * len(modes), f"Scaling of a {model}, {environment.emulated_rate} links")
    for index, mode in enumerate(modes):
        own = [point for point in points if point.mode == mode]
        efficiency, left = axes[2 * index : 2 * index + 2]
        _draw_points(efficiency, own, _of_1_rank(own))
        _draw_computing_alone(efficiency, own)
        unframe(efficiency, f"{mode} scaling: efficiency", "ranks", "what a rank gets done, of one alone")
        _draw_points(left, own, lambda point: point.communication_efficiency)
        unframe(left, f"{mode} scaling: what the network leaves", "ranks", "step without communication / step")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        title=f"all ranks share {environment.cpu_count} CPU cores, so efficiency falls without communication as well; "
        f"hollow: fewer ranks on a node, of as many in all{'; dashed: predicted' if as_predicted(points) else ''}",
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    save(figure, path)


def _draw_points(axes: Axes, points: Sequence[Point], share: _Share) -> None:
    """Draw a line for each strategy through the fullest nodes of each number of ranks, and hollow marks beside it."""
    strategies = list(dict.fromkeys(point.strategy for point in points))
    for strategy, (colour, marker) in zip(strategies, styles(strategies), strict=True):
        own = [point for point in points if point.strategy == strategy]
        fullest = _fullest(own)
        beside = [point for point in own if point not in fullest]
        axes.plot(*_xy(fullest, share), color=colour, marker=marker, ms=7, lw=2, label=strategy)
        axes.plot(*_xy(beside, share), color=colour, marker=marker, ms=7, ls="", mfc="white")
        axes.plot(*_xy(as_predicted(fullest), share), color=colour, ls="--", lw=1.4)
    ranks = sorted({point.ranks for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.set_ylim(0, 1.1)


def as_predicted(points: Sequence[Point]) -> list[Point]:
    """Return the points as they were predicted, those that were."""
    return [replace(point, step_ms=point.predicted_ms) for point in points if point.predicted_ms is not None]


def _draw_computing_alone(axes: Axes, points: Sequence[Point]) -> None:
    """Draw the efficiency of the steps without communication: nothing can be above it, noise apart."""
    strategy = points[0].strategy
    alone = [replace(point, step_ms=point.noop_ms) for point in points if point.strategy == strategy]
    axes.plot(*_xy(_fullest(alone), _of_1_rank(alone)), color=GREY, ls=":", lw=2, label="no communication")


def _fullest(points: Sequence[Point]) -> list[Point]:
    """Return for each number of ranks the point with the most of them on a node."""
    by_ranks = {point.ranks: point for point in sorted(points, key=lambda p: (p.ranks, p.ranks_per_node))}
    return list(by_ranks.values())


def _of_1_rank(points: Sequence[Point]) -> _Share:
    return lambda point: efficiency_of_1_rank(point, points)


def _xy(points: Sequence[Point], share: _Share) -> tuple[list[int], list[float]]:
    known = [(point.ranks, value) for point in points if (value := share(point)) is not None]
    return [ranks for ranks, _ in known], [value for _, value in known]


_BAR_WIDTH = 0.27


def draw_tuning(file: Path, path: Path) -> None:
    """Draw three bars for each configuration of a file of bench.evidence.tuning: the step as a share of stock DDP's."""
    found = [(world, each) for world, configurations in read_tuning([file]) for each in configurations]
    figure, (panel,) = panels(1, "A step, as a share of stock DDP's in the same run", columns=1, width=11, height=6.5)
    places = np.arange(len(found))
    names = [f"{world.cluster}\n{each.model.split(':')[0]}, {'+'.join(each.allow)}" for world, each in found]
    bars = (
        ("without communication", LIGHT_GREY, [each.compute_ms / each.stock_ms for _, each in found]),
        ("fastest of all tried", GREY, [each.best_ms / each.stock_ms for _, each in found]),
        ("auto", COLOURS[1], [each.to_stock for _, each in found]),
    )
    for offset, (label, colour, shares) in zip((-1, 0, 1), bars, strict=True):
        panel.barh(places + offset * _BAR_WIDTH, shares, _BAR_WIDTH, color=colour, label=label)
    for place, (_, each) in zip(places, found, strict=True):
        panel.annotate(
            f"{each.tuned}: {each.to_best:.2f} of the fastest",
            (each.to_stock, place + _BAR_WIDTH),
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


# ------------------------------------------------------------------------------------------------- probe

_LEVELS = {"intra": "Inside a node", "inter": "Between the nodes", "world": "All ranks as one group"}
_REACH = 4.0  # where curves are taken for extrapolated


def draw_probe(file: Path, path: Path) -> None:
    """Draw points and curves of a file of links, a panel for each level and one for encoding."""
    links = Links.load(file)
    shown: dict[str, list[tuple[str, str, Curve]]] = {}
    for key, curve in sorted(links.curves.items(), key=lambda item: ([*_LEVELS].index(item[0].level), item[0])):
        at_once = f", {key.groups} groups at once" if key.groups > 1 else ""
        panel = shown.setdefault(f"{_LEVELS[key.level]}: {key.ranks} ranks", [])
        panel.append((key.primitive, f"{key.primitive}{at_once}", curve))
    for work, curve in links.work.items():
        if work.kind == "encode":
            encoders = shown.setdefault("Encoding float32, on one rank", [])
            encoders.append((work.what, f"{work.what}, {gigabytes_per_s(curve)} GB/s", curve))
    figure, axes = panels(len(shown), "What messages and compression cost", height=4.9)
    for panel_axes, (title, curves) in zip(axes, shown.items(), strict=True):
        _draw_curves(panel_axes, title, curves)
    header = links.header
    where = f"{len(header.nodes)} node(s), {'+'.join(map(str, header.nodes))} ranks, {header.device}"
    lines = "points: measured, the slowest rank's median; lines: fitted, dotted where extrapolated"
    how = f"{header.backend}, torch {header.torch}, {header.date[:10]}"
    figure.supxlabel(f"{lines}\n{where}, {how}", fontsize=8.5, color=GREY)
    save(figure, path)


def _draw_curves(axes: Axes, title: str, curves: Sequence[tuple[str, str, Curve]]) -> None:
    """Draw curves with their names and labels; those of one name share a colour, the second of them is dashed."""
    drawn: set[str] = set()
    names = [name for name, _, _ in curves]
    for (name, label, curve), (colour, marker) in zip(curves, styles(names), strict=True):
        line, face = ("--", "white") if name in drawn else ("-", colour)
        drawn.add(name)
        nbytes, time_us = np.array(curve.points).T
        axes.plot(nbytes, time_us / 1e6, ls="", marker=marker, ms=5, color=colour, mfc=face)
        last = nbytes[-1]
        for begin, end, style, shown in ((nbytes[0], last, line, label), (last, last * _REACH, ":", None)):
            sizes = np.geomspace(begin, end, 160)
            times_s = [curve.time_us(each) / 1e6 for each in sizes]
            axes.plot(sizes, times_s, color=colour, ls=style, lw=1.4, label=shown)
    unframe(axes, f"{title} (mean error of the fits {mean(curve.mape for _, _, curve in curves):.1%})", "bytes")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda nbytes, _: nbytes_text(nbytes))
    axes.yaxis.set_major_formatter(EngFormatter("s"))
    low, high = axes.get_ylim()
    axes.set_ylim(top=high * (high / low) ** 0.4)  # room for the names
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", ncols=2)
