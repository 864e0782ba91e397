# SPDX-License-Identifier: Apache-2.0
"""Rounds of the server: the workers that take part, the deltas received, and the waiting time for the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from commopt.errors import MismatchError, UnsupportedTensorError
from commopt.server.shared import Delta, SharedParameters

_HISTORY = 64  # arrivals and norms
_LEAST_DEVIATION = 0.01  # of the median: arrivals may be equal to the clock's last digit
_HUGE = 100.0  # times the usual norm


@dataclass(eq=False)
class WorkerState:
    """A worker that has joined.

    base: the round it trains from; None before its first pull.
    takes_part: whether rounds wait for it. A worker that joins during a round takes part from the next one on.
    pushed: whether it has sent a delta since its last pull.
    counted: whether its last delta counted.
    late: how many rounds late its last delta was.
    """

    base: int | None = None
    takes_part: bool = False
    pushed: bool = False
    counted: bool = True
    late: int = 0


class Rounds:
    """The workers that have joined, and the deltas of the open round. Nothing here waits or locks.

    first: number of workers that must be present for the first round to begin.
    """

    def __init__(self, first: int) -> None:
        self.shared: SharedParameters | None = None
        self.workers: dict[int, WorkerState] = {}
        self.refused = 0  # number of deltas that were too late
        self._first = first
        self._begun = False
        self._deltas: dict[int, Delta] = {}
        self._arrivals: deque[float] = deque(maxlen=_HISTORY)  # in seconds since the round began
        self._norms: deque[float] = deque(maxlen=_HISTORY)  # of recent deltas
        self._opened = time.monotonic()

    def join(self, number: int) -> None:
        """Add a worker."""
        self.workers[number] = WorkerState()
        self._begin_if_idle()

    def leave(self, number: int) -> None:
        """Remove a worker; a delta it has already sent still counts. The round may then be due."""
        self.workers.pop(number, None)
        self._begin_if_idle()

    def require_base(self, number: int, base: int) -> None:
        """Raise MismatchError unless this worker may now send a delta from round `base`."""
        worker, now = self.workers[number], self.parameters().round
        if not 0 <= base <= now or base != worker.base:
            raise MismatchError(
                f"its delta is said to start from round {base}; it pulled round {worker.base}, and {now} have closed"
            )
        if worker.pushed:
            raise MismatchError("it has sent two deltas without a pull between them")

    def is_recent(self, base: int) -> bool:
        """Return whether a delta from round `base` still counts."""
        shared = self.parameters()
        return shared.round - base <= shared.settings.staleness and shared.has_round(base)

    def require_usual(self, norm: float) -> None:
        """Raise UnsupportedTensorError for a delta whose norm far exceeds recent deltas and the parameters."""
        usual = max(self.parameters().norm(), median(self._norms) if self._norms else 0.0)
        if norm > _HUGE * usual > 0:
            raise UnsupportedTensorError(
                f"the norm of its delta is {norm:.3g}, more than {_HUGE:g} times that of the parameters and of usual "
                f"deltas, {usual:.3g}; its training diverges, or its machine is faulty"
            )

    def add(self, number: int, delta: Delta, norm: float) -> bool:
        """Add a worker's delta to the open round unless it is too late; return whether it counts. The round may be due.

        norm: L2 norm of the delta.
        """
        shared, worker = self.parameters(), self.workers[number]
        worker.late = shared.round - delta.base
        worker.counted = self.is_recent(delta.base)
        worker.pushed = True
        if worker.counted:
            self._deltas[number] = delta
            self._norms.append(norm)
            if worker.late == 0:
                self._arrivals.append(time.monotonic() - self._opened)
        else:
            self.refused += 1
        return worker.counted

    def may_pull(self, number: int) -> bool:
        """Return whether a worker may pull now: its delta is in the parameters, or was refused."""
        return self.workers[number].takes_part and number not in self._deltas

    def pull(self, number: int, whole: bool) -> tuple[dict[str, Any], Sequence[Tensor]]:
        """Return the header and the tensors of the answer to a pull.

        whole: whether the worker asks for the full parameters, not for an update.
        """
        shared, worker = self.parameters(), self.workers[number]
        updates = shared.update is not None and worker.base == shared.round - 1 and not whole
        tensors = (shared.update or []) if updates else shared.public
        worker.base = shared.round
        worker.pushed = False
        header = {"round": worker.base, "updates": updates, "counted": worker.counted, "late": worker.late}
        return header, tuple(tensors)

    def close_if_due(self) -> bool:
        """Close the round if it has enough deltas and waits for no worker any more; return whether it was closed.

        Raises UnsupportedTensorError, and changes nothing, when the parameters would not be finite.
        """
        if not self._deltas:
            return False
        shared, missing = self.parameters(), self.missing()
        if missing:
            quorum, grace = shared.settings.quorum, shared.settings.grace
            if quorum is None or len(self._deltas) < quorum:
                return False
            in_step = any(
                self.workers[each].base == shared.round for each in missing
            )  # the others are late in any case
            if in_step and time.monotonic() < self._opened + window_s(self._arrivals, grace):
                return False
        bases = {
            worker.base
            for number, worker in self.workers.items()
            if number not in self._deltas and worker.base is not None
        }
        shared.close([self._deltas[number] for number in sorted(self._deltas)], bases)
        self._deltas.clear()
        self._begin()
        return True

    def missing(self) -> list[int]:
        """Return the workers that the open round waits for."""
        return sorted(
            number for number, worker in self.workers.items() if worker.takes_part and number not in self._deltas
        )

    def waits_for(self) -> tuple[str, list[int]]:
        """Return, as text and as numbers, the workers for which a pull waits."""
        if not self._begun:
            return f"{self._first} workers, of which {len(self.workers)} have joined", []
        missing = self.missing()
        if not missing:
            return f"the end of round {self.parameters().round}", []
        names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"{'worker' if len(missing) == 1 else 'workers'} {names} of round {self.parameters().round}", missing

    def memory(self) -> dict[str, int]:
        """Return the bytes of the tensors held, by kind."""
        deltas = sum(each.nbytes for delta in self._deltas.values() for each in delta.payloads)
        return {**(self.shared.memory() if self.shared is not None else {}), "deltas": deltas}

    def parameters(self) -> SharedParameters:
        """Return the shared parameters. To be called after the first worker has joined."""
        assert self.shared is not None
        return self.shared

    def _begin_if_idle(self) -> None:
        ready = self._begun or len(self.workers) >= self._first
        if self.workers and ready and not any(worker.takes_part for worker in self.workers.values()):
            self._begin()

    def _begin(self) -> None:
        self._begun = True
        self._opened = time.monotonic()
        for worker in self.workers.values():
            worker.takes_part = True


def window_s(arrivals: Collection[float], grace: float) -> float:
    """Return the waiting time of a round: median arrival + grace * median absolute deviation, in seconds."""
    if not arrivals:
        return 0.0
    usual = median(arrivals)
    deviation = median(abs(each - usual) for each in arrivals)
    return usual + grace * max(deviation, _LEAST_DEVIATION * usual)
