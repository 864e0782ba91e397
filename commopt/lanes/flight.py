# SPDX-License-Identifier: Apache-2.0
"""The flight record: one JSON file of a rank about a failure, or about a wait that has not ended yet.

`commopt doctor --flight` reads those of all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from commopt.document import FLIGHT_FORMAT, FLIGHT_RECORD
from commopt.errors import ConfigurationError
from commopt.lanes import activity
from commopt.version import __version__

FOLDER_VARIABLE = "COMMOPT_FLIGHT"
_log = logging.getLogger("commopt")


def folder() -> Path:
    """Return where flight records go: COMMOPT_FLIGHT, by default the folder for temporary files.

    Raises ConfigurationError where nothing can be written.
    """
    given = os.environ.get(FOLDER_VARIABLE, "")
    try:
        path = Path(given or tempfile.gettempdir())
    except FileNotFoundError as error:  # also where the disk is full
        raise ConfigurationError(f"{error}; free some of it, or set {FOLDER_VARIABLE} or TMPDIR") from None
    if given and not (path.is_dir() and os.access(path, os.W_OK)):
        raise ConfigurationError(
            f"{FOLDER_VARIABLE}={given!r} is no folder that can be written to; make it, or unset {FOLDER_VARIABLE} for "
            f"{tempfile.gettempdir()}"
        )
    return path


class FlightFile:
    """The file of this rank, which has one reason or several that stand at the same time.

    It is written anew with each reason, and removed when none is left: what has ended well is no failure.
    """

    def __init__(self, rank: int, into: Path) -> None:
        self.rank, self._folder = rank, into
        self._path: Path | None = None
        self._reasons: dict[str, str] = {}
        self._writing = threading.Lock()

    def add(
        self, key: str, reason: str, ranks: Sequence[int], peers: Mapping[int, object], past: Sequence[object]
    ) -> Path | None:
        """Write the record with one more reason; return its path, None where it cannot be written.

        key: by which `end` finds the reason. ranks: those that share the store's keys. peers: the last beats that this
        rank has seen of others. past: its own earlier beats, oldest first.
        """
        with self._writing:
            self._reasons[key] = reason
            now = datetime.now(timezone.utc)
            content = {
                FLIGHT_RECORD: FLIGHT_FORMAT,
                "commopt": __version__,
                "torch": torch.__version__,
                "written": now.isoformat(timespec="milliseconds"),
                "rank": self.rank,
                "ranks": list(ranks),
                "reasons": list(self._reasons.values()),
                **activity.beat(),
                "members": activity.members(),
                "stacks": activity.stacks(),
                "peers": {str(rank): beat for rank, beat in sorted(peers.items())},
                "past": list(past),
            }
            name = f"commopt_flight_{now:%Y%m%dT%H%M%S}_{os.getpid()}_rank{self.rank}.json"
            self._path = self._write(self._path or self._folder / name, content)
            return self._path

    def end(self, key: str) -> str | None:
        """Take a reason back, and with the last one the file; return it, None where it did not stand."""
        with self._writing:
            stood = self._reasons.pop(key, None)
            if stood is not None and not self._reasons and self._path is not None:
                with suppress(OSError):
                    self._path.unlink()
                self._path = None
            return stood

    def _write(self, path: Path, content: Mapping[str, Any]) -> Path | None:
        """Write a file as a whole, which nobody else can read."""
        try:
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.stem, delete=False) as file:
                try:
                    json.dump(content, file, indent=1)
                    file.flush()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)  # on a full disk each alarm would leave one
                    raise
        except OSError as error:
            _log.warning("the flight record %s cannot be written: %s; set %s", path, error.strerror, FOLDER_VARIABLE)
            return None
        return path
