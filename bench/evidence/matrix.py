# SPDX-License-Identifier: Apache-2.0
"""Run a benchmark on one emulated cluster after another, and read and write what all of its runs found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

from bench.environment import Header
from bench.output import written_by
from commopt.cluster import ClusterUnavailableError, EmulatedCluster, EmulatedSites
from commopt.command_line import CommandParser, number, output_file

Environment = TypeVar("Environment", bound="World")
Found = TypeVar("Found")


@dataclass(frozen=True)
class World(Header):
    """Where and how numbers were made; nodes: ranks on each; sites: options that made emulated ones."""

    world_size: int
    emulated_rate: str | None
    nodes: list[int]
    sites: str = field(default="", kw_only=True)

    @property
    def cluster(self) -> str:
        """The cluster in words."""
        sites = f", {self.sites}" if self.sites else ""
        return f"{'+'.join(map(str, self.nodes))} ranks, {self.emulated_rate or 'no emulated link'}{sites}"


def append_run(
    path: Path, kind: str, environment: Mapping[str, Any], configurations: Sequence[Mapping[str, Any]]
) -> None:
    """Add a run to a file: its environment, which says what `kind` of file it is, and what was found."""
    records = [{"record": "environment", "kind": kind, **environment}]
    records += [{"record": "configuration", **each} for each in configurations]
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def read_runs(
    path: Path, kind: str, environment: type[Environment], configuration: type[Found]
) -> list[tuple[Environment, list[Found]]]:
    """Read what `append` wrote of dataclasses; raises ValueError when the file holds something else."""
    runs: list[tuple[Environment, list[Found]]] = []
    with written_by(f"bench.evidence.{kind} --json", path):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry.pop("record") == "environment":
                if (made_by := entry.pop("kind")) != kind:
                    raise ValueError(f"its kind is {made_by!r}")
                runs.append((environment(**entry), []))
            else:
                runs[-1][1].append(configuration(**entry))
    return runs


UNUSABLE = 2

Run = TypeVar("Run", bound="tuple[Any, Sequence[Any]]")


@dataclass(frozen=True)
class ClusterShape:
    """An emulated cluster; `rate` is that of every node's link, "none" for one that is not shaped.

    sites: where nodes are not all equally near.
    """

    nodes: int
    ranks_per_node: int
    rate: str
    sites: EmulatedSites = field(default_factory=EmulatedSites)

    def __str__(self) -> str:
        sites = self.sites.options()
        return f"{self.nodes} nodes x {self.ranks_per_node} ranks at {self.rate}" + (f" {sites}" if sites else "")

    def is_that(self, world: World) -> bool:
        """Return whether a record is of this cluster."""
        same = world.nodes == [self.ranks_per_node] * self.nodes and world.emulated_rate == self.rate
        return same and world.sites == self.sites.options()


@dataclass(frozen=True)
class Entry:
    """One run on a cluster of its own. command: what every rank runs. facts: what a record of it says of itself."""

    place: ClusterShape
    command: tuple[str, ...]
    facts: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.place}: {' '.join(self.command)}"

    def is_in(self, runs: Sequence[tuple[World, Sequence[Any]]]) -> bool:
        """Return whether a file has it."""
        return any(
            self.place.is_that(world) and all(getattr(each, name) == value for name, value in self.facts)
            for world, configurations in runs
            for each in configurations
        )


@dataclass(frozen=True)
class Matrix(Generic[Run]):
    """Entries that all add to one file. read, show: its records. timeout_s: for each entry, by default."""

    program: str
    description: str
    entries: Sequence[Entry]
    read: Callable[[Sequence[Path]], list[Run]]
    show: Callable[[Sequence[Run]], str]
    timeout_s: float

    def main(self) -> int:
        """Run what the file lacks, then show all of it; return an exit status, that of the last entry that failed."""
        parser = CommandParser(prog=f"python -m {self.program}", description=self.description)
        parser.add_argument("--json", type=output_file, required=True, metavar="FILE", help="append JSON lines")
        default = f"for each cluster (default {self.timeout_s:g})"
        parser.add_argument("--timeout", type=number(), default=self.timeout_s, metavar="S", help=default)
        options, passed_on = parser.parse_known_args()
        failed = 0
        try:
            done = self.read([options.json]) if options.json.exists() else []
            for entry in self.entries:
                if entry.is_in(done):
                    print(f"{entry}: in {options.json} already")
                    continue
                command = [*entry.command, "--json", str(options.json), *passed_on]
                failed = run_at(entry.place, command, options.timeout) or failed
            if options.json.exists():
                print(self.show(self.read([options.json])))
        except (ClusterUnavailableError, ValueError) as error:
            print(f"{self.program}: {error}", file=sys.stderr)
            return UNUSABLE
        return failed


def run_at(place: ClusterShape, command: Sequence[str], timeout_s: float) -> int:
    """Run a module's command line on all ranks of a cluster of its own; return its exit status.

    Raises ClusterUnavailableError.
    """
    print(f"\n{place}", flush=True)
    begun_s = monotonic()
    with EmulatedCluster(place.nodes, place.ranks_per_node, place.rate, sites=place.sites) as cluster:
        status = cluster.run(["-m", *command], timeout_s=timeout_s, capture=False).returncode
    print(f"{place}: exit status {status} after {monotonic() - begun_s:.0f} s", flush=True)
    return status
