# SPDX-License-Identifier: Apache-2.0
"""What comes of every fault, by every kind of strategy? `python -m bench.evidence.chaos --json FILE`, minutes, as root.

`commopt chaos` on emulated nodes: DDP and FSDP2 with replicas on two nodes of two ranks, and three nodes of one rank;
with a parameter server each node is a worker.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.document import table
from bench.environment import end_when_told, machine
from bench.output import read_lines, write_results, written_by
from commopt.chaos.cli import SCRIPT, Campaign, Judged, perform
from commopt.chaos.faults import FAULTS, Fault, read_faults
from commopt.cluster import ClusterUnavailableError
from commopt.command_line import CommandParser, content_of, output_file, whole

PROGRAM = "bench.evidence.chaos"
_UNUSABLE = 2
_NOTED = "hierarchical_quantized:bits=4"  # whose messages the page shows


@dataclass(frozen=True)
class Job:
    """What is trained where. victim: None for the last rank; the number after it is the parameter server's."""

    name: str
    strategies: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    nodes: int = 2
    ranks_per_node: int = 2
    victim: int | None = None

    def faults(self, named: str) -> tuple[Fault, ...]:
        """Return those of a list that can strike the victim."""
        of_server = self.victim == self.nodes * self.ranks_per_node
        return tuple(fault for fault in read_faults(named) if fault.of_server or not of_server)


_WITH_QUORUM = "parameter_server:period=4:quorum=2:compressor=OneBit()"

JOBS = (
    Job(
        "DDP, 2 x 2",
        (
            *("flat", "hierarchical", "hierarchical_bf16", "hierarchical_quantized:bits=4", "hierarchical_onebit"),
            *("hierarchical_dgc", "hierarchical_powersgd", "auto", "onebit_local:period=4", "diloco:period=4"),
        ),
    ),
    Job(
        "HSDP, 2 x 2",
        ("hierarchical", "hierarchical_quantized:bits=4", "hierarchical_powersgd", "onebit_local:period=4"),
        ("--model", "hsdp"),
    ),
    Job("DDP, 3 x 1, of rank 0", ("flat", "quantized:bits=4"), nodes=3, ranks_per_node=1, victim=0),
    Job("3 workers", ("parameter_server:period=4", _WITH_QUORUM), nodes=3, ranks_per_node=1),
    Job("2 workers of 2 ranks", ("parameter_server:period=4",)),
    Job("3 workers, of the server", (_WITH_QUORUM,), nodes=3, ranks_per_node=1, victim=3),
)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: all of them")
    parser.add_argument("--jobs", type=whole(1, 16), default=3, help="runs at the same time (default 3)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep journals, logs and pictures there")
    only = "of a file that is there: run again what is called so, as in HSDP or powersgd, and keep the rest"
    parser.add_argument("--only", metavar="TEXT", help=only)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each run")
    what.add_argument("--report", type=content_of(read), metavar="FILE", help="show such a file")
    return parser.parse_args(arguments)


def measured(
    options: argparse.Namespace, folder: Path, keep: Callable[[list[dict[str, Any]]], object]
) -> list[dict[str, Any]]:
    """Run all jobs; return a record for each run with a fault. Raises ClusterUnavailableError.

    keep: is given what there is after each run.
    """
    records: list[dict[str, Any]] = []
    for number, job in enumerate(JOBS):
        strategies = tuple(each for each in job.strategies if (options.only or "") in f"{job.name}, {each}")
        faults = job.faults(options.faults)
        if not strategies or not faults:
            continue
        campaign = Campaign(
            SCRIPT,
            job.arguments,
            strategies,
            faults,
            nodes=job.nodes,
            ranks_per_node=job.ranks_per_node,
            victim=job.victim,
            jobs=options.jobs,
        )

        def heard(judged: Judged, name: str = job.name) -> None:
            print(f"{name}, {judged.line()}", file=sys.stderr, flush=True)
            records.append({"job": name, **judged.row()})
            keep(records)

        perform(campaign, folder / str(number), heard)
    return records


def continued(before: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs of a file with those that were made again in the places of the earlier ones."""
    again = {_key(record): record for record in records}
    kept = [again.pop(_key(record), record) for record in before]
    return [*kept, *again.values()]


def _key(record: Mapping[str, Any]) -> tuple[str, ...]:
    return record["job"], record["strategy"], record["fault"]


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file, and its runs. Raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        return read_lines(path, "run")


def markdown(header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of all runs, one of what ranks say, and what failed."""
    faults = list(dict.fromkeys(record["fault"] for record in records))
    found = {(record["job"], record["strategy"], record["fault"]): record for record in records}
    rows = [
        [job, strategy, *(_cell(found.get((job, strategy, fault))) for fault in faults)]
        for job, strategy in dict.fromkeys((record["job"], record["strategy"]) for record in records)
    ]
    good = sum(record["ok"] for record in records)
    parts = [
        table(["job", "strategy", *faults], rows),
        f"{good} of {len(records)} runs ended right, or with an error on every rank that names the fault (*e*). "
        f"Seconds: from the fault until the last rank ended or raised; {header['cpu_count']} processors for all ranks.",
    ]
    shown = [
        (each["fault"], each["said"]) for each in records if each["strategy"] == _NOTED and each["job"][:3] == "DDP"
    ]
    parts += [f"What came of it with `{_NOTED}` under DDP:", table(["fault", "most ranks say"], shown)] if shown else []
    if failed := [each for each in records if not each["ok"]]:
        listed = [[each["job"], each["strategy"], each["fault"], each["outcome"], each["said"]] for each in failed]
        parts += ["These failed:", table(["job", "strategy", "fault", "outcome", "because"], listed)]
    return "\n\n".join(parts)


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return ""
    if not record["ok"]:
        return f"**{record['outcome']}**"
    return f"{record['seconds']:.1f}{' *e*' if record['outcome'] == 'named error' else ''}"


def main() -> int:
    """Run all, and report; return the exit status."""
    options = parse_options()
    if options.report:
        print(markdown(*options.report))
        return 0
    end_when_told()
    command = shlex.join(["python", "-m", PROGRAM, *sys.argv[1:]])
    header = {"kind": "chaos", **machine(), "command": command}
    before: list[dict[str, Any]] = []
    if options.only and options.json and options.json.exists():
        earlier, before = read(options.json)
        revisions = dict.fromkeys([*str(earlier["revision"]).split(" and "), str(header["revision"])])
        header |= {"revision": " and ".join(revisions), "command": earlier["command"]}

    def keep(records: list[dict[str, Any]]) -> None:
        if options.json:
            write_results(options.json, header, "run", continued(before, records))

    with tempfile.TemporaryDirectory(prefix="commopt-chaos-") as temporary:
        try:
            records = measured(options, (options.out or Path(temporary)).absolute(), keep)
        except (ClusterUnavailableError, ValueError) as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return _UNUSABLE
    print(markdown(header, continued(before, records)))
    return 0 if all(record["ok"] for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
