# SPDX-License-Identifier: Apache-2.0
"""Print tables of results, and write results as JSON lines that are whole at all times."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commopt.display import show_table


def print_rows(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> None:
    """Print to stdout; the first column is text, the others are figures."""
    show_table(title, [headings, *rows], 1, caption, sys.stdout)


@contextmanager
def written_by(program: str, path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while `path` is read into a ValueError that names the file and the program."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is not a file that {program} wrote: {error}") from error


def read_lines(path: Path, kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header of a file of JSON lines and its other records, which are all of one kind."""
    header, *rows = (json.loads(line) for line in path.read_text().splitlines())
    if header.pop("record") != "environment" or any(row.pop("record") != kind for row in rows):
        raise ValueError("unexpected kinds of records")
    return header, rows


def write_results(path: Path, header: Mapping[str, Any], kind: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write what `read_lines` reads."""
    write_lines(path, [{"record": "environment", **header}, *({"record": kind, **row} for row in rows)])


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line; a killed writer leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(record) + "\n" for record in records))
    unfinished.replace(path)
