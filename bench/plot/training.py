# SPDX-License-Identifier: Apache-2.0
"""Training benchmarks: loss by time, and the time to a loss or what a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from bench.plot.style import GREY, LIGHT_GREY, label_ends, label_of, panels, save, style_of, unframe
from bench.training.report import Environment, Outcome, headline, read


def draw_curves(axes: Axes, environment: Environment, outcomes: Sequence[Outcome]) -> None:
    """Draw held-out loss by time, a curve for each strategy with its name at its end."""
    ends = []
    for outcome in outcomes:
        style = style_of(outcome.strategy)
        times = [look.seconds for look in outcome.curve]
        losses = [look.held_out_loss for look in outcome.curve]
        axes.plot(times, losses, color=style.colour, ls=style.line, lw=1.6, marker=style.marker, ms=4)
        ends.append((times[-1], losses[-1], label_of(outcome.strategy), style.colour))
    if environment.target_loss is not None:
        axes.axhline(environment.target_loss, color=GREY, ls=(0, (1, 2)), lw=1)
    unit = "byte" if environment.model == "gpt" else "image"
    unframe(axes, f"Held-out loss by time, nats per {unit}", "seconds of training")
    label_ends(axes, ends)


def draw_seconds(axes: Axes, environment: Environment, outcomes: Sequence[Outcome], target: float) -> None:
    """Draw a bar for each strategy: how long it takes to the target loss."""
    for row, outcome in enumerate(outcomes):
        seconds, style = outcome.seconds_to(target), style_of(outcome.strategy)
        hatch = None if style.line == "-" else "///"
        width = seconds or environment.seconds
        axes.barh(row, width, color=style.colour if seconds else LIGHT_GREY, hatch=hatch, edgecolor="white", lw=0)
        told = f"{seconds:.0f} s" if seconds else f"not in {environment.seconds:.0f} s: {outcome.held_out_loss:.2f}"
        points, side = (4, "left") if seconds else (-5, "right")
        axes.annotate(told, (width, row), xytext=(points, 0), textcoords="offset points", va="center", ha=side)
    unframe(axes, f"Seconds to a held-out loss of {target:g}", "seconds; hatched: not commopt's")


def draw_steps(axes: Axes, environment: Environment, outcomes: Sequence[Outcome]) -> None:
    """Draw a bar for each strategy: what its step takes, and how much of that is exposed communication."""
    for row, outcome in enumerate(outcomes):  # not by name: a strategy may have run twice
        exposed = max(0.0, outcome.exposed_ms)
        computing = outcome.step_ms - outcome.exposed_ms
        axes.barh(row, computing, color=LIGHT_GREY)
        axes.barh(row, exposed, left=computing, color=style_of(outcome.strategy).colour)
        where = (computing + exposed, row)
        axes.annotate(f"{outcome.step_ms:.0f}", where, xytext=(4, 0), textcoords="offset points", va="center")
    unframe(axes, "Milliseconds of a step", f"grey: computing ({environment.compute_ms:.0f}); colour: exposed")


def circumstances(environment: Environment) -> str:
    """Say what was trained where."""
    counts = environment.ranks_per_node
    ranks = "+".join(map(str, counts[:1] if len(set(counts)) == 1 else counts))
    model = {"gpt": "GPT", "resnet50": "ResNet-50", "swin-t": "Swin-T"}.get(environment.model, environment.model)
    hardware = f"{environment.cpu_count} CPU cores in all" if environment.device == "cpu" else environment.device
    return (
        f"{environment.parameters / 1e6:.1f}M-parameter {model}, {environment.nodes} nodes x {ranks} ranks, "
        f"{environment.network}, {environment.backend} on {hardware}; same seed and data for each"
    )


def draw(environment: Environment, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw held-out loss by time, and beside it the seconds to the target loss, or steps where there is no target."""
    title = headline(environment, outcomes, label_of).replace(": ", ":\n", 1)
    figure, (curves, bars) = panels(2, title, height=max(4.2, 1.2 + 0.36 * len(outcomes)))
    figure.suptitle(title, fontsize=11)
    draw_curves(curves, environment, outcomes)
    if environment.target_loss is not None:
        draw_seconds(bars, environment, outcomes, environment.target_loss)
    else:
        draw_steps(bars, environment, outcomes)
    bars.grid(False)
    bars.set_yticks(range(len(outcomes)), [label_of(each.strategy).replace(":", "\n", 1) for each in outcomes])
    bars.margins(x=0.15)  # room for the figures
    bars.invert_yaxis()
    figure.supxlabel(circumstances(environment), fontsize=9, color=GREY)
    save(figure, path)


_LEFT_OUT = {"training_200mbit": "auto"}
"""The strategy of a file that is not drawn: in 20 s auto only measures."""


def draw_file(file: Path, path: Path) -> None:
    """Draw what `file` has."""
    environment, outcomes = read(file)
    left_out = _LEFT_OUT.get(file.stem)
    draw(environment, [each for each in outcomes if each.strategy.partition(":")[0] != left_out], path)
