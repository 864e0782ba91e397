# SPDX-License-Identifier: Apache-2.0
"""The tables that commands show."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, isfinite, log10
from typing import TextIO


def significant(value: float, digits: int = 3) -> str:
    """Return a number with at least `digits` digits that count, and no exponent: 0.0123, 1.23, 12345."""
    if value == 0 or not isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - floor(log10(abs(value))))}f}"


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Return the lines of a table: the first `left` columns text, the others figures set to the right.

    A heading may have lines, which stand on the bottom; columns whose cells are all empty are left out.
    """
    kept = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    heads = [headings[column].split("\n") for column in kept]
    height = max(map(len, heads))
    lines = [[""] * (height - len(head)) + head for head in heads]
    table = [[column[line] for column in lines] for line in range(height)]
    table += [[row[column] for column in kept] for row in rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(kept))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for cell, width, column in zip(row, widths, kept, strict=True)
        ).rstrip()
        for row in table
    ]


def show_table(title: str, rows: Sequence[Sequence[str]], left: int, caption: str, stream: TextIO) -> None:
    """Print rows under the first of them, whose cells are headings; the first `left` columns are text."""
    headings = [cell.replace(" ", "\n", 1) for cell in rows[0]]
    print(title, *aligned(headings, rows[1:], left), *filter(None, [caption]), sep="\n", file=stream, flush=True)
