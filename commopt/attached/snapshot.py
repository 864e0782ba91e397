# SPDX-License-Identifier: Apache-2.0
"""`Snapshot`, a rank's state of one moment on its way to host memory, and `StepBoundary`: which moments those are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from commopt.cuda_streams import current_stream
from commopt.errors import ConfigurationError
from commopt.lanes.lane import BetweenTasks, Lane

Copy = Callable[[Tensor], Tensor]
"""Returns a copy of a tensor in host memory, which on CUDA has the values once the current stream comes there."""


class StepBoundary:
    """Whether a step is under way. Only between two steps does all of a state belong together."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # of one thread again: a signal may be handled at any time
        self._under_way = ""

    def begin(self, what: str) -> None:
        """Take note that `what` begins."""
        with self._lock:
            self._under_way = what

    def end(self) -> None:
        """Take note that it has ended."""
        self._under_way = ""

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Take note that `what`, perhaps a part of a step, is under way meanwhile."""
        before = self._under_way
        self.begin(what)
        try:
            yield
        finally:
            self._under_way = before

    @contextmanager
    def between(self, call: str) -> Iterator[None]:
        """Let no step begin meanwhile. Raises ConfigurationError while one is under way."""
        with self._lock:
            if self._under_way:
                raise ConfigurationError(
                    f"{call} came while {self._under_way} was under way, or after one that raised: some of its "
                    f"gradients count already and others do not; call it between two steps, on every rank, in the "
                    f"thread that trains (of a signal or a timer take a note, and call it behind the step)"
                )
            yield


class Snapshot:
    """A rank's state of one moment, on its way to host memory; made by `CommState.async_state_dict`."""

    def __init__(
        self,
        lane: Lane,
        read: Callable[[Copy], dict[str, Any]],
        settle: Callable[[dict[str, Any]], None],
        *,
        pinned: bool,
    ) -> None:
        """read: makes the state, on the lane. settle: finishes it once all copies have arrived.

        pinned: whether copies from a GPU go to pinned memory, without which the host waits for each.
        """
        self._lane = lane
        self._settle: Callable[[dict[str, Any]], None] | None = settle
        self._state: dict[str, Any] = {}
        self._lock = threading.Lock()

        def copy() -> None:
            self._state = read(partial(_to_host, pinned=pinned))

        self._work: BetweenTasks = lane.between(copy)

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        return self._work.is_completed()

    def result(self) -> dict[str, Any]:
        """Return the state, as state_dict() would have at that moment; wait until it is in host memory.

        For any thread. Raises LaneError when communication has failed before that moment.
        """
        self._work.wait(lambda: not self._lane.has_ended())
        with self._lock:
            if self._settle is not None:
                self._settle(self._state)
                self._settle = None
        return self._state


def _to_host(tensor: Tensor, *, pinned: bool) -> Tensor:
    found = tensor.detach()
    if found.device.type != "cuda":
        return found.to("cpu", copy=True)
    host = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=pinned)
    host.copy_(found, non_blocking=True)
    found.record_stream(current_stream(found.device))  # it may be freed before the stream comes there
    return host
