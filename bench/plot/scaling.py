"""How strategies scale: efficiency against one rank, and what the network leaves of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes

from bench.plot.style import GREY, panels, save, styles, unframe
from bench.scaling.report import Point, efficiencies, read

_Share = Callable[[Point], "float | None"]


def draw_file(file: Path, path: Path) -> None:
    """Draw two panels for every mode of a file of bench.scaling."""
    environment, points = read(file)
    modes = list(dict.fromkeys(point.mode for point in points))
    model = f"{environment.parameters / 1e6:.1f}M-parameter {environment.model}"
    figure, axes = panels(2 * len(modes), f"Scaling of a {model}, {environment.emulated_rate} links")
    for index, mode in enumerate(modes):
        own = [point for point in points if point.mode == mode]
        efficiency, left = axes[2 * index : 2 * index + 2]
        _draw(efficiency, own, _of_1_rank(own))
        _draw_computing_alone(efficiency, own)
        unframe(efficiency, f"{mode} scaling: efficiency", "ranks", "what a rank gets done, of one alone")
        _draw(left, own, lambda point: point.communication_efficiency)
        unframe(left, f"{mode} scaling: what the network leaves", "ranks", "step without communication / step")
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        title=f"all ranks share {environment.cpu_count} CPU cores, so efficiency falls without communication as well; "
        f"hollow: fewer ranks on a node, of as many in all{'; dashed: predicted' if predicted(points) else ''}",
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    save(figure, path)


def _draw(axes: Axes, points: Sequence[Point], share: _Share) -> None:
    """Draw a line for each strategy through the fullest nodes of each number of ranks, and hollow marks beside it."""
    strategies = list(dict.fromkeys(point.strategy for point in points))
    for strategy, (colour, marker) in zip(strategies, styles(strategies), strict=True):
        own = [point for point in points if point.strategy == strategy]
        fullest = _fullest(own)
        beside = [point for point in own if point not in fullest]
        axes.plot(*_xy(fullest, share), color=colour, marker=marker, ms=7, lw=2, label=strategy)
        axes.plot(*_xy(beside, share), color=colour, marker=marker, ms=7, ls="", mfc="white")
        axes.plot(*_xy(predicted(fullest), share), color=colour, ls="--", lw=1.4)
    ranks = sorted({point.ranks for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(number) for number in ranks])
    axes.set_ylim(0, 1.1)


def predicted(points: Sequence[Point]) -> list[Point]:
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
    return lambda point: efficiencies(point, points)[0]


def _xy(points: Sequence[Point], share: _Share) -> tuple[list[int], list[float]]:
    known = [(point.ranks, value) for point in points if (value := share(point)) is not None]
    return [ranks for ranks, _ in known], [value for _, value in known]
