# SPDX-License-Identifier: Apache-2.0
"""How large can it be? `python -m bench.evidence.scale --json FILE` counts what ranks ask the store, ten minutes.

Worlds of 8 to 64 processes are set up, agree, beat and lose a rank; up to 1,024 threads agree; one request is timed at
the process that hosts the store. Counts do not depend on who else uses the machine. Times do, also of a processor.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.environment import machine
from bench.evidence.scale.crowd import facts_of, run_crowd
from bench.evidence.scale.host import measure_host
from bench.evidence.scale.job import run_world
from bench.evidence.scale.law import Results
from bench.evidence.scale.report import LARGE, TABLES
from bench.output import read_lines, write_results, written_by
from commopt.command_line import CommandParser, content_of, output_file, whole
from commopt.groups import agreement

PROGRAM = "bench.evidence.scale"
_REPEATS = 5


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = CommandParser(prog=f"python -m {PROGRAM}", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=whole(8, 256), nargs="+", default=[8, 16, 32, 64], help="processes of a world")
    parser.add_argument(
        "--crowds", type=whole(8, 4096), nargs="+", default=[64, 256, 1024], help="threads that agree, in 8 processes"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--json", type=output_file, metavar="FILE", help="write JSON lines: environment, then each row")
    what.add_argument("--report", type=content_of(read), metavar="FILE", help="show such a file")
    parser.add_argument("--table", choices=TABLES, help="show one table only")
    return parser.parse_args(arguments)


def measure(worlds: Sequence[int], crowds: Sequence[int]) -> list[dict[str, Any]]:
    """Measure all."""
    rows = [{"what": "host", **row} for row in measure_host()]
    rows += [{"what": "answers", **answers_of(ranks)} for ranks in LARGE]
    rows += [{"what": "crowd", **run_crowd(ranks)} for ranks in crowds]
    rows += [{"what": "world", **run_world(ranks)} for ranks in worlds]
    return rows


def answers_of(ranks: int) -> dict[str, Any]:
    """Return the bytes of the answers of a group setup, packed and not, and the time that a rank needs to read them."""
    answers = [{"purpose": "commopt group setup", "problem": None, **facts_of(rank)} for rank in range(ranks)]
    verdict = {"missing": [], "answers": answers}
    packed = agreement._packed(verdict)
    times_s = []
    for _ in range(_REPEATS):
        begin = time.process_time()
        agreement._outcome(agreement._facts_in("verdict", packed))
        times_s.append(time.process_time() - begin)
    plain_nbytes = len(agreement._unpacked(packed, "verdict"))
    return {"ranks": ranks, "packed_nbytes": len(packed), "plain_nbytes": plain_nbytes, "read_s": min(times_s)}


def read(path: Path) -> Results:
    """Return the rows of a file; raises ValueError when it holds something else."""
    with written_by(f"{PROGRAM} --json", path):
        return Results(read_lines(path, "row")[1])


def main() -> int:
    """Measure, and report."""
    options = parse_options()
    if options.report:
        results = options.report
    else:
        header = {"kind": "scale", **machine(), "command": shlex.join(["python", "-m", PROGRAM, *sys.argv[1:]])}
        rows = measure(options.ranks, options.crowds)
        if options.json:
            write_results(options.json, header, "row", rows)
        results = Results(rows)
    names = [options.table] if options.table else list(TABLES)
    print("\n\n".join(TABLES[name](results) for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
