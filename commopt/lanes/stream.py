# SPDX-License-Identifier: Apache-2.0
"""The CUDA lane: one side stream, filled by the thread that submits, so that backward's kernels run beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from commopt.cuda_streams import captures_of_others_allowed, current_stream, on_stream
from commopt.errors import LaneError
from commopt.groups import Membership, close_together, joined
from commopt.lanes.lane import BetweenTasks, Lane, Pending, Place, Task

_Launched = tuple[torch.cuda.Event, Membership, str, int, int]

_WATCH_PERIOD_S = 0.5
_CLOSE_TIMEOUT_S = 5.0
_CLOSE_POLL_S = 0.01
_RECOVERY = (
    "Over NCCL, torch ends processes that lost a peer a minute later; to go on in this one, start it with "
    "TORCH_NCCL_ASYNC_ERROR_HANDLING=0."
)


class StreamLane(Lane):
    """All collectives are launched with async_op=False on one stream: one order, no deadlock between communicators.

    NCCL connects a communicator in its first collective, where the host waits for the other ranks: they come to it in
    this order too, so nothing is connected before it is used, and each communicator takes GPU memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # High priority: the few blocks of a communication kernel should not queue behind backward's thousands.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._order = threading.Lock()
        self._launched: _Launched | None = None
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="commopt-watch", daemon=True)
        self._watcher.start()

    def _start(self, task: Task, pending: Pending, tensors: Sequence[Tensor]) -> Pending:
        """Launch `task`; a failure of the launch raises here, in the submitting thread."""
        with self._order:
            self._own.busy = True
            try:
                pending.delay(self._stream)
                for tensor in tensors:
                    tensor.record_stream(self._stream)  # its memory may be freed by a stream that is ahead of the lane
                with on_stream(self._stream):
                    self._run(task, pending)
                    error = self._error
                    pending.finish(error)
                    # An event of a capture has no end that could be asked for.
                    if (end := pending.kernels_end) is not None and not torch.cuda.is_current_stream_capturing():
                        self._launched = end, task.membership, task.owner, task.sequence, task.numel
            finally:
                self._own.busy = False
        if error is not None:
            raise self._anew(error)
        return pending

    def _start_between(self, work: BetweenTasks) -> BetweenTasks:
        """Launch the kernels of `work` here and now: on the lane's stream they come in their turn."""
        with self._order:
            self._own.busy = True
            try:
                stream = self._stream
                stream.wait_event(current_stream(self.device).record_event())
                with on_stream(stream):
                    work()
                    work.kernels_end = stream.record_event()
            finally:
                self._own.busy = False
        return work

    def under_way(self) -> Place | None:
        """Return the place of the task that is being launched, or else of the latest whose kernels have not ended."""
        launched = self._launched
        if (place := super().under_way()) is not None or launched is None:
            return place
        end, membership, owner, sequence, numel = launched
        try:
            with captures_of_others_allowed():
                ended = end.query()
        except RuntimeError:  # a CUDA error, which its own caller sees
            return None
        title = "kernels that have been launched"
        return None if ended else Place(membership.name, membership.ranks, owner, sequence, title, numel)

    def _anew(self, error: LaneError) -> LaneError:
        return LaneError(f"{error}\n{_RECOVERY}")

    def close(self) -> bool:
        """Wait for the stream, as Lane.close, and end the watcher."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        ended = False
        try:
            while not (ended := self._stream.query()) and time.monotonic() < deadline:
                time.sleep(_CLOSE_POLL_S)
        except RuntimeError:  # a CUDA error, which its own caller has seen
            pass
        self._closed.set()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_CLOSE_TIMEOUT_S)
        return ended

    def _wait(self) -> None:
        with suppress(RuntimeError):  # a CUDA error, which its own caller sees
            self._stream.synchronize()

    def _watch(self) -> None:
        """Abort this rank's communicators when another rank reports a failure, or when none could any more.

        A NCCL kernel that waits for a failed peer would spin until the watchdog of torch kills the process.
        """
        while not self._closed.wait(_WATCH_PERIOD_S):
            reports = [report for membership in joined() if (report := self._overheard(membership)) is not None]
            if reports and self._error is None:
                self._error = LaneError(reports[0])
                close_together(membership.team for membership in joined())
                return

    def _overheard(self, membership: Membership) -> str | None:
        """Return what was reported in `membership`, or that its store is silent for too long while work is queued."""
        report, silent_s = membership.failure(), membership.store.silent_s
        if report is None and silent_s > membership.timeout_s and not self._stream.query():
            return (
                f"rank {membership.global_rank} waits in a collective, and the rendezvous store has not answered for "
                f"{silent_s:.0f} s: the host that holds it is down, or the network between it and this host is cut"
            )
        return report
