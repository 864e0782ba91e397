"""How far the probe is: a bar on a terminal where rich is installed, else a line for every curve; both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Progress:
    """Told when a curve begins and when a size of it is measured; this one says nothing, as ranks other than 0 do."""

    def begin(self, what: str) -> None:
        """Say which curve comes next."""

    def measuring(self, nbytes_text: str) -> None:
        """Say which size comes next."""

    def end(self, outcome: str) -> None:
        """Say what became of the curve."""


class _Lines(Progress):
    def __init__(self, curves: int, stream: TextIO) -> None:
        self._curves, self._stream = curves, stream
        self._begun = 0
        self._what = ""

    def begin(self, what: str) -> None:
        """See Progress."""
        self._begun += 1
        self._what = what

    def end(self, outcome: str) -> None:
        """See Progress."""
        width = len(str(self._curves))
        print(f"[{self._begun:{width}}/{self._curves}] {self._what}: {outcome}", file=self._stream, flush=True)


class _Bar(Progress):
    def __init__(self, bar: Any, curves: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=curves)
        self._what = ""

    def begin(self, what: str) -> None:
        """See Progress."""
        self._what = what

    def measuring(self, nbytes_text: str) -> None:
        """See Progress."""
        self._bar.update(self._task, description=f"{self._what}, {nbytes_text}")

    def end(self, outcome: str) -> None:
        """See Progress."""
        self._bar.advance(self._task)


@contextmanager
def shown(curves: int, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show the progress of so many curves while the context lasts."""
    stream = sys.stderr if stream is None else stream
    if stream.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar
        except ImportError:
            pass
        else:
            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
            with Bar(*columns, console=Console(file=stream), transient=True) as bar:
                yield _Bar(bar, curves)
            return
    yield _Lines(curves, stream)
