# SPDX-License-Identifier: Apache-2.0
"""What the scaling benchmark found: its records, their file and the tables.

`python -m bench.evidence.scaling.report FILE MODE` prints the steps in Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.document import table
from bench.environment import Header
from bench.output import read_lines, write_results, written_by
from commopt.command_line import CommandParser, content_of

KIND = "scaling"


@dataclass(frozen=True)
class Environment(Header):
    """Where and how the numbers were made; the first line of the file."""

    emulated_rate: str
    model: str
    parameters: int
    kind: str = KIND


@dataclass(frozen=True)
class Point:
    """One strategy in one world."""

    mode: str
    """"weak": the batch of a rank is fixed; "strong": that of the world."""
    nodes: int
    ranks_per_node: int
    batch_per_rank: int
    strategy: str
    step_ms: float
    """Median over steps of the slowest rank's."""
    noop_ms: float
    """The same in the same world without communication."""
    inter_mib_per_step: float
    """Sent by all nodes, counted at their network interfaces, headers included."""

    @property
    def ranks(self) -> int:
        """Number of ranks P."""
        return self.nodes * self.ranks_per_node


def write(path: Path, environment: Environment, points: Sequence[Point]) -> None:
    """Write JSON lines: the environment, then a line for each point."""
    write_results(path, asdict(environment), "point", map(asdict, points))


def read(path: Path) -> tuple[Environment, list[Point]]:
    """Read what `write` wrote; raises ValueError when `path` holds something else."""
    with written_by("bench.evidence.scaling --json", path):
        header, rows = read_lines(path, "point")
        return Environment(**header), [Point(**row) for row in rows]


def markdown(points: Sequence[Point], mode: str) -> str:
    """Return a table of one mode: a row for each world, a column for each strategy's step."""
    own = [point for point in points if point.mode == mode]
    strategies = dict.fromkeys(point.strategy for point in own)
    worlds: dict[tuple[int, int, int], dict[str, Point]] = {}
    for point in own:
        worlds.setdefault((point.nodes, point.ranks_per_node, point.batch_per_rank), {})[point.strategy] = point
    rows = [
        [
            f"{nodes} x {ranks}, {batch}",
            f"{next(iter(found.values())).noop_ms:.0f}",
            *(f"{found[s].step_ms:.0f}" for s in strategies),
        ]
        for (nodes, ranks, batch), found in worlds.items()
    ]
    return table(["nodes x ranks, samples on each", "computing alone", *(f"`{name}`" for name in strategies)], rows)


def main() -> None:
    """Print."""
    parser = CommandParser(prog="python -m bench.evidence.scaling.report", description="A table of a scaling file.")
    parser.add_argument("file", type=content_of(read), help="what bench.evidence.scaling --json wrote")
    parser.add_argument("mode", choices=["weak", "strong"])
    options = parser.parse_args()
    print(markdown(options.file[1], options.mode))


if __name__ == "__main__":
    main()
