# SPDX-License-Identifier: Apache-2.0
"""Which share of a link's rate do exchanges reach? `python -m bench.evidence.line_rate --json FILE`, minutes, as root.

Emulated nodes of one rank exchange tensors by the collectives of `commopt.groups` and, beside them, by gloo's own ring.
The share is the time that the bytes of one rank need at the link's rate, over the time that the collective took.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
from commopt.groups import Team, join

PROGRAM = "bench.evidence.line_rate"
_HEADINGS = {
    "gloo": "gloo's all_reduce",
    "all_reduce": "all_reduce",
    "bfloat16": "all_reduce of bfloat16",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
}


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=whole(2, 16), nargs="+", default=[2, 4, 8], help="of one rank (2 4 8)")
    parser.add_argument("--kib", type=whole(4, 2**17), nargs="+", default=[256, 1024, 5120, 16384], help="of a tensor")
    parser.add_argument("--mbit", type=whole(1, 10_000), default=100, help="Mbit/s of a link (default 100)")
    parser.add_argument("--repeats", type=whole(1), default=9, help="of which the median counts (default 9)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each row")
    what.add_argument("--report", type=content_of(read), metavar="FILE", help="show such a file")
    what.add_argument("--worker", help=argparse.SUPPRESS)  # a rank: where its rank 0 writes what it found
    return parser.parse_args(arguments)


# --------------------------------------------------------------------------------------------------- a rank


def exchanges(team: Team, numel: int) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return by name the bytes that one rank sends, and the call. numel: of float32, a multiple of the ranks."""
    whole_tensor, other, part = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel // team.size)
    narrow = torch.zeros(numel, dtype=torch.bfloat16)
    share = 4 * numel * (team.size - 1) / team.size
    return {
        "gloo": (2 * share, lambda: dist.all_reduce(whole_tensor)),
        "all_reduce": (2 * share, lambda: team.all_reduce(whole_tensor)),
        "bfloat16": (share, lambda: team.all_reduce(narrow)),
        "reduce_scatter": (share, lambda: team.reduce_scatter(part, whole_tensor)),
        "all_gather": (share, lambda: team.all_gather(whole_tensor, part)),
        "all_to_all": (share, lambda: team.all_to_all(other, whole_tensor)),
    }


def measure(team: Team, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record for each length: the share of the rate that each exchange reaches; they take turns."""
    records = []
    for kib in options.kib:
        calls = exchanges(team, 256 * kib // team.size * team.size)
        took_s: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.repeats + 1):
            for name, (_, call) in calls.items():
                dist.barrier()
                begin = time.perf_counter()
                call()
                dist.barrier()
                took_s[name].append(time.perf_counter() - begin)
        rates = {name: nbytes * 8 / 1e6 / median(took_s[name][1:]) for name, (nbytes, _) in calls.items()}
        shares = {name: round(rate / options.mbit, 3) for name, rate in rates.items()}
        records.append({"nodes": team.size, "kib": kib, "shares": shares})
    return records


def work(options: argparse.Namespace) -> None:
    """Measure as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records = measure(join().team, options)
    if dist.get_rank() == 0:
        Path(options.worker).write_text(json.dumps(records))
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------- the whole


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start every cluster and return the records of all. Raises ClusterUnavailableError where it cannot be made."""
    records: list[dict[str, Any]] = []
    lengths = [str(kib) for kib in options.kib]
    given = ["--mbit", str(options.mbit), "--repeats", str(options.repeats), "--kib", *lengths]
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory() as folder, EmulatedCluster(nodes, 1, rate=f"{options.mbit}mbit") as cluster:
            found = Path(folder, "found.json")
            ended = cluster.run(["-m", PROGRAM, *given, "--worker", str(found)], capture=False)
            if ended.returncode:
                raise ClusterUnavailableError(f"the ranks of {nodes} nodes ended with status {ended.returncode}")
            records += json.loads(found.read_text())
    return records


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file, and its rows. Raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        return read_lines(path, "row")


def markdown(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each number of nodes and length."""
    rows = [
        [str(record["nodes"]), f"{record['kib'] / 1024:g}", *(f"{record['shares'][name]:.2f}" for name in _HEADINGS)]
        for record in records
    ]
    caption = f"Shares of {header['mbit']} Mbit/s, {header['cpu_count']} processors for all nodes."
    return f"{table(['nodes', 'MiB', *_HEADINGS.values()], rows)}\n\n{caption}"


def main() -> int:
    """Measure, and report; return the exit status."""
    options = parse_options()
    if options.worker:
        work(options)
        return 0
    facts = {"mbit": options.mbit}
    return measure_lines(PROGRAM, ("line_rate", "row"), options, facts, lambda: measured(options), markdown)


if __name__ == "__main__":
    sys.exit(main())
