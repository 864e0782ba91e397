"""Put tables into a Markdown document, between two marks that stand in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commopt.document import read_text


def around(document: Path, begin: str, end: str) -> tuple[str, str]:
    """Return what stands before and after the place between the marks; raises ValueError when there is none."""
    before, found_begin, rest = read_text(document).partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{document} has no place for the results; put the lines {begin!r} and {end!r} into it")
    return before, after


def write_between(document: Path, begin: str, end: str, text: str) -> None:
    """Replace what is between the marks; raises ValueError as `around` does."""
    before, after = around(document, begin, end)
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; a line break or a bar inside of a cell would end it."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
