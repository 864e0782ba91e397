# SPDX-License-Identifier: Apache-2.0
"""When a round is over: who takes part, whose delta has come, and how long the others are waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from commopt.errors import MismatchError, UnsupportedTensorError
from commopt.server.shared import Delta, Shared

_LOOKED_BACK = 64  # arrivals and deltas
_LEAST_DEVIATION = 0.01  # of the median: arrivals may be alike to the clock's last digit
_HUGE = 100.0  # times the usual


@dataclass(eq=False)
class Seat:
    """A worker that has joined. base: the round that it trains from, None before it has pulled.

    takes_part: rounds wait for it; who comes in the middle of one begins with the next. pushed: it has not pulled since
    its last delta. counted, late: what became of that.
    """

    base: int | None = None
    takes_part: bool = False
    pushed: bool = False
    counted: bool = True
    late: int = 0


class Rounds:
    """The workers that have joined, and the deltas of the round that is open. Nothing here waits, or locks.

    first: the first round begins when so many are there at the same time.
    """

    def __init__(self, first: int) -> None:
        self.shared: Shared | None = None
        self.seats: dict[int, Seat] = {}
        self.refused = 0  # deltas that came too late
        self._first = first
        self._begun = False
        self._deltas: dict[int, Delta] = {}
        self._arrivals: deque[float] = deque(maxlen=_LOOKED_BACK)  # seconds after a round's beginning
        self._norms: deque[float] = deque(maxlen=_LOOKED_BACK)  # of what deltas have learned
        self._opened = time.monotonic()

    def join(self, number: int) -> None:
        """Let a worker in."""
        self.seats[number] = Seat()
        self._begin_if_idle()

    def leave(self, number: int) -> None:
        """Go on without a worker; a delta that it has sent counts. A round may be due then."""
        self.seats.pop(number, None)
        self._begin_if_idle()

    def require_base(self, number: int, base: int) -> None:
        """Raise MismatchError unless a worker may send a delta now, of the round that it says it trained from."""
        seat, now = self.seats[number], self.held().round
        if not 0 <= base <= now or base != seat.base:
            raise MismatchError(
                f"its delta is said to be of round {base}; it pulled that of {seat.base}, and {now} have closed"
            )
        if seat.pushed:
            raise MismatchError("it has sent two deltas, and has not pulled between them")

    def counts(self, base: int) -> bool:
        """Return whether a delta that began from a round is not too late."""
        shared = self.held()
        return shared.round - base <= shared.settings.staleness and shared.holds(base)

    def require_usual(self, norm: float) -> None:
        """Raise UnsupportedTensorError for a delta that is far larger than what all have learned lately, and theta."""
        usual = max(self.held().norm(), median(self._norms) if self._norms else 0.0)
        if norm > _HUGE * usual > 0:
            raise UnsupportedTensorError(
                f"the norm of its delta is {norm:.3g}, more than {_HUGE:g} times that of the parameters and of usual "
                f"deltas, {usual:.3g}; its training diverges, or something is broken there"
            )

    def add(self, number: int, delta: Delta, norm: float) -> bool:
        """Take a worker's delta into the round that is open, unless it is too old; return whether. A round may be due.

        norm: of what it has learned.
        """
        shared, seat = self.held(), self.seats[number]
        seat.late = shared.round - delta.base
        seat.counted = self.counts(delta.base)
        seat.pushed = True
        if seat.counted:
            self._deltas[number] = delta
            self._norms.append(norm)
            if seat.late == 0:
                self._arrivals.append(time.monotonic() - self._opened)
        else:
            self.refused += 1
        return seat.counted

    def may_pull(self, number: int) -> bool:
        """Return whether a worker need not wait: its delta is in the parameters, or was refused."""
        return self.seats[number].takes_part and number not in self._deltas

    def pull(self, number: int, whole: bool) -> tuple[dict[str, Any], Sequence[Tensor]]:
        """Return what a worker is told, and the tensors that it gets. whole: it wants all of the parameters."""
        shared, seat = self.held(), self.seats[number]
        updates = shared.update is not None and seat.base == shared.round - 1 and not whole
        tensors = (shared.update or []) if updates else shared.public
        seat.base = shared.round
        seat.pushed = False
        told = {"round": seat.base, "updates": updates, "counted": seat.counted, "late": seat.late}
        return told, tuple(tensors)

    def close_if_due(self) -> bool:
        """Close the round if enough deltas have come, and nobody is waited for any more; return whether.

        Raises UnsupportedTensorError, and changes nothing, when the parameters would not be finite.
        """
        if not self._deltas:
            return False
        shared, missing = self.held(), self.missing()
        if missing:
            quorum, grace = shared.settings.quorum, shared.settings.grace
            if quorum is None or len(self._deltas) < quorum:
                return False
            in_step = any(self.seats[each].base == shared.round for each in missing)  # others come late in any case
            if in_step and time.monotonic() < self._opened + window_s(self._arrivals, grace):
                return False
        bases = {
            seat.base for number, seat in self.seats.items() if number not in self._deltas and seat.base is not None
        }
        shared.close([self._deltas[number] for number in sorted(self._deltas)], bases)
        self._deltas.clear()
        self._begin()
        return True

    def missing(self) -> list[int]:
        """Return the workers that the open round waits for."""
        return sorted(number for number, seat in self.seats.items() if seat.takes_part and number not in self._deltas)

    def waits_for(self) -> tuple[str, list[int]]:
        """Return, in words and by number, for whom a worker waits that may not pull yet."""
        if not self._begun:
            return f"{self._first} workers, of which {len(self.seats)} have joined", []
        missing = self.missing()
        if not missing:
            return f"the end of round {self.held().round}", []
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"{'worker' if len(missing) == 1 else 'workers'} {names} of round {self.held().round}", missing

    def memory(self) -> dict[str, int]:
        """Return the bytes that are held, by what they are."""
        deltas = sum(each.nbytes for delta in self._deltas.values() for each in delta.payloads)
        return {**(self.shared.memory() if self.shared is not None else {}), "deltas": deltas}

    def held(self) -> Shared:
        """Return the parameters, which are there once the first worker has joined."""
        assert self.shared is not None
        return self.shared

    def _begin_if_idle(self) -> None:
        ready = self._begun or len(self.seats) >= self._first
        if self.seats and ready and not any(seat.takes_part for seat in self.seats.values()):
            self._begin()

    def _begin(self) -> None:
        self._begun = True
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
