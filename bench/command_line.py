# SPDX-License-Identifier: Apache-2.0
"""Command lines that measure and write a file, or print the table of one."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.environment import machine
from bench.output import write_results
from commopt.cluster import ClusterUnavailableError
from commopt.command_line import CommandParser, content_of, output_file, whole

UNUSABLE = 2
"""Exit status where this machine cannot measure."""


def add_files(parser: ArgumentParser, markdown: Callable[[Path], str], about: str = "measure, and write this") -> None:
    """Add `--json FILE` and `--report FILE`, of which one must be given; the latter's value is the table itself."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=output_file, metavar="FILE", help=about)
    what.add_argument("--report", type=content_of(markdown), metavar="FILE", help="print the table of a file")


def print_table(program: str, markdown: Callable[[Path], str], writer: str) -> None:
    """Print the table of the file that the command line names."""
    parser = CommandParser(prog=f"python -m {program}", description="Print the table of a file.")
    parser.add_argument("file", type=content_of(markdown), help=f"what {writer} wrote")
    print(parser.parse_args().file)


def measure_or_report(
    program: str, about: str, markdown: Callable[[Path], str], measure: Callable[..., Iterable[Any]], steps: int = 0
) -> None:
    """Do what the command line says: measure and write, or print the table of a file.

    measure: returns dataclasses; takes the number of steps where there is a default for it.
    """
    parser = CommandParser(prog=f"python -m {program}", description=about.splitlines()[0])
    if steps:
        parser.add_argument("--steps", type=whole(1), default=steps, help="default %(default)s")
    add_files(parser, markdown)
    options = parser.parse_args()
    if options.report:
        print(options.report)
        return
    given = {"steps": options.steps} if steps else {}
    command = f"python -m {program}" + "".join(f" --{name} {value}" for name, value in given.items())
    rows = [asdict(each) for each in measure(*given.values())]
    record = {"environment": {**machine(), "command": command, **given}, "rows": rows}
    options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(markdown(options.json))


def measure_lines(
    program: str,
    kinds: tuple[str, str],
    options: Namespace,
    facts: Mapping[str, Any],
    measure: Callable[[], Iterable[Mapping[str, Any]]],
    markdown: Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], str],
) -> int:
    """Print the table of `options.report`, or measure, write `options.json` after each record, and print the table.

    Returns the exit status: UNUSABLE where the machine cannot emulate a cluster.

    kinds: of the file, and of its records.
    facts: further entries of the file's header.
    """
    if options.report:
        print(markdown(*options.report))
        return 0
    file_kind, kind = kinds
    command = shlex.join(["python", "-m", program, *sys.argv[1:]])
    header = {"kind": file_kind, **machine(), **facts, "command": command}
    records: list[Mapping[str, Any]] = []
    try:
        for record in measure():
            records.append(record)
            if options.json:
                write_results(options.json, header, kind, records)
    except ClusterUnavailableError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return UNUSABLE
    print(markdown(header, records))
    return 0
