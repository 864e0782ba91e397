# SPDX-License-Identifier: Apache-2.0
"""Who takes part: a store where processes meet, show signs of life, and hear who gives none any more."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread

import torch.distributed as dist

from commopt.errors import ConfigurationError, TransportError
from commopt.groups import LimitedStore
from commopt.groups.build import require_timeout
from commopt.groups.membership import poll
from commopt.groups.store import limited

_log = logging.getLogger("commopt")

SERVER, WORKER = "server", "worker"
_BEATS, _LOOKS = 5, 10  # in the time after which somebody without a beat is gone
_CONNECT_S = 10.0
_PREFIX = "commopt-server"


class Scheduler:
    """Holds the store, in this process, and says who is present; a thread of its own looks after it.

    host: the address to listen on; port: 0 takes any. timeout: seconds without a sign of life after which somebody is
    gone; all others go by it. Raises ConfigurationError when it cannot listen there.
    """

    def __init__(self, port: int = 0, host: str = "0.0.0.0", timeout: float = 30.0) -> None:
        require_timeout(timeout)
        try:
            self._server = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
        except (RuntimeError, ValueError, OSError) as error:
            why = str(error).partition("\n")[0]
            raise ConfigurationError(f"cannot listen on {host}:{port}: {why}; pass another --port") from error
        self.port = int(self._server.port)
        self.present: dict[int, str] = {}  # roles by number
        self._timeout_s = timeout
        self._store = limited(self._server, _PREFIX, timeout)
        self._store.set("timeout", repr(timeout))
        self._store.set("gone", "{}")
        self._closing = Event()
        self._thread = Thread(target=self._look_after, name="commopt-scheduler", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where processes of this machine find it."""
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop; whoever still takes part will say that the scheduler is gone."""
        self._closing.set()
        self._thread.join(self._timeout_s)
        self._store.close()
        del self._server

    def _look_after(self) -> None:
        store, known = self._store, 0
        beats: dict[int, tuple[str | None, int]] = {}  # of those present: the last one, and how often it was no new one
        gone: dict[int, str] = {}
        # Looks are counted, not seconds: while this thread or the store is held up, nobody is to blame.
        while not self._closing.wait(self._timeout_s / _LOOKS):
            count = store.add("count", 0)
            beats |= {number: (None, 0) for number in range(known, count)}
            known = count
            for number, (beat, looks) in list(beats.items()):
                if number not in self.present and (role := store.read(f"role/{number}")):
                    self.present[number] = role
                    _log.info("%s %d is here", role, number)
                latest = store.read(f"beat/{number}")
                beats[number] = (latest, looks + 1 if latest == beat else 0)
                if left := store.read(f"left/{number}"):
                    gone[number] = left
                elif beats[number][1] >= _LOOKS:
                    gone[number] = f"gave no sign of life for {self._timeout_s:g} s"
                if number in gone:
                    _log.info("%s %d is gone: %s", self.present.pop(number, "somebody"), number, gone[number])
                    del beats[number]
                    store.set("gone", json.dumps(gone))


class Participant:
    """This process among those of a scheduler: a thread shows signs of life, and hears who is gone.

    meeting: where two of them find each other for a connection; it blocks. store: for all else.
    on_gone: called in that thread with the number of somebody who has gone and why; number -1 is the scheduler.
    Raises TransportError when there is no scheduler at `address`, ConfigurationError when that is none.
    """

    def __init__(self, address: str, role: str, on_gone: Callable[[int, str], None]) -> None:
        self.host, self.port = host_and_port(address)
        try:
            limit = timedelta(seconds=_CONNECT_S)
            self.meeting = dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=limit)
        except (RuntimeError, ValueError, OSError) as error:
            raise TransportError(
                f"no scheduler answers at {address} within {_CONNECT_S:g} s; start one there: "
                f"python -m commopt scheduler --port {self.port}"
            ) from error
        store = limited(self.meeting, _PREFIX, _CONNECT_S)
        told = poll(lambda: store.read("timeout"), time.monotonic() + _CONNECT_S)
        if told is None:
            raise ConfigurationError(
                f"{address} is a store, but no scheduler's; start python -m commopt scheduler there"
            )
        self.timeout_s = float(told)
        self.store: LimitedStore = store.under(_PREFIX, self.timeout_s)
        self.number = self.store.add("count", 1) - 1
        self.store.set(f"role/{self.number}", role)
        self._on_gone = on_gone
        self._alone = False
        self._closing = Event()
        self._thread = Thread(target=self._beat, name=f"commopt-{role}-beat", daemon=True)
        self._thread.start()

    def gone(self) -> dict[str, str]:
        """Return who has gone, by number, and why."""
        found: dict[str, str] = json.loads(self.store.read("gone") or "{}")
        return found

    def leave(self, why: str) -> None:
        """Tell the others, unless the scheduler is gone itself, and stop."""
        if not self._closing.is_set():
            self._closing.set()
            with suppress(TransportError):
                if not self._alone:
                    self.store.set(f"left/{self.number}", why)
            self.store.close()

    def _beat(self) -> None:
        told: set[str] = set()
        try:
            while not self._closing.wait(self.timeout_s / _BEATS):
                self.store.add(f"beat/{self.number}", 1)
                gone = self.gone()
                for number in sorted(gone.keys() - told, key=int):
                    told.add(number)
                    self._on_gone(int(number), gone[number])
        except TransportError as error:
            self._alone = True
            if not self._closing.is_set():
                self._on_gone(-1, f"the scheduler at {self.host}:{self.port} does not answer any more ({error})")


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of host:port; raises ConfigurationError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"the scheduler's address {address!r} is no host:port, as node0:29400")
    return host.strip("[]"), int(port)
