"""The CPU lane: one thread that takes operations first in, first out, while backward goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from torch import Tensor

from commopt.lanes.base import Lane, Work
from commopt.lanes.operation import Operation, Ticket
from commopt.lanes.second import Second, SecondWorker

_CLOSE_TIMEOUT_S = 5.0
_LOOK_S = 0.5


class WorkerLane(Lane):
    """Gloo's collectives block their caller, so they get a thread of their own; gloo releases the GIL."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._queue: SimpleQueue[tuple[Operation, Work, Tensor, Sequence[Ticket]] | threading.Event | None] = (
            SimpleQueue()
        )
        # A daemon: a peer that never answers must not keep this process from exiting.
        self._thread = threading.Thread(target=self._serve, name="commopt-lane", daemon=True)
        self._thread.start()

    def submit(
        self,
        operation: Operation,
        work: Work,
        result: Tensor,
        inputs: Sequence[Tensor] = (),
        reserved: Sequence[Ticket] = (),
    ) -> Ticket:
        """See Lane.submit; `work` itself keeps `inputs` alive."""
        self._require_usable(operation)
        ticket = Ticket(result)
        self._queue.put((operation, work, result, [*reserved, ticket]))
        return ticket

    def close(self) -> bool:
        """See Lane.close."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)
        ended = not self._thread.is_alive()
        return ended if self._second is None else self._second.close() and ended

    def _wait(self) -> None:
        """See Lane._wait."""
        ended = threading.Event()
        self._queue.put(ended)
        while not ended.wait(_LOOK_S) and self._thread.is_alive():  # it may have been closed before
            pass

    def _make_second(self) -> Second:
        return SecondWorker(self._own)

    def _serve(self) -> None:
        self._own.busy = True
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            operation, work, result, tickets = item
            error = self._run(operation, work, result)
            for ticket in tickets:
                ticket.settle(error)
            del item, operation, work, result, tickets, ticket, error  # keep no tensor alive while idle
