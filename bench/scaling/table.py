"""The scaling benchmark's table."""

from __future__ import annotations

from collections.abc import Sequence

from bench.scaling.report import Environment, Point, efficiencies
from bench.table import print_rows

_WIDTH = 124  # without a terminal


def print_table(environment: Environment, points: Sequence[Point]) -> None:
    """Print a row per strategy and world, one table for each mode."""
    headings = ["strategy", "nodes x ranks", "batch /rank", "step ms", "no-op ms", "samples /s"]
    predicted = any(point.predicted_ms is not None for point in points)
    headings += ["of 1 rank", "of 1 node", "no-op /step", "inter-node MiB/step"]
    headings += ["predicted step ms"] if predicted else []
    for mode in dict.fromkeys(point.mode for point in points):
        own = [point for point in points if point.mode == mode]
        rows = [[*_row(point, points), *([_number(point.predicted_ms)] if predicted else [])] for point in own]
        title = (
            f"{mode} scaling of {environment.model} ({environment.parameters / 1e6:.1f}M parameters), "
            f"{environment.emulated_rate} links"
        )
        print_rows(title, headings, rows, caveat(environment, points), width=_WIDTH)


def caveat(environment: Environment, points: Sequence[Point]) -> str:
    """Say which column to look at: ranks of an emulated cluster have no processors of their own."""
    most = max(point.ranks for point in points)
    text = "of 1 rank, of 1 node: samples a rank gets done, as a share of what one does there."
    if most > environment.cpu_count:
        text += (
            f"\nUp to {most} ranks share {environment.cpu_count} processors, so computing alone slows down with them:"
            f"\nno-op /step, the share of a step that is left without communication, is what the network leaves."
        )
    return text


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _row(point: Point, points: Sequence[Point]) -> list[str]:
    of_rank, of_node = efficiencies(point, points)
    return [
        point.strategy,
        f"{point.nodes} x {point.ranks_per_node}",
        str(point.batch_per_rank),
        f"{point.step_ms:.0f}",
        f"{point.noop_ms:.0f}",
        f"{point.samples_per_s:.1f}",
        *("-" if share is None else f"{share:.2f}" for share in (of_rank, of_node)),
        f"{point.communication_efficiency:.2f}",
        f"{point.inter_mib_per_step:.2f}",
    ]
