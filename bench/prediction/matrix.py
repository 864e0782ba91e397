"""Predict and measure on six emulated clusters, and add up how far predictions are off: about half an hour.

    python -m bench.prediction.matrix --json bench/results/prediction.json

Clusters that are in the file already are left out, so that a run that was stopped can be resumed. Options that are not
listed below go to bench.prediction.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from bench.cluster import Cluster, ClusterUnavailableError
from bench.prediction import record, summary

UNUSABLE = 2


@dataclass(frozen=True)
class Place:
    """An emulated cluster; `rate` is that of every node's link, "none" for one that is not shaped."""

    nodes: int
    ranks_per_node: int
    rate: str

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.ranks_per_node} ranks at {self.rate}"

    def is_that(self, nodes: list[int], rate: str | None) -> bool:
        """Return whether a record is of this cluster."""
        return nodes == [self.ranks_per_node] * self.nodes and rate == self.rate


PLACES = (
    Place(2, 1, "50mbit"),
    Place(2, 2, "100mbit"),
    Place(3, 1, "100mbit"),
    Place(4, 1, "200mbit"),
    Place(3, 2, "200mbit"),
    Place(4, 2, "400mbit"),
)


def run_at(place: Place, command: list[str], timeout_s: float) -> int:
    """Run a module's command line on all ranks of a cluster of its own; return its exit status.

    Raises ClusterUnavailableError.
    """
    print(f"\n{place}", flush=True)
    begun_s = monotonic()
    with Cluster(place.nodes, place.ranks_per_node, place.rate) as cluster:
        status = cluster.run(["-m", *command], timeout_s=timeout_s, capture=False).returncode
    print(f"{place}: exit status {status} after {monotonic() - begun_s:.0f} s", flush=True)
    return status


def main() -> int:
    """Run what the file lacks, then show all of it."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.prediction.matrix", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="append JSON lines")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="S", help="for each cluster (default 900)")
    options, passed_on = parser.parse_known_args()
    failed = 0
    try:
        done = record.read([options.json]) if options.json.exists() else []
        for place in PLACES:
            if any(place.is_that(environment.nodes, environment.emulated_rate) for environment, _ in done):
                print(f"{place}: in {options.json} already")
                continue
            command = ["bench.prediction", "--json", str(options.json), *passed_on]
            failed = run_at(place, command, options.timeout) or failed
        if options.json.exists():
            summary.show(record.read([options.json]))
    except (ClusterUnavailableError, ValueError) as error:
        print(f"bench.prediction.matrix: {error}", file=sys.stderr)
        return UNUSABLE
    return failed


if __name__ == "__main__":
    sys.exit(main())
