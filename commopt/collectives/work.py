"""The handle of a collective that was started with async_op=True."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.errors import MismatchError
from commopt.lanes import Ticket


class Work:
    """Wait for it before reading the array; several may be in flight, and they finish in the order they started."""

    def __init__(self, ticket: Ticket, array: Any, refusals: Sequence[MismatchError]) -> None:
        """refusals: holds an error, once the operation has ended, when it was refused on all ranks."""
        self._ticket = ticket
        self._array = array
        self._refusals = refusals

    def wait(self) -> Any:
        """Return the caller's array once it holds the result; on CUDA the current stream, not the host, waits.

        Raises MismatchError when ranks made different calls, LaneError when the collective failed on any rank.
        """
        self._require_accepted(self._ticket.wait())
        return self._array

    def get_future(self) -> torch.futures.Future[Tensor]:
        """Return a future of the result as a tensor; what `wait` raises is a RuntimeError there, as torch has it."""
        return self._ticket.future.then(lambda done: self._require_accepted(done.value()))

    def is_completed(self) -> bool:
        """Return whether it has ended, well or badly; on CUDA whether the result is there, not whether it is queued."""
        return self._ticket.is_completed()

    def _require_accepted(self, result: Tensor) -> Tensor:
        if self._refusals:
            raise MismatchError(*self._refusals[0].args)
        return result
