"""One piece of work on a lane: whose it is, and how it can be waited for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt.errors import LaneError
from commopt.groups import Membership


@dataclass(frozen=True)
class Operation:
    """What every rank of `membership` must submit at the same point of its program."""

    membership: Membership
    owner: str
    sequence: int
    what: str
    numel: int
    device_type: str

    def __str__(self) -> str:
        return f"{self.owner}, operation {self.sequence}: {self.what} of {self.numel} elements"


class Ticket:
    """The pending result of an operation: `future` fails with the lane's error, as does `wait`.

    On the CPU an error comes from the lane's thread; raised through `Future.then` it keeps its message, where
    `Future.set_exception` would leave DDP with a cast error. On CUDA it raises where the work is submitted, before
    anybody waits: a second future for each bucket would only cost.
    """

    def __init__(self, result: Tensor) -> None:
        """Stand for `result`, the tensor that will hold the outcome; on CUDA as the current stream leaves it."""
        self._result: Tensor | None = result
        self._cuda = result.device if result.device.type == "cuda" else None
        self._ready: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        devices: list[int | str | torch.device] | None = None
        if self._cuda is not None:
            self._ready = torch.cuda.current_stream(self._cuda).record_event()
            devices = [self._cuda]
        self._outcome: torch.futures.Future[Any] = torch.futures.Future(devices=devices)  # the tensor, or a LaneError

    @property
    def future(self) -> torch.futures.Future[Tensor]:
        """A future of the result; torch makes a RuntimeError of the LaneError that it raises, and keeps the message."""
        if self._cuda is not None:
            return self._outcome
        # Raised through `then`: `set_exception` would leave DDP with a cast error.
        return self._outcome.then(lambda done: _result_or_raise(done.value()))

    def ended(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Return a future that gives `tensor`, the result, once the operation has ended, well or badly.

        For who asks the lane itself whether it failed, and raises its error as it is.
        """
        return self._outcome if self._cuda is not None else self._outcome.then(lambda done: tensor)

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for what the current stream had been given when this ticket was made."""
        if self._ready is not None:
            stream.wait_event(self._ready)

    def settle(self, error: LaneError | None) -> None:
        """End the wait, well or with the error; on CUDA the waiters' streams wait for the current one."""
        if self._cuda is None:
            self._outcome.set_result(self._result if error is None else error)
        elif error is None:
            self._ended = torch.cuda.current_stream(self._cuda).record_event()
            self._outcome.set_result(self._result)
        else:
            self._outcome.set_exception(error)
        self._result = None  # a future that is kept should not keep the tensor twice

    def wait(self) -> Tensor:
        """Block until the result is there; on CUDA the current stream, not the host, waits. Raises LaneError."""
        return _result_or_raise(self._outcome.wait())

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or badly; on CUDA whether its kernels have."""
        return self._outcome.done() and (self._ended is None or self._ended.query())


def _result_or_raise(value: Tensor | LaneError) -> Tensor:
    if isinstance(value, LaneError):
        raise LaneError(*value.args)  # anew: a traceback would keep the frames of every waiter alive
    return value
