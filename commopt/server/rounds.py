# SPDX-License-Identifier: Apache-2.0
"""When a round is over: who takes part, whose delta has come, and how long the others are waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from commopt.server.shared import Delta, Shared

_ARRIVALS = 64  # that are looked back on
_LEAST_DEVIATION = 0.01  # of the median: arrivals may be alike to the clock's last digit


@dataclass(eq=False)
class Seat:
    """A worker that has joined. base: the round that it trains from, None before it has pulled.

    takes_part: rounds wait for it; who comes in the middle of one begins with the next. counted, late: what became of
    its last delta.
    """

    base: int | None = None
    takes_part: bool = False
    counted: bool = True
    late: int = 0


class Rounds:
    """The workers that have joined, and the deltas of the round that is open. Nothing here waits, or locks.

    first: the first round begins when so many have joined.
    """

    def __init__(self, first: int) -> None:
        self.shared: Shared | None = None
        self.seats: dict[int, Seat] = {}
        self._first, self._joined = first, 0
        self._deltas: dict[int, Delta] = {}
        self._arrivals: deque[float] = deque(maxlen=_ARRIVALS)  # seconds after a round's beginning
        self._opened = time.monotonic()

    def join(self, number: int) -> None:
        """Let a worker in."""
        self.seats[number] = Seat()
        self._joined += 1
        self._begin_if_idle()

    def leave(self, number: int) -> None:
        """Go on without a worker; a delta that it has sent counts."""
        self.seats.pop(number, None)
        self._begin_if_idle()
        self.close_if_due()

    def add(self, number: int, delta: Delta) -> None:
        """Take a worker's delta into the round that is open, unless it is too old."""
        shared, seat = self.held(), self.seats[number]
        seat.late = shared.round - delta.base
        seat.counted = seat.late <= shared.settings.staleness
        if seat.counted:
            self._deltas[number] = delta
            if seat.late == 0:
                self._arrivals.append(time.monotonic() - self._opened)
        self.close_if_due()

    def may_pull(self, number: int) -> bool:
        """Return whether a worker need not wait: its delta is in the parameters, or was refused."""
        return self.seats[number].takes_part and number not in self._deltas

    def close_if_due(self) -> bool:
        """Close the round if enough deltas have come, and nobody is waited for any more; return whether."""
        if not self._deltas:
            return False
        shared = self.held()
        missing = {number: seat.base for number, seat in self.seats.items() if seat.takes_part}
        for number in self._deltas:
            missing.pop(number, None)
        if missing:
            quorum, grace = shared.settings.quorum, shared.settings.grace
            if quorum is None or len(self._deltas) < quorum:
                return False
            in_step = any(base == shared.round for base in missing.values())  # others come late whatever is done
            if in_step and time.monotonic() < self._opened + window_s(self._arrivals, grace):
                return False
        shared.close([self._deltas[number] for number in sorted(self._deltas)])
        self._deltas.clear()
        self._begin()
        return True

    def held(self) -> Shared:
        """Return the parameters, which are there once the first worker has joined."""
        assert self.shared is not None
        return self.shared

    def _begin_if_idle(self) -> None:
        if self._joined >= self._first and not any(seat.takes_part for seat in self.seats.values()):
            self._begin()

    def _begin(self) -> None:
        self._opened = time.monotonic()
        for seat in self.seats.values():
            seat.takes_part = True


def window_s(arrivals: Collection[float], grace: float) -> float:
    """Return how long a round waits for those that are usually there: median + grace * median absolute deviation."""
    if not arrivals:
        return 0.0
    usual = median(arrivals)
    deviation = median(abs(each - usual) for each in arrivals)
    return usual + grace * max(deviation, _LEAST_DEVIATION * usual)
