"""Where the time of a step goes, computing and exposed communication: one panel."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from bench.plot.style import LIGHT_GREY, Style, unframe
from bench.training.report import STOCK, Outcome, fraction_of_stock


def draw_bars(
    axes: Axes,
    outcomes: Sequence[Outcome],
    looks: Sequence[Style],
    compute_ms: float,
    title: str = "Time of one step",
) -> None:
    """Draw a bar for each strategy, the first at the top."""
    exposed_ms = [max(0.0, outcome.exposed_ms) for outcome in outcomes]
    rows = range(len(outcomes))  # not by name: a strategy may have run twice
    axes.barh(rows, compute_ms, color=LIGHT_GREY)
    axes.barh(rows, exposed_ms, left=compute_ms, color=[colour for colour, _ in looks])
    for row, exposed, outcome in zip(rows, exposed_ms, outcomes, strict=True):
        fraction = fraction_of_stock(outcome, outcomes)
        of_stock = "" if fraction is None or outcome.strategy == STOCK else f"\n{fraction:.2f} of stock's"
        axes.annotate(
            f"{outcome.exposed_ms:.0f} ms{of_stock}",
            (compute_ms + exposed, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    unframe(axes, title, f"ms\ngrey: {compute_ms:.0f} of computing, colour: exposed communication")
    axes.grid(False)
    # Options below the name: room for the bars.
    axes.set_yticks(rows, [outcome.strategy.replace(":", "\n", 1) for outcome in outcomes])
    axes.margins(x=0.3)  # room for the figures
    axes.invert_yaxis()
