"""The handle of a collective that was started with async_op=True."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commopt.lanes import Ticket


class Work:
    """Wait for it before reading the array; several may be in flight, and they finish in the order they started."""

    def __init__(self, ticket: Ticket, array: Any) -> None:
        self._ticket = ticket
        self._array = array

    def wait(self) -> Any:
        """Return the caller's array once it holds the result; on CUDA the current stream, not the host, waits.

        Raises LaneError when the collective failed on any rank.
        """
        self._ticket.wait()
        return self._array

    def get_future(self) -> torch.futures.Future[Tensor]:
        """Return a future of the result as a tensor."""
        return self._ticket.future

    def is_completed(self) -> bool:
        """Return whether it has ended, well or badly; on CUDA whether the result is there, not whether it is queued."""
        return self._ticket.is_completed()
