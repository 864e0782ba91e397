"""What the scaling benchmark found: its records, their file of JSON lines, and the efficiencies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KIND = "scaling"


@dataclass(frozen=True)
class Environment:
    """Where and how the numbers were made; the first line of the file."""

    date: str
    command: str
    torch: str
    python: str
    cpu_count: int
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
    predicted_ms: float | None = None
    """step_ms as simulated from noop_ms and probed links; None where nobody asked, or where there is no model."""

    @property
    def ranks(self) -> int:
        """Number of ranks P."""
        return self.nodes * self.ranks_per_node

    @property
    def samples_per_s(self) -> float:
        """Throughput of the world."""
        return self.ranks * self.batch_per_rank / self.step_ms * 1000

    @property
    def communication_efficiency(self) -> float:
        """Share of the step that would be left without communication."""
        return self.noop_ms / self.step_ms


def efficiency(point: Point, base: Point) -> float:
    """Return what a rank gets done, as a share of what a rank of `base` does.

    Weak: (thr(P) / P) / (thr(P0) / P0). Strong: T(P0) P0 / (T(P) P), which is the same, as the world's batch is fixed.
    """
    return (point.samples_per_s / point.ranks) / (base.samples_per_s / base.ranks)


def base_of(point: Point, points: Iterable[Point], nodes: int, ranks_per_node: int) -> Point | None:
    """Return the same measurement in the world that counts as 1; None when it was not made."""
    for other in points:
        if (other.mode, other.strategy) == (point.mode, point.strategy) and (
            (other.nodes, other.ranks_per_node) == (nodes, ranks_per_node)
        ):
            return other
    return None


def efficiencies(point: Point, points: Sequence[Point]) -> tuple[float | None, float | None]:
    """Return the efficiency against one rank, and against one node of as many ranks."""
    bases = (base_of(point, points, 1, 1), base_of(point, points, 1, point.ranks_per_node))
    of_rank, of_node = (None if base is None else efficiency(point, base) for base in bases)
    return of_rank, of_node


def write(path: Path, environment: Environment, points: Sequence[Point]) -> None:
    """Write one JSON object per line, each naming its kind under "record"; figures that follow are in them too."""
    records = [{"record": "environment", **asdict(environment)}]
    for point in points:
        of_rank, of_node = efficiencies(point, points)
        follows = {
            "ranks": point.ranks,
            "samples_per_s": point.samples_per_s,
            "efficiency_of_1_rank": of_rank,
            "efficiency_of_1_node": of_node,
            "communication_efficiency": point.communication_efficiency,
        }
        records.append({"record": "point", **asdict(point), **follows})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def read(path: Path) -> tuple[Environment, list[Point]]:
    """Read what `write` wrote; raises ValueError when `path` holds something else."""
    try:
        header, *rows = (json.loads(line) for line in path.read_text().splitlines())
        if header.pop("record") != "environment" or any(row.pop("record") != "point" for row in rows):
            raise ValueError("unexpected kinds of records")
        points = [Point(**{name: row[name] for name in Point.__dataclass_fields__ if name in row}) for row in rows]
        return Environment(**header), points
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a file that bench.scaling --json wrote: {error}") from error
