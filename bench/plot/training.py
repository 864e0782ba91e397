# SPDX-License-Identifier: Apache-2.0
"""Training benchmarks: loss by time, by step and by bytes sent, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.plot.style import GREY, LIGHT_GREY, Style, save, styles, unframe
from bench.training.report import STOCK, Environment, Outcome, fraction_of_stock, read


def draw_bars(
    axes: Axes,
    outcomes: Sequence[Outcome],
    looks: Sequence[Style],
    compute_ms: float,
) -> None:
    """Draw a bar for each strategy, the first at the top."""
    exposed_ms = [max(0.0, outcome.exposed_ms) for outcome in outcomes]
    rows = range(len(outcomes))  # not by name: a strategy may have run twice
    axes.barh(rows, compute_ms, color=LIGHT_GREY)
    axes.barh(rows, exposed_ms, left=compute_ms, color=[colour for colour, _ in looks])
    for row, exposed, outcome in zip(rows, exposed_ms, outcomes, strict=True):
        fraction = fraction_of_stock(outcome, outcomes)
        of_stock = "" if fraction is None or outcome.strategy in STOCK else f"\n{fraction:.2f} of stock's"
        axes.annotate(
            f"{outcome.exposed_ms:.0f} ms{of_stock}",
            (compute_ms + exposed, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    unframe(axes, "Time of one step", f"ms\ngrey: {compute_ms:.0f} of computing, colour: exposed communication")
    axes.grid(False)
    # Options below the name: room for the bars.
    axes.set_yticks(rows, [outcome.strategy.replace(":", "\n", 1) for outcome in outcomes])
    axes.margins(x=0.3)  # room for the figures
    axes.invert_yaxis()


Against = Literal["seconds", "steps"]

_TITLES = {
    "seconds": ("Held-out loss by time", "seconds of training"),
    "steps": ("Held-out loss by step", "steps"),
}

_WIDEST = 7


def draw_curves(
    axes: Axes,
    environment: Environment,
    outcomes: Sequence[Outcome],
    looks: Sequence[Style],
    against: Against,
) -> None:
    """Draw a curve for each strategy."""
    title, xlabel = _TITLES[against]
    for position, (outcome, (colour, marker)) in enumerate(zip(outcomes, looks, strict=True)):
        x = [look.seconds if against == "seconds" else look.step for look in outcome.curve]
        loss = [look.held_out_loss for look in outcome.curve]
        label = f"{outcome.strategy}: {outcome.held_out_loss:.2f} after {outcome.steps} steps"
        # Exact strategies have the same curve by step: wide below, narrow on top, so that all are seen.
        above = min(_WIDEST, len(outcomes) - 1 - position) if against == "steps" else 0
        axes.plot(x, loss, color=colour, marker=marker, ms=5 + above, lw=2 + 1.5 * above, label=label)
    unit = "byte" if environment.model == "gpt" else "image"
    unframe(axes, title, xlabel, f"nats per {unit}")


_MODELS = {"gpt": "GPT", "resnet50": "ResNet-50"}
_USUAL = 8  # strategies: more need a higher picture


def headline(environment: Environment, outcomes: Sequence[Outcome]) -> str:
    """Say in one sentence what the picture shows."""
    stock = next((outcome for outcome in outcomes if outcome.strategy in STOCK), None)
    fastest = max(outcomes, key=lambda outcome: outcome.steps)
    if stock is None or stock is fastest:
        return f"{environment.seconds:g} s of training with each strategy"
    ratio = fastest.steps / stock.steps
    return f"In the same {environment.seconds:g} s {fastest.strategy} takes {ratio:.1f}x as many steps as stock DDP"


def world(environment: Environment) -> str:
    """Say what was trained on which nodes."""
    ranks = "+".join(str(count) for count in environment.ranks_per_node)
    if len(set(environment.ranks_per_node)) == 1:
        ranks = f"{environment.ranks_per_node[0]}"
    model = f"{environment.parameters / 1e6:.1f}M-parameter {_MODELS.get(environment.model, environment.model)}"
    return f"{model}, {environment.nodes} nodes x {ranks} ranks, {environment.network}"


def circumstances(environment: Environment) -> str:
    """Say where the numbers were made."""
    hardware = f"{environment.cpu_count} CPU cores in all" if environment.device == "cpu" else environment.device
    return f"{world(environment)}, {environment.backend} on {hardware}; same seed and data for each"


def draw(environment: Environment, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw one picture: held-out loss by time and by step, and where the time of a step goes."""
    height = 5.8 + 0.55 * max(0, len(outcomes) - _USUAL)
    figure = Figure(figsize=(14, height), layout="constrained")
    figure.suptitle(headline(environment, outcomes), fontsize=17, fontweight="bold")
    by_time, by_step, bars = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    looks = styles([outcome.strategy for outcome in outcomes])
    draw_curves(by_time, environment, outcomes, looks, "seconds")
    draw_curves(by_step, environment, outcomes, looks, "steps")
    draw_bars(bars, outcomes, looks, environment.compute_ms)
    figure.legend(
        *by_time.get_legend_handles_labels(),
        title=circumstances(environment),
        loc="outside lower center",
        ncols=len(outcomes) if len(outcomes) <= 4 else 3,
        frameon=False,
    )
    save(figure, path)


def draw_file(file: Path, path: Path) -> None:
    """Draw what `file` has."""
    draw(*read(file), path)


def draw_time_to_loss(file: Path, path: Path) -> None:
    """Draw how long each strategy takes to the target loss of a file, and what it has learned by then."""
    environment, outcomes = read(file)
    target = environment.target_loss
    if target is None:
        raise ValueError(f"{file} has no target loss: train with --target-loss")
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    title = f"Time to a held-out loss of {target:g}, within {environment.seconds:g} s"
    figure.suptitle(f"{title}\n{circumstances(environment)}", fontsize=11)
    curves, bars = figure.subplots(1, 2, width_ratios=(1, 1.15))
    looks = styles([outcome.strategy for outcome in outcomes])
    draw_curves(curves, environment, outcomes, looks, "seconds")
    curves.axhline(target, color=GREY, ls="--", lw=1)
    for row, (outcome, (colour, _)) in enumerate(zip(outcomes, looks, strict=True)):
        seconds = outcome.seconds_to(target)
        bars.barh(row, seconds or environment.seconds, color=colour, alpha=1.0 if seconds else 0.25)
        told = f"{seconds:.0f} s" if seconds else f"not reached: {outcome.held_out_loss:.2f}"
        bars.annotate(told, (seconds or 0.0, row), xytext=(5, 0), textcoords="offset points", va="center")
    unframe(bars, f"Seconds to {target:g}; pale: not reached", "seconds")
    bars.grid(False)
    bars.set_yticks(range(len(outcomes)), [outcome.strategy for outcome in outcomes])
    bars.invert_yaxis()
    save(figure, path)
