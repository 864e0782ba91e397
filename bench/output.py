"""Print tables of results, and write results as JSON lines that are whole at all times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def print_rows(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "", width: int | None = None
) -> None:
    """Print to stdout; the first column is text, the others are figures.

    width: columns of a file or a pipe, which have none of their own; rich takes 80 without it.
    """
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        lines = ["\t".join(row) for row in (headings, *rows)]
        print(title, *lines, *([caption] if caption else []), sep="\n", flush=True)
        return
    columns = [Column(heading.replace(" ", "\n", 1), justify="right") for heading in headings]  # as narrow as can be
    columns[0].justify, columns[0].overflow = "left", "fold"  # names are not cut off
    table = Table(*columns, title=title, caption=caption, caption_justify="left", box=box.SIMPLE, show_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal and width is not None:
        console = Console(width=width)
    console.print(table)


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
