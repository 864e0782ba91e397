"""The scaling benchmark's table; `python -m bench.scaling.table FILE MODE` prints the steps in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from bench.document import table
from bench.scaling.report import Environment, Point, efficiencies, read
from bench.table import print_rows
from commopt.command_line import Parser, content_of

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


def markdown(points: Sequence[Point], mode: str) -> str:
    """Return a table of one mode: a row for each world, a column for each strategy's step and what was predicted."""
    own = [point for point in points if point.mode == mode]
    strategies = dict.fromkeys(point.strategy for point in own)
    worlds: dict[tuple[int, int, int], dict[str, Point]] = {}
    for point in own:
        worlds.setdefault((point.nodes, point.ranks_per_node, point.batch_per_rank), {})[point.strategy] = point
    rows = [
        [
            f"{nodes} x {ranks}, {batch}",
            f"{next(iter(found.values())).noop_ms:.0f}",
            *(_step(found[s]) for s in strategies),
        ]
        for (nodes, ranks, batch), found in worlds.items()
    ]
    return table(["nodes x ranks, samples on each", "computing alone", *(f"`{name}`" for name in strategies)], rows)


def _step(point: Point) -> str:
    return f"{point.step_ms:.0f}" + ("" if point.predicted_ms is None else f" ({point.predicted_ms:.0f})")


def main() -> None:
    """Print."""
    parser = Parser(prog="python -m bench.scaling.table", description="A table of a scaling file.")
    parser.add_argument("file", type=content_of(read), help="what bench.scaling --json wrote")
    parser.add_argument("mode", choices=["weak", "strong"])
    options = parser.parse_args()
    print(markdown(options.file[1], options.mode))


if __name__ == "__main__":
    main()
