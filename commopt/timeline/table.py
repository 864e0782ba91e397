"""Columns of plain text."""

from __future__ import annotations

from collections.abc import Sequence


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
