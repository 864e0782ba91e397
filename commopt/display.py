"""What commands show: tables, with rich where it is installed, and the formats of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from commopt.errors import ConfigurationError

_WIDTH = 150  # of a file or a pipe


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
    headings, *body = ([cell.replace(" ", "\n", 1) for cell in rows[0]], *rows[1:])
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Column, Table
    except ImportError:
        print(title, *aligned(headings, body, left), caption, sep="\n", file=stream)
        return
    columns = [
        Column(name, justify="left" if place < left else "right", overflow="fold", no_wrap=_is_name(body, place))
        for place, name in enumerate(headings)
        if any(row[place] for row in body)
    ]
    table = Table(*columns, box=box.SIMPLE, show_edge=False)
    for row in body:
        table.add_row(*(cell for place, cell in enumerate(row) if any(other[place] for other in body)))
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, width=_WIDTH)
    # Beside the table, or rich would break their lines to its width.
    print(title, file=stream)
    console.print(table)
    print(caption, file=stream)


def _is_name(body: Sequence[Sequence[str]], place: int) -> bool:
    """Return whether a column has no text that could be broken between words."""
    return all(" " not in row[place] for row in body)


FORMATS = (".svg", ".png", ".pdf")


def require_drawable(path: Path) -> None:
    """Raise ConfigurationError for a file whose format is none of FORMATS, and where matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigurationError(f"{path}: no format to draw in; pass a name that ends in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401  (asked for, not used)
    except ImportError:
        raise ConfigurationError("a picture needs matplotlib: pip install matplotlib") from None
