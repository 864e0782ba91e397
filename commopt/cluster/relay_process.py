# SPDX-License-Identifier: Apache-2.0
"""The relay of a node as the process sees it that made the cluster: set, asked, and told when it ends."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from commopt.cluster import relay
from commopt.cluster.commands import ClusterUnavailableError
from commopt.cluster.relay import RelayCounters

_ANSWERS_WITHIN_S = 30.0  # a busy machine needs seconds


class RelayError(ClusterUnavailableError):
    """A relay does not do its work; the message says which."""


class Relay:
    """A relay that runs for a node, as the process that started it sees it.

    name: what messages call it.
    enter: the command line before which a program runs in the hub.
    """

    def __init__(self, name: str, enter: Sequence[str], seed: str, limit: int, ports: tuple[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [*enter, *program("relay", seed, str(limit), *ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._delay_us, self._loss = 0, 0.0

    def set(self, delay_us: int, loss: float) -> None:
        """Change delay and loss of what the node sends from now on. Raises RelayError."""
        self._delay_us, self._loss = delay_us, loss
        self.counters()

    def counters(self) -> RelayCounters:
        """Ask for the counters. Raises RelayError."""
        self.check()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{self._delay_us} {self._loss!r}\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _ANSWERS_WITHIN_S)[0]:
            raise RelayError(f"{self.name} has not answered for {_ANSWERS_WITHIN_S:g} s; is it stopped?")
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait(_ANSWERS_WITHIN_S)
            self.check()
        return RelayCounters(*json.loads(answer))

    def check(self) -> None:
        """Raise RelayError if it has ended."""
        status = self._process.poll()
        if status is None:
            return
        assert self._process.stderr is not None
        said = "" if self._process.stderr.closed else self._process.stderr.read()
        last = next(reversed(said.split("\n")[:-1]), "")
        raise RelayError(
            f"{self.name} ended with status {status}{f' ({last})' if last else ''}: nothing gets through its link any "
            "more; start the cluster anew"
        )

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def program(*arguments: str) -> list[str]:
    """Return the command line of a relay, without what the user's Python would load."""
    return [sys.executable, "-I", "-S", relay.__file__, *arguments]
