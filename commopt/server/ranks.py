# SPDX-License-Identifier: Apache-2.0
"""The processes of one worker: a single process, or the ranks of a DDP model, whose first rank talks to the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt import errors
from commopt.errors import CommoptError, TransportError
from commopt.feedback.parameter_buckets import ParameterBucket
from commopt.lanes.client import LaneClient

_WAIT_S = 0.5  # between two broadcasts of "not yet", which keep the group's timeout from passing
_NOT_YET = {"done": False}


class WorkerRanks:
    """The ranks that share one connection to the server. Collective over the ranks of a group, as `LaneClient.join`.

    They watch over each other: a rank that dies is named on all others, though DDP's averages are torch's own.

    group: process group of a DDP model; None for a single process.
    device: device whose tensors the group can send; None: the CPU.
    settings: what the ranks compare. Raises MismatchError on all of them when it differs.
    problem: the error of this rank, which raises it; the others raise a ConfigurationError that names it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | None = None,
        settings: Mapping[str, str] | None = None,
        problem: Exception | None = None,
    ) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self._device = torch.device("cpu") if device is None else device
        self.is_first = group is None or group.rank() == 0
        self._client: LaneClient | None = None
        if self._group is not None:
            self._client = LaneClient.join("Worker", self._group, None, None, problem, meets=True, **(settings or {}))

    def close(self) -> None:
        """Watch no more."""
        if self._client is not None:
            self._client.close()

    def run_on_first(self, call: Callable[[], Any]) -> Any:
        """Run `call` on the first rank. Return its result, a JSON value, and raise its error, on all ranks."""
        if self._group is None:
            return call()
        if self.is_first:
            background = _BackgroundCall(call)
            while not background.over.wait(_WAIT_S):
                self._broadcast_json(_NOT_YET)
            found = self._broadcast_json(
                {"done": True, "result": background.result, "error": _error_to_json(background.error)}
            )
        else:
            while not (found := self._broadcast_json(None))["done"]:
                pass
        if found["error"] is not None:
            raise _error_from_json(found["error"]) from (background.error if self.is_first else None)
        return found["result"]

    def broadcast(self, bucket: ParameterBucket) -> None:
        """Copy the first rank's values to all ranks."""
        if self._group is not None:
            values = bucket.values(copy=True)
            dist.broadcast(values, group=self._group, group_src=0)
            bucket.put(values)

    def _broadcast_json(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Return the first rank's message, for which the others pass None. Sent as tensors, so nothing is unpickled."""
        text = b"" if message is None else json.dumps(message).encode()
        length = torch.tensor([len(text)], device=self._device)
        dist.broadcast(length, group=self._group, group_src=0)
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        if message is not None:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        moved: Tensor = data.to(self._device)
        dist.broadcast(moved, group=self._group, group_src=0)
        found: dict[str, Any] = json.loads(moved.cpu().numpy().tobytes())
        return found


class _BackgroundCall:
    """A call in a thread of its own, on the CUDA stream of the calling thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self.over = Event()
        self._call = call
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        Thread(target=self._run, name="commopt-exchange", daemon=True).start()

    @torch.no_grad()
    def _run(self) -> None:
        try:
            with torch.cuda.stream(self._stream):  # None: nothing changes
                self.result = self._call()
        except Exception as error:  # raised on all ranks
            self.error = error
        finally:
            self.over.set()


def _error_to_json(error: Exception | None) -> list[str] | None:
    if error is None:
        return None
    if isinstance(error, CommoptError):
        return [type(error).__name__, str(error)]
    return [TransportError.__name__, f"the first rank of this worker failed: {type(error).__name__}: {error}"]


def _error_from_json(text: list[str]) -> CommoptError:
    kind = getattr(errors, text[0], None)
    return (kind if isinstance(kind, type) and issubclass(kind, CommoptError) else TransportError)(text[1])
