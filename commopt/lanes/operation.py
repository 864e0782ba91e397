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
    """The pending result of an operation: `future` fails with the lane's error, as does `wait`."""

    def __init__(self, result: Tensor) -> None:
        """Stand for `result`, the tensor that will hold the outcome."""
        devices: list[int | str | torch.device] | None = [result.device] if result.device.type == "cuda" else None
        self._outcome: torch.futures.Future[Any] = torch.futures.Future(devices=devices)  # the tensor, or a LaneError
        self._result: Tensor | None = result

    @property
    def future(self) -> torch.futures.Future[Tensor]:
        """A future of the result; torch makes a RuntimeError of the LaneError that it raises, and keeps the message."""
        # Raised through `then`: `set_exception` would leave DDP with a cast error.
        return self._outcome.then(lambda done: _result_or_raise(done.value()))

    def ended(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Return a future that gives `tensor` once the operation has ended, well or badly.

        For who asks the lane itself whether it failed, and raises its error as it is.
        """
        return self._outcome.then(lambda done: tensor)

    def settle(self, error: LaneError | None) -> None:
        """End the wait, well or with the error; on CUDA the waiters' streams wait for the current one."""
        self._outcome.set_result(self._result if error is None else error)
        self._result = None  # a future that is kept should not keep the tensor twice

    def wait(self) -> Tensor:
        """Block until the result is there; on CUDA the current stream, not the host, waits. Raises LaneError."""
        return _result_or_raise(self._outcome.wait())

    def is_completed(self) -> bool:
        """Return whether the operation has ended, well or badly."""
        return self._outcome.done()


def _result_or_raise(value: Tensor | LaneError) -> Tensor:
    if isinstance(value, LaneError):
        raise LaneError(*value.args)  # anew: a traceback would keep the frames of every waiter alive
    return value
