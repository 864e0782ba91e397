# SPDX-License-Identifier: Apache-2.0
"""The processes of one worker: one alone, or the ranks of a DDP model, the first of which talks to the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commopt import errors
from commopt.errors import CommoptError, TransportError
from commopt.feedback.parameter_buckets import ParameterBucket

_TELL_S = 0.5  # the other ranks hear so often that there is no result yet: their group's timeout never passes
_NOT_YET = {"done": False}


class Ranks:
    """group: of a DDP model; None is a process by itself. device: of what the group can send; None: the CPU."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | None = None) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self._device = torch.device("cpu") if device is None else device
        self.leads = group is None or group.rank() == 0

    def share(self, call: Callable[[], Any]) -> Any:
        """Let the first rank do it; return what came of it on all, as JSON has it, and raise its error on all."""
        if self._group is None:
            return call()
        if self.leads:
            attempt = _Attempt(call)
            while not attempt.over.wait(_TELL_S):
                self._tell(_NOT_YET)
            found = self._tell({"done": True, "result": attempt.result, "error": _as_words(attempt.error)})
        else:
            while not (found := self._tell(None))["done"]:
                pass
        if found["error"] is not None:
            raise _error_of(found["error"]) from (attempt.error if self.leads else None)
        return found["result"]

    def spread(self, parcel: ParameterBucket) -> None:
        """Give all ranks the first one's values."""
        if self._group is not None:
            values = parcel.values(copy=True)
            dist.broadcast(values, group=self._group, group_src=0)
            parcel.put(values)

    def _tell(self, words: dict[str, Any] | None) -> dict[str, Any]:
        """Return what the first rank says; the others say None. As tensors, so that nothing is unpickled."""
        text = b"" if words is None else json.dumps(words).encode()
        length = torch.tensor([len(text)], device=self._device)
        dist.broadcast(length, group=self._group, group_src=0)
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        if words is not None:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        moved: Tensor = data.to(self._device)
        dist.broadcast(moved, group=self._group, group_src=0)
        found: dict[str, Any] = json.loads(moved.cpu().numpy().tobytes())
        return found


class _Attempt:
    """A call in a thread of its own, with this thread's device and stream."""

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
        except Exception as error:  # the others wait for this rank's word
            self.error = error
        finally:
            self.over.set()


def _as_words(error: Exception | None) -> list[str] | None:
    if error is None:
        return None
    if isinstance(error, CommoptError):
        return [type(error).__name__, str(error)]
    return [TransportError.__name__, f"the first rank of this worker failed: {type(error).__name__}: {error}"]


def _error_of(words: list[str]) -> CommoptError:
    kind = getattr(errors, words[0], None)
    return (kind if isinstance(kind, type) and issubclass(kind, CommoptError) else TransportError)(words[1])
