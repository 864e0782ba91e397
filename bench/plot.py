"""Draw what a training benchmark found: `python -m bench.plot out.json -o out.png`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.report import STOCK, Environment, Outcome, fraction_of_stock, read

# Okabe and Ito's colours, which the colour-blind can tell apart; stock DDP is grey, the rest stand against it.
_STOCK_STYLE = ("#555555", "X")
_COLOURS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#6A3D9A", "#8C6D31")
_MARKERS = ("s", "D", "o", "^", "v", "P", "*", "p")
_COMPUTE_COLOUR = "#D9D9D9"


def headline(environment: Environment, outcomes: Sequence[Outcome]) -> str:
    """Say in one sentence what the picture shows."""
    stock = next((outcome for outcome in outcomes if outcome.strategy == STOCK), None)
    fastest = max(outcomes, key=lambda outcome: outcome.steps)
    if stock is None or stock is fastest:
        return f"{environment.seconds:g} s of training with each strategy"
    ratio = fastest.steps / stock.steps
    return f"In the same {environment.seconds:g} s {fastest.strategy} takes {ratio:.1f}x as many steps as stock DDP"


def circumstances(environment: Environment) -> str:
    """Say where the numbers were made."""
    ranks = "+".join(str(count) for count in environment.ranks_per_node)
    if len(set(environment.ranks_per_node)) == 1:
        ranks = f"{environment.ranks_per_node[0]}"
    hardware = f"{environment.cpu_count} CPU cores in all" if environment.device == "cpu" else environment.device
    return (
        f"{environment.parameters / 1e6:.1f}M-parameter GPT, {environment.nodes} nodes x {ranks} ranks, "
        f"{environment.network}, {environment.backend} on {hardware}; same seed and data for each"
    )


def draw(environment: Environment, outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw one picture: held-out loss by time and by step, and where the time of a step goes."""
    figure = Figure(figsize=(14, 5.8), layout="constrained")
    figure.suptitle(headline(environment, outcomes), fontsize=17, fontweight="bold")
    by_time, by_step, bars = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    styles = _styles(outcomes)
    for axes, title, label in (
        (by_time, "Held-out loss by time", "seconds of training"),
        (by_step, "Held-out loss by step", "steps"),
    ):
        for position, (outcome, (colour, marker)) in enumerate(zip(outcomes, styles, strict=True)):
            x = [look.seconds if axes is by_time else look.step for look in outcome.curve]
            loss = [look.held_out_loss for look in outcome.curve]
            name = f"{outcome.strategy}: {outcome.held_out_loss:.2f} after {outcome.steps} steps"
            # Exact strategies have the same curve by step: wide below, narrow on top, so that all are seen.
            above = len(outcomes) - 1 - position if axes is by_step else 0
            axes.plot(x, loss, color=colour, marker=marker, ms=5 + above, lw=2 + 1.5 * above, label=name)
        axes.set_title(title, loc="left")
        axes.set_xlabel(label)
        axes.set_ylabel("nats per byte")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    _draw_bars(bars, outcomes, styles, environment.compute_ms)
    figure.legend(
        *by_time.get_legend_handles_labels(),
        title=circumstances(environment),
        loc="outside lower center",
        ncols=len(outcomes) if len(outcomes) <= 4 else 3,
        frameon=False,
    )
    figure.savefig(path, dpi=110)


def _styles(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Return a colour and a marker for each, the same in all panels."""
    spare = cycle(zip(_COLOURS, _MARKERS, strict=True))
    return [_STOCK_STYLE if outcome.strategy == STOCK else next(spare) for outcome in outcomes]


def _draw_bars(axes: Axes, outcomes: Sequence[Outcome], styles: Sequence[tuple[str, str]], compute_ms: float) -> None:
    names = [outcome.strategy.replace(":", "\n") for outcome in outcomes]  # options below the name: room for the bars
    exposed_ms = [max(0.0, outcome.exposed_ms) for outcome in outcomes]
    axes.barh(names, compute_ms, color=_COMPUTE_COLOUR)
    axes.barh(names, exposed_ms, left=compute_ms, color=[colour for colour, _ in styles])
    for name, exposed, outcome in zip(names, exposed_ms, outcomes, strict=True):
        fraction = fraction_of_stock(outcome, outcomes)
        of_stock = "" if fraction is None or outcome.strategy == STOCK else f"\n{fraction:.2f} of stock's"
        axes.annotate(
            f"{outcome.exposed_ms:.0f} ms{of_stock}",
            (compute_ms + exposed, name),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_title("Time of one step", loc="left")
    axes.set_xlabel(f"ms\ngrey: {compute_ms:.0f} of computing, colour: communication")
    axes.margins(x=0.3)  # room for the figures
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Redraw the picture from the JSON alone."""
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("json", type=Path, help="what `bench.training --json` wrote")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="PNG, SVG or PDF")
    options = parser.parse_args()
    try:
        environment, outcomes = read(options.json)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    draw(environment, outcomes, options.output)


if __name__ == "__main__":
    main()
