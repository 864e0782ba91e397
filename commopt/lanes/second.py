"""A second lane beside a lane, so that one operation can use two levels of the network at once.

Only the work of the first lane starts anything here, and it waits for everything it started before it ends. A failure
of the second lane is thus one of the first lane's work, which alone reports it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue

import torch

from commopt.errors import LaneError
from commopt.lanes.modes import fresh_modes
from commopt.recording import Message, current, helping

_CLOSE_TIMEOUT_S = 5.0


class Started(ABC):
    """Work that the second lane has been given."""

    @abstractmethod
    def join(self) -> None:
        """Let the first lane go on only after it: the host waits, on CUDA its stream. Raises what the work raised."""


class Second(ABC):
    """Takes work of the first lane in one order, to be run beside what the first lane does next."""

    @abstractmethod
    def start(self, work: Callable[[], None]) -> Started:
        """Run `work` after everything the first lane has done so far, and after what was started here before."""

    @abstractmethod
    def stop(self) -> None:
        """Begin no more work: the first lane has failed. What runs now ends by itself or with its process groups."""

    @abstractmethod
    def close(self) -> bool:
        """Stop, once the first lane has ended; return False if that takes longer than a few seconds."""


# ------------------------------------------------------------------------------------------ CPU


class SecondWorker(Second):
    """A second thread; `own` is what the first lane knows its threads by."""

    def __init__(self, own: threading.local) -> None:
        self._own = own
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._stopped = False
        # A daemon, as the first lane's thread is.
        self._thread = threading.Thread(target=self._serve, name="commopt-second-lane", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> Started:
        """See Second."""
        task = _Task(work, torch.is_inference_mode_enabled(), current())
        self._queue.put(task)
        return task

    def stop(self) -> None:
        """See Second."""
        self._stopped = True
        self._queue.put(None)

    def close(self) -> bool:
        """See Second."""
        self.stop()
        self._thread.join(_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        self._own.busy = True
        while (task := self._queue.get()) is not None:
            # The first error ends the lane, as anywhere: what was started after it relies on what has failed.
            if not task.run(refused=self._stopped):
                self._stopped = True
            del task  # keep no tensor, and no group, alive while idle


class _Task(Started):
    def __init__(self, work: Callable[[], None], inference: bool, message: Message | None) -> None:
        self._work: Callable[[], None] | None = work
        self._inference = inference
        self._message = message
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def run(self, *, refused: bool) -> bool:
        """Do the work in the calling thread unless `refused`; return whether it was done."""
        work, self._work = self._work, None
        try:
            if refused or work is None:
                raise LaneError("the second lane has stopped after an error")
            with fresh_modes(inference=self._inference), helping(self._message):
                work()
        except BaseException as error:  # whatever it is, the first lane must hear of it
            self._error = error
        self._ended.set()
        return self._error is None

    def join(self) -> None:
        """See Started."""
        self._ended.wait()
        if self._error is not None:
            raise self._error


# ----------------------------------------------------------------------------------------- CUDA


class SecondStream(Second):
    """A second stream, filled by the thread that fills the first: all kernels are launched in one order.

    Errors raise where they happen. The first stream waits for everything started here before an operation ends, and
    this one, whenever work is started, for all that the first was given: memory of this stream may be freed anywhere
    without being recorded. Work started here must not free memory of the first stream, which that would use again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)

    def start(self, work: Callable[[], None]) -> Started:
        """See Second."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        return _Recorded(self._device, self._stream.record_event())

    def stop(self) -> None:
        """See Second; nothing is queued on the host."""

    def close(self) -> bool:
        """See Second; the first lane's stream has waited for this one."""
        return True


class _Recorded(Started):
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def join(self) -> None:
        """See Started."""
        torch.cuda.current_stream(self._device).wait_event(self._event)
