# SPDX-License-Identifier: Apache-2.0
"""What do several connections of gloo carry? `python -m bench.evidence.connections --json FILE`, minutes, as root.

Two emulated nodes of one rank add up a tensor, once with COMMOPT_CONNECTIONS=1 and once as commopt chooses: without
delay, and over a round trip of 40 ms that loses 0.01 % of the packets. Both ways take turns. The first half of a run
does not count: only after some losses one connection is as slow as it stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from bench.command_line import measure_lines
from bench.document import table
from bench.output import read_lines, written_by
from commopt.cluster import ClusterUnavailableError, EmulatedCluster
from commopt.command_line import CommandParser, content_of, output_file, whole
from commopt.groups import CONNECTIONS_VARIABLE, join

PROGRAM = "bench.evidence.connections"
_PATHS = {"0ms": "0%", "20ms": "0.01%"}  # delay of one direction, and loss


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay", choices=[*_PATHS], nargs="+", default=[*_PATHS], help="one way (both)")
    parser.add_argument("--rate", default="none", help="of every link, as in `commopt cluster` (none)")
    parser.add_argument("--mib", type=whole(1, 1024), default=16, help="of the tensor (default 16)")
    parser.add_argument("--repeats", type=whole(1), default=12, help="in each run, after as many others (default 12)")
    parser.add_argument("--runs", type=whole(1), default=5, help="of each kind (default 5)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each row")
    what.add_argument("--report", type=content_of(read), metavar="FILE", help="show such a file")
    what.add_argument("--worker", help=argparse.SUPPRESS)  # a rank: where its rank 0 writes what it found
    return parser.parse_args(arguments)


def work(options: argparse.Namespace) -> None:
    """Measure as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    begun = time.perf_counter()
    membership = join()
    joined_s = time.perf_counter() - begun
    values = torch.ones(options.mib << 18)
    took_s = []
    for _ in range(2 * options.repeats):
        dist.barrier()
        begun = time.perf_counter()
        membership.team.all_reduce(values)
        took_s.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        found = {
            "connections": membership.connections.count,
            "joined_s": joined_s,
            "took_s": sum(took_s[options.repeats :]),
        }
        Path(options.worker).write_text(json.dumps(found))
    dist.destroy_process_group()


def run(options: argparse.Namespace, delay: str, connections: str) -> dict[str, Any]:
    """Return what one run on a new cluster found. Raises ClusterUnavailableError where it cannot be made."""
    link = {"rate": options.rate, "delay": delay, "loss": _PATHS[delay]}
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(2, 1, **link) as cluster:
        found = Path(folder, "found.json")
        given = ["--mib", str(options.mib), "--repeats", str(options.repeats), "--worker", str(found)]
        ended = cluster.run(["-m", PROGRAM, *given], capture=False, env={CONNECTIONS_VARIABLE: connections})
        if ended.returncode:
            raise ClusterUnavailableError(f"the ranks ended with status {ended.returncode}")
        document: dict[str, Any] = json.loads(found.read_text())
        return document


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record for each path, from runs that took turns."""
    records = []
    for delay in options.delay:
        one, chosen = zip(
            *((run(options, delay, "1"), run(options, delay, "auto")) for _ in range(options.runs)), strict=True
        )
        nbytes = options.repeats * (options.mib << 20)
        records.append(
            {
                "delay": delay,
                "loss": _PATHS[delay],
                "one_mbit": [round(nbytes * 8e-6 / each["took_s"], 1) for each in one],
                "chosen_mbit": [round(nbytes * 8e-6 / each["took_s"], 1) for each in chosen],
                "connections": [each["connections"] for each in chosen],
                "joined_s": [round(each["joined_s"], 2) for each in chosen],
            }
        )
    return records


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file, and its rows. Raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        return read_lines(path, "row")


def markdown(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each path."""
    rows = []
    for record in records:
        one, chosen = median(record["one_mbit"]), median(record["chosen_mbit"])
        counts = ", ".join(map(str, sorted(set(record["connections"]))))
        seconds = f"{median(record['joined_s']):.1f}"
        rows.append(
            [record["delay"], record["loss"], f"{one:.0f}", counts, f"{chosen:.0f}", f"{chosen / one:.2f}", seconds]
        )
    headings = ["delay, one way", "loss", "one, Mbit/s", "chosen", "Mbit/s", "gain", "seconds to join"]
    what = f"A sum of {header['mib']} MiB over two nodes, {header['repeats']} times a run"
    return f"{table(headings, rows)}\n\n{what}; medians of {header['runs']} runs."


def main() -> int:
    """Measure, and report; return the exit status."""
    options = parse_options()
    if options.worker:
        work(options)
        return 0
    asked = {name: getattr(options, name) for name in ("mib", "repeats", "runs", "rate")}
    return measure_lines(PROGRAM, ("connections", "row"), options, asked, lambda: measured(options), markdown)


if __name__ == "__main__":
    sys.exit(main())
