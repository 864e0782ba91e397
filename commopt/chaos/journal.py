# SPDX-License-Identifier: Apache-2.0
"""The journal of a rank: JSON lines of what it did and when, by a clock that all processes of the machine share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Journal:
    """Writes events, each in one piece: the process may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, t: float | None = None, **more: Any) -> None:
        """Write an event of now, or of `t` seconds on the monotonic clock."""
        now = time.monotonic() if t is None else t
        os.write(self._file, (json.dumps({"t": round(now, 4), "event": event, **more}) + "\n").encode())


class JournalReader:
    """Reads what is new in a journal, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[Event]:
        """Return the whole lines that were written since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            lines, _, _ = file.read().rpartition(b"\n")
        self._read += len(lines) + 1 if lines else 0
        return [json.loads(line) for line in lines.splitlines()]


def events_of(folder: Path, ranks: int) -> tuple[list[Event], list[list[Event]]]:
    """Return the events of a run, and those of each rank, from the journals in its folder."""
    return JournalReader(folder / "events.jsonl").new(), [
        JournalReader(folder / f"rank{rank}.jsonl").new() for rank in range(ranks)
    ]
