# SPDX-License-Identifier: Apache-2.0
"""Tables in the output of commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import floor, isfinite, log10
from textwrap import wrap
from typing import TextIO


def significant(value: float, digits: int = 3) -> str:
    """Return a number with at least `digits` significant digits and no exponent: 0.0123, 1.23, 12345."""
    if value == 0 or not isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - floor(log10(abs(value))))}f}"


WIDTH = 80
"""Largest width of a table, in columns."""

_LEAST, _READABLE = 12, 14  # minimal width of a broken text column, and its width if possible
_BREAKS = re.compile(r"(?<=[ ,:(=_/.])")  # places at which a long name may be broken


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0, width: int = WIDTH) -> list[str]:
    """Return the lines of a table. The first `left` columns are text, the others are figures, aligned right.

    A heading may have several lines, aligned at the bottom. Columns without content are left out. To keep to `width`,
    headings break at spaces and text breaks inside long names. Columns that still do not fit follow below, with the
    first text column repeated.
    """
    kept = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    left = sum(column < left for column in kept)
    heads = [headings[column].split("\n") for column in kept]
    cells = [[row[column] for column in kept] for row in rows]
    if _joint(_least(heads, cells, left)) > width:
        heads = [[word for line in head for word in line.split(" ")] for head in heads]
    tables = []
    for columns in _blocks(heads, cells, left, width):
        limits = _limits(
            [heads[column] for column in columns], [[row[c] for c in columns] for row in cells], left, width
        )
        lines = _lines_of([heads[column] for column in columns], limits, bottom=True)
        for row in cells:
            broken = [_broken(row[column], limit) for column, limit in zip(columns, limits, strict=True)]
            lines += _lines_of(broken, limits, bottom=False)
        tables.append([_joined(line, limits, sum(column < left for column in columns)) for line in lines])
    return [line for number, table in enumerate(tables) for line in ([""] * bool(number) + table)]


def _widths(heads: Sequence[Sequence[str]], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, [*head, *(row[place] for row in cells)])) for place, head in enumerate(heads)]


def _least(heads: Sequence[Sequence[str]], cells: Sequence[Sequence[str]], left: int) -> list[int]:
    """Return the width of each column with text broken as far as it stays readable."""
    widths = _widths(heads, cells)
    return [min(each, _READABLE) if column < left else each for column, each in enumerate(widths)]


def _joint(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _blocks(
    heads: Sequence[Sequence[str]], cells: Sequence[Sequence[str]], left: int, width: int
) -> Iterator[list[int]]:
    """Yield groups of columns that fit beside each other. The first text column begins each group."""
    least = _least(heads, cells, left)
    block: list[int] = []
    for column in range(len(heads)):
        if block and _joint([least[each] for each in [*block, column]]) > width and len(block) > min(left, 1):
            yield block
            block = [0] if left else []
        block.append(column)
    yield block


def _limits(heads: Sequence[Sequence[str]], cells: Sequence[Sequence[str]], left: int, width: int) -> list[int]:
    """Return the width of each column; the widest text columns are narrowed until all columns fit."""
    limits = _widths(heads, cells)
    while _joint(limits) > width:
        text = [column for column in range(min(left, len(limits))) if limits[column] > _LEAST]
        if not text:
            break  # figures are never cut
        limits[max(text, key=lambda column: limits[column])] -= 1
    return limits


def _broken(text: str, limit: int) -> list[str]:
    """Return a text in lines of at most `limit` characters."""
    lines = [""]
    for part in _BREAKS.split(text):
        while len(lines[-1]) + len(part.rstrip()) > limit:
            if lines[-1]:
                lines.append("")
            elif len(part) > limit:
                lines[-1], part = part[:limit], part[limit:]
            else:
                break
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _lines_of(cells: Sequence[Sequence[str]], limits: Sequence[int], *, bottom: bool) -> list[list[str]]:
    """Return the lines of a row whose cells have several lines, aligned at the bottom or at the top."""
    height = max(map(len, cells))
    filled = [[""] * (height - len(cell)) * bottom + list(cell) + [""] * (height - len(cell)) for cell in cells]
    return [[cell[line] for cell in filled] for line in range(height)]


def _joined(line: Sequence[str], limits: Sequence[int], left: int) -> str:
    placed = zip(line, limits, strict=True)
    return "  ".join(
        cell.ljust(limit) if column < left else cell.rjust(limit) for column, (cell, limit) in enumerate(placed)
    ).rstrip()


def show_table(title: str, rows: Sequence[Sequence[str]], left: int, caption: str, stream: TextIO) -> None:
    """Print a table. The first of `rows` has the headings; the first `left` columns are text."""
    headings = [cell.replace(" ", "\n", 1) for cell in rows[0]]
    caption_lines = [line for text in caption.splitlines() for line in wrap(text, WIDTH)]
    lines = [*wrap(title, WIDTH), *aligned(headings, rows[1:], left), *caption_lines]
    print(*lines, sep="\n", file=stream, flush=True)
