# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m bench.evidence.scaling --help`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.environment import end_when_told, machine
from bench.evidence.scaling.report import Environment, Point, markdown, write
from bench.evidence.scaling.worker import World, batch_per_rank, parse_options
from commopt.cluster import ClusterUnavailableError, EmulatedCluster

_UNUSABLE = 2


class WorldFailed(Exception):
    """The ranks of a world ended with the status `returncode`."""

    def __init__(self, world: World, returncode: int) -> None:
        super().__init__(f"the world of {world[0]} x {world[1]} ranks ended with status {returncode}")
        self.returncode = returncode


def measure_world(world: World, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start the emulated cluster and return what its rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        # The last of two equal options counts.
        command = ["-m", "bench.evidence.scaling.worker", *sys.argv[1:], "--batch", str(batch), "--json", str(file)]
        with EmulatedCluster(*world, rate=options.rate, delay=options.delay) as cluster:
            returncode = cluster.run(command, capture=False).returncode
        if returncode:
            raise WorldFailed(world, returncode)
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def points_of(world: World, modes: list[str], batch: int, found: dict[str, Any]) -> list[Point]:
    """Return a point for every strategy, in every mode that has this batch."""
    nodes, ranks_per_node = world
    return [
        Point(mode, nodes, ranks_per_node, batch, noop_ms=found["noop_ms"], **strategy)
        for mode in modes
        for strategy in found["strategies"]
    ]


def run(options: argparse.Namespace) -> None:
    """Measure every world in every mode; where both modes want the same batch, once."""
    points: list[Point] = []
    for world in options.worlds:
        modes_of: dict[int, list[str]] = {}
        for mode in options.modes:
            modes_of.setdefault(batch_per_rank(mode, world[0] * world[1], options), []).append(mode)
        for batch, modes in modes_of.items():
            print(f"{world[0]} x {world[1]} ranks, {batch} samples on each", file=sys.stderr, flush=True)
            found = measure_world(world, batch, options)
            points += points_of(world, modes, batch, found)
            environment = Environment(
                **machine(),
                command=shlex.join(["python", "-m", "bench.evidence.scaling", *sys.argv[1:]]),
                emulated_rate=options.rate,
                model=options.model,
                parameters=found["parameters"],
            )
            if options.json:  # after each, so that an interrupted run keeps what it has
                write(options.json, environment, points)
    for mode in options.modes:
        print(f"{mode} scaling, ms of a step\n\n{markdown(points, mode)}\n")


def main() -> int:
    """Run; return the exit status."""
    options = parse_options()
    end_when_told()
    try:
        run(options)
    except (ClusterUnavailableError, ValueError) as error:
        print(f"bench.evidence.scaling: {error}", file=sys.stderr)
        return _UNUSABLE
    except WorldFailed as error:
        print(f"bench.evidence.scaling: {error}", file=sys.stderr)
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
