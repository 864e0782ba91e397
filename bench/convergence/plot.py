"""Draw what the convergence benchmark found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.convergence.plan import CONTENDERS, DIGITS, GPT, NO_FEEDBACK, OPTIMIZERS, RATE, STOCK
from bench.convergence.report import PERCENT_ALLOWED, POINTS_ALLOWED, Environment, Run, Summary, summarize
from bench.training.report import Outcome

# Okabe and Ito's colours, one for each way to compress; what is exact is grey.
_COLOURS = {
    "quantized": "#E69F00",
    "onebit": "#D55E00",
    "dgc": "#0072B2",
    "powersgd": "#009E73",
    "bf16": "#56B4E9",
    "Periodic": "#CC79A7",
}
_EXACT = "#555555"
_MARKERS = {"sgd": "o", "adamw": "D"}
_TITLES = {"sgd": "SGD with momentum", "adamw": "AdamW"}
_WORST_POINTS, _WORST_PERCENT = -12.0, 15.0  # beyond, a mark stands at the edge
_CURVES_OF = "sgd"
_LONG = 45  # characters
_LINES = ("-", "--", ":", "-.")  # within a family


def colour(strategy: str) -> str:
    """Return the colour of a strategy's family."""
    return next((colour for family, colour in _COLOURS.items() if family in strategy), _EXACT)


def draw(environment: Environment, runs: Sequence[Run], outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw one picture: accuracy and loss against stock DDP's, and the loss by time where the network is slow."""
    summaries = summarize(runs)
    known = {summary.strategy for summary in summaries}
    strategies = [c.strategy for c in CONTENDERS if c.strategy in known and c.strategy != STOCK]
    figure = Figure(figsize=(17, 2.5 + 0.32 * len(strategies)), layout="constrained")
    digits, gpt, by_time = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    digits.set_title("Digits: accuracy against stock DDP's", loc="left")
    digits.set_xlabel("percentage points")
    digits.axvspan(-POINTS_ALLOWED, POINTS_ALLOWED, color="#EEEEEE")
    _draw_differences(digits, strategies, [s for s in summaries if s.task == DIGITS.name], _WORST_POINTS)
    gpt.set_title("GPT: held-out loss against stock DDP's", loc="left")
    gpt.set_xlabel("%")
    gpt.axvspan(-PERCENT_ALLOWED, PERCENT_ALLOWED, color="#EEEEEE")
    _draw_differences(gpt, strategies, [s for s in summaries if s.task == GPT.name], _WORST_PERCENT)
    gpt.set_yticklabels([])
    _draw_curves(by_time, [run for run in runs if run.task == GPT.name and run.optimizer == _CURVES_OF], outcomes)
    seeds = len({run.seed for run in runs})
    figure.legend(
        *digits.get_legend_handles_labels(),
        title=f"mean of {seeds} seed(s), small marks are single seeds; hollow: without error feedback; "
        f"at the edge: worse than shown; grey band: tolerance. "
        f"{len(environment.ranks_per_node)} nodes x {environment.ranks_per_node[0]} ranks",
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    figure.savefig(path, dpi=110)


def _draw_differences(axes: Axes, strategies: Sequence[str], summaries: Sequence[Summary], worst: float) -> None:
    """Draw a row per strategy; `worst` is the value at the edge, on the side where things are worse."""
    for index, optimizer in enumerate(OPTIMIZERS):
        for summary in summaries:
            if summary.optimizer != optimizer or summary.strategy == STOCK:
                continue
            y = strategies.index(summary.strategy) + 0.3 * (index - 0.5)
            shade, marker = colour(summary.strategy), _MARKERS[optimizer]
            face = "white" if NO_FEEDBACK in summary.strategy else shade
            axes.plot(_seen(summary.each, worst), [y] * len(summary.each), marker, color=shade, ms=3, alpha=0.4)
            axes.plot(_seen([mean(summary.each)], worst), [y], marker, mec=shade, mfc=face, ms=7)
        axes.plot([], [], _MARKERS[optimizer], color=_EXACT, label=_TITLES[optimizer])
    axes.axvline(0, color=_EXACT, lw=1)
    axes.set_yticks(range(len(strategies)), [_wrapped(strategy) for strategy in strategies])
    axes.set_ylim(len(strategies) - 0.4, -0.6)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _seen(values: Sequence[float], worst: float) -> list[float]:
    return [max(value, worst) if worst < 0 else min(value, worst) for value in values]


def _wrapped(strategy: str) -> str:
    if len(strategy) < _LONG:
        return strategy
    name, *options = strategy.split(":")
    shared, last = [name, *options[:-1]], options[-1]
    return ":".join(shared) + f"\n:{last}"


def _draw_curves(axes: Axes, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
    """Draw the loss over time where the network is slow; by step when no times are known."""
    step_s = {outcome.strategy: outcome.step_ms / 1000 for outcome in outcomes}
    where = f" on {RATE} links" if outcomes else ""
    axes.set_title(f"GPT, {_CURVES_OF.upper()}: loss{where}", loc="left")
    drawn: list[str] = []
    for strategy in dict.fromkeys(run.strategy for run in runs):
        if outcomes and strategy not in step_s:
            continue
        curves = [run.curve for run in runs if run.strategy == strategy]
        steps = [point.step for point in curves[0]]
        losses = [[point.held_out_loss for point in points] for points in zip(*curves, strict=True)]
        if any(loss is None for points in losses for loss in points):
            continue  # diverged
        x = [step * step_s.get(strategy, 1.0) for step in steps]
        y = [mean(loss for loss in points if loss is not None) for points in losses]
        shade = colour(strategy)
        style = _LINES[drawn.count(shade) % len(_LINES)]
        drawn.append(shade)
        axes.plot(x, y, color=shade, linestyle=style, lw=1.8, label=_wrapped(strategy))
    if outcomes:
        axes.set_xscale("log")
    if drawn:
        axes.legend(fontsize=7, frameon=False)
    axes.set_xlabel("seconds (steps x the time of one step)" if outcomes else "steps")
    axes.set_ylabel("nats per byte")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
