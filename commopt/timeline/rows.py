"""Rows of a trace: viewers drop slices of one row that overlap, so that these need rows of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]

KINDS = ("gradients", "lane", "waiting for the last rank")
_ROWS_OF_A_KIND = 100
_ROWS_OF_A_RANK = len(KINDS) * _ROWS_OF_A_KIND


def on_rows(events: Iterable[Event], rank: int) -> tuple[list[Event], dict[int, str]]:
    """Give the events of a rank, which is the process, their threads; return them and the names of the threads.

    Slices come with a `kind`, their end as `dur` and maybe the slice that they are `inside` of, in whose row they stay
    if no other one is there at that time. The others get the first row in which nothing goes on. All other events are
    `inside` of a slice.
    """
    placed = sorted(events, key=lambda event: (event["ts"], -event["dur"]) if "dur" in event else (float("inf"), 0.0))
    rows = {kind: _Rows() for kind in KINDS}
    names: dict[int, str] = {}
    for event in placed:
        around = event.pop("inside", None)
        if "kind" in event:
            kind = event.pop("kind")
            own = None if around is None else around["tid"] % _ROWS_OF_A_KIND
            row = rows[kind].take(event["ts"], event["dur"], own)
            # Unlike the number of its process: a viewer would take the thread for the main one.
            event["tid"] = (rank + 1) * _ROWS_OF_A_RANK + KINDS.index(kind) * _ROWS_OF_A_KIND + row
            names[event["tid"]] = f"{kind} ({row + 1})" if row else kind
        else:
            event["tid"] = around["tid"]
        event["pid"] = rank
    return placed, names


class _Rows:
    """What goes on in each row of one kind: the end of a slice, and that of another one inside of it."""

    def __init__(self) -> None:
        self._ends: list[list[float]] = []

    def take(self, begin: float, end: float, own: int | None) -> int:
        """Return the row of a slice that begins no earlier than those before it; `own`: of what it is inside of."""
        for ends in self._ends:
            while ends and ends[-1] <= begin:
                ends.pop()
        if own is not None and len(self._ends[own]) == 1:
            row = own
        else:
            row = next((row for row, ends in enumerate(self._ends) if not ends), len(self._ends))
        if row == len(self._ends):
            self._ends.append([])
        self._ends[row].append(end)
        return row
