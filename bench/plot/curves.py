"""Held-out loss of several strategies against time, steps or bytes sent: one panel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes

from bench.plot.style import Style, log_bytes, unframe
from bench.training.report import Environment, Look, Outcome

Against = Literal["seconds", "steps", "mib"]

_TITLES = {
    "seconds": ("Held-out loss by time", "seconds of training"),
    "steps": ("Held-out loss by step", "steps"),
    "mib": ("Held-out loss by bytes sent", "MiB sent between the nodes so far"),
}

_WIDEST = 7


def draw_curves(
    axes: Axes,
    environment: Environment,
    outcomes: Sequence[Outcome],
    looks: Sequence[Style],
    against: Against,
    title: str | None = None,
) -> None:
    """Draw a curve for each strategy; where bytes were not counted, none."""
    usual, xlabel = _TITLES[against]
    for position, (outcome, (colour, marker)) in enumerate(zip(outcomes, looks, strict=True)):
        if against == "mib" and not outcome.inter_mib_per_step:
            continue
        x = [_x(outcome, look, against) for look in outcome.curve]
        loss = [look.held_out_loss for look in outcome.curve]
        label = f"{outcome.strategy}: {outcome.held_out_loss:.2f} after {outcome.steps} steps"
        # Exact strategies have the same curve by step: wide below, narrow on top, so that all are seen.
        above = min(_WIDEST, len(outcomes) - 1 - position) if against == "steps" else 0
        axes.plot(x, loss, color=colour, marker=marker, ms=5 + above, lw=2 + 1.5 * above, label=label)
    unit = "byte" if environment.model == "gpt" else "image"
    unframe(axes, usual if title is None else title, xlabel, f"nats per {unit}")
    if against == "mib":
        log_bytes(axes)


def _x(outcome: Outcome, look: Look, against: Against) -> float:
    if against == "seconds":
        return look.seconds
    return look.step * (outcome.inter_mib_per_step or 0.0) if against == "mib" else look.step
