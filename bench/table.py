"""Print a table of results: with rich when it is installed, else as lines with tabs."""

from __future__ import annotations

from collections.abc import Sequence


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
