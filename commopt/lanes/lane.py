# SPDX-License-Identifier: Apache-2.0
"""A lane runs all communication of one device in one total order, task by task."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from commopt.cuda_streams import current_stream
from commopt.errors import CommoptError, LaneError
from commopt.groups import Membership, Started
from commopt.lanes.failure import fail

_CLOSE_TIMEOUT_S = 5.0
_LOOK_S = 0.5
_AT_ONCE = 2
_ENDED = object()  # an exchange has ended


@dataclass(eq=False, slots=True)
class Task:
    """A callable for the lane; every rank of `membership` must submit it at the same point of its program.

    owner: the name of the client that submits it.
    sequence: its number among the client's tasks.
    run: communicates, and leaves its outcome in the tensor that is submitted beside it; or returns what goes on.
    title: its text names the task in errors, and is asked for only there.
    overlaps: whether it may run while the one before it goes on, if that overlaps too.
    """

    membership: Membership
    owner: str
    sequence: int
    run: Callable[[], Started | None]
    title: object
    numel: int
    device_type: str
    overlaps: bool = False

    def __str__(self) -> str:
        return f"{self.owner}, operation {self.sequence}: {self.title} of {self.numel} elements"

    @property
    def place(self) -> Place:
        """Its place among the tasks of all ranks."""
        return Place(
            self.membership.name, self.membership.ranks, self.owner, self.sequence, str(self.title), self.numel
        )


class Place(NamedTuple):
    """The place of a task among those of all ranks, whose first four fields are alike on all of them."""

    membership: str
    ranks: tuple[int, ...]
    owner: str
    sequence: int
    title: str
    numel: int

    def __str__(self) -> str:
        return f"{self.title} of {self.numel} elements ({self.owner}, operation {self.sequence})"


class Pending:
    """The pending result of a task.

    kernels_end: the event at the end of the task's kernels; None before they are launched, and on a CPU.
    ended: a future of the tensor that holds the result. It never fails. It is for callers that ask the lane itself
    whether it failed, as the hook does, and raise the lane's error as it is.
    """

    def __init__(self, result: Tensor) -> None:
        """Stand for `result`, the tensor that will hold the outcome; on CUDA as the current stream leaves it."""
        self._result: Tensor | None = result
        self._error: LaneError | None = None
        self._ready: torch.cuda.Event | None = None
        self.kernels_end: torch.cuda.Event | None = None
        self._cuda = result.device if result.device.type == "cuda" else None
        self.of_inference = result.is_inference()
        devices: list[int | str | torch.device] | None = None
        if self._cuda is not None:
            self._ready = current_stream(self._cuda).record_event()
            devices = [self._cuda]
        self.ended: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

    @property
    def future(self) -> torch.futures.Future[Tensor]:
        """A future of the result; torch makes a RuntimeError of the LaneError that it raises, and keeps the message."""
        # Raised through `then`: `set_exception` would leave DDP with a cast error.
        return self.ended.then(lambda done: self._or_raise(done.value()))

    def delay(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for the work that the current stream had been given when this object was made."""
        if self._ready is not None:
            stream.wait_event(self._ready)

    def finish(self, error: LaneError | None) -> None:
        """End the wait, well or with the error; on CUDA the waiters' streams wait for the current one."""
        self._error = error
        if self._cuda is not None and error is None:
            self.kernels_end = current_stream(self._cuda).record_event()
        assert self._result is not None  # finished once
        self.ended.set_result(self._result)
        self._result = None  # a future that is kept should not keep the tensor twice

    def wait(self) -> Tensor:
        """Block until the result is there; on CUDA the current stream, not the host, waits. Raises LaneError."""
        return self._or_raise(self.ended.wait())

    def is_completed(self) -> bool:
        """Return whether the task has ended, well or badly; on CUDA whether its kernels have."""
        return self.ended.done() and (self.kernels_end is None or self.kernels_end.query())

    @property
    def arrived(self) -> bool:
        """Whether the result is there for certain; never on CUDA, where kernels may fail after they were launched."""
        return self._cuda is None and self.ended.done() and self._error is None

    def _or_raise(self, result: Tensor) -> Tensor:
        if self._error is not None:
            raise LaneError(*self._error.args)  # anew: a traceback would keep the frames of every waiter alive
        return result


class BetweenTasks:
    """Work of this rank alone, between two tasks of a lane; see Lane.between.

    kernels_end: the event at the end of its kernels, on CUDA.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self.kernels_end: torch.cuda.Event | None = None
        self._run: Callable[[], None] | None = run
        self._ended = threading.Event()
        self._error: Exception | None = None

    def __call__(self) -> None:
        """Do it; an error is for those that wait, and no failure of the lane."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            with fresh_modes(inference=False):
                run()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()

    def is_completed(self) -> bool:
        """Return whether it has ended, well or badly; on CUDA whether its kernels have."""
        return self._ended.is_set() and (self.kernels_end is None or self.kernels_end.query())

    def wait(self, is_alive: Callable[[], bool] = lambda: True) -> None:
        """Wait for the end, on CUDA of the kernels too; raise what the work raised.

        is_alive: whether anybody is there to do it; else this thread does.
        """
        while not self._ended.wait(_LOOK_S):
            if not is_alive():
                self()
        if self.kernels_end is not None:
            self.kernels_end.synchronize()
        if self._error is not None:
            raise self._error


class Lane(ABC):
    """One per device and process; the first failure poisons it for good."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._error: LaneError | None = None
        self._verdict = threading.RLock()  # held from a failure until `_error` says what it was
        self._own = threading.local()  # `busy`: whether this thread is at work for the lane
        self._task: Task | None = None  # under way; read by the heartbeat's thread

    def submit(self, task: Task, result: Tensor, inputs: Sequence[Tensor] = ()) -> Pending:
        """Queue `task`, which reads `inputs` and leaves its outcome in `result`.

        It sees both as the submitting thread (on CUDA: its current stream) left them. Raises LaneError when the lane
        is poisoned, CommoptError when called from a task of the lane: it would wait for its own end.
        """
        if getattr(self._own, "busy", False):
            raise CommoptError(
                f"{task} was called inside lane work, by an aggregator or by a callback of a pending future, and "
                f"would wait for its own end; call it after the outer operation's wait()"
            )
        if self._error is not None:
            self.require_healthy()
        return self._start(task, Pending(result), (result, *inputs))

    @abstractmethod
    def _start(self, task: Task, pending: Pending, tensors: Sequence[Tensor]) -> Pending:
        """Queue `task`, which uses `tensors`; return `pending`."""

    def between(self, run: Callable[[], None]) -> BetweenTasks:
        """Let `run` come after all tasks that were submitted before, and before all others, also where one has failed.

        It is this rank's alone and must not communicate. Raises CommoptError when called from a task of the lane.
        """
        if getattr(self._own, "busy", False):
            raise CommoptError(
                "this was called inside lane work, by an aggregator or by a callback of a pending future, and would "
                "wait for its own end; call it after the outer operation's wait()"
            )
        return self._start_between(BetweenTasks(run))

    @property
    def failed(self) -> bool:
        """Whether a task has failed."""
        return self._error is not None

    @abstractmethod
    def _start_between(self, work: BetweenTasks) -> BetweenTasks:
        """Queue `work`; return it."""

    def has_ended(self) -> bool:
        """Return whether nobody will do what is queued any more."""
        return False

    @abstractmethod
    def close(self) -> bool:
        """Finish what was submitted and stop; return False after a few seconds in which it did not end."""

    def finish(self) -> bool:
        """Return True once all that was submitted before has ended, False at once when called from this lane's work."""
        if getattr(self._own, "busy", False):
            return False
        self._wait()
        return True

    def under_way(self) -> Place | None:
        """Return the place of the task that has not ended, None where there is none; for another thread."""
        task = self._task
        return None if task is None else task.place

    @abstractmethod
    def _wait(self) -> None:
        """Return once all that was submitted before has ended, well or badly."""

    def require_healthy(self) -> None:
        """Raise the error that poisoned the lane, if any; wait for it while the lane is finding out."""
        with self._verdict:
            error = self._error
        if error is not None:
            raise self._anew(error)

    def _anew(self, error: LaneError) -> LaneError:
        """Return what to raise: a traceback of the same error would keep the frames of every caller alive."""
        return LaneError(*error.args)

    def _run(self, task: Task, pending: Pending, finish: Callable[[], None] | None = None) -> Started | None:
        """Run `task` in the calling thread, or only what is left of it; return what goes on, None when it has ended.

        `_error` is set if the lane is poisoned by then. Ctrl-C poisons it too, and goes on.
        """
        if self._error is not None:
            return None
        self._task = task
        run = finish or task.run
        try:
            if task.membership.order is not None and finish is None:
                task.membership.require_same_order(task.device_type, str(task))
            # A tensor made in inference mode can be written in no other.
            if _is_fresh(inference=pending.of_inference):
                return run()
            with fresh_modes(inference=pending.of_inference):
                return run()
        except BaseException as error:
            with self._verdict:
                self._error = _reported(task, error)
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            self._task = None
        return None


def _reported(task: Task, error: BaseException) -> LaneError:
    from commopt.lanes.heartbeat import record_failure  # which looks at the lanes

    try:
        failure = fail(task.membership, str(task), error)
    except Exception as trouble:  # poisoned all the same
        failure = LaneError(f"{task} failed: {error}; reporting it failed too: {trouble}")
    record_failure(task.place, str(failure))
    return failure


def _is_fresh(*, inference: bool) -> bool:
    """Return whether `fresh_modes` would change nothing, as in most backward passes."""
    return (
        torch._C._len_torch_function_stack() == torch._C._len_torch_dispatch_stack() == 0
        and torch.is_inference_mode_enabled() == inference
        and not torch.is_grad_enabled()
        and not torch._C._is_any_autocast_enabled()
    )


@contextmanager
def fresh_modes(*, inference: bool) -> Iterator[None]:
    """Run as in a new thread, without gradients, and in inference mode or not.

    Put aside are autocast of every device type, modes of torch functions (torch.set_default_device, `with
    torch.device(...)`) and of the dispatcher (profilers, fake tensors). A backward pass has those of its caller.
    """
    function_modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    # Asked first: to put dispatch modes aside imports half of torch.
    dispatch_modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    try:
        # In this order: inference_mode(False) would switch gradients on.
        with dispatch_modes, torch._C._DisableAutocast(), torch.inference_mode(inference), torch.no_grad():
            yield
    finally:
        for mode in reversed(function_modes):
            torch._C._push_on_torch_function_stack(mode)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A task whose exchange goes on."""

    task: Task
    pending: Pending
    started: Started


class WorkerLane(Lane):
    """The CPU lane: one thread that runs tasks first in, first out, while backward goes on.

    Gloo's collectives block their caller; gloo releases the GIL. Tasks that overlap are started, up to two at once, as
    stock DDP starts its buckets: gloo has as many threads. They end in their order.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # An item: a task, work between two tasks, None for the end of the lane; or _ENDED.
        self._queue: SimpleQueue[tuple[Task, Pending] | BetweenTasks | object | None] = SimpleQueue()
        # A daemon: a peer that never answers must not keep this process from exiting.
        self._thread = threading.Thread(target=self._run_queue, name="commopt-lane", daemon=True)
        self._thread.start()

    def _start(self, task: Task, pending: Pending, tensors: Sequence[Tensor]) -> Pending:
        self._queue.put((task, pending))  # `task` itself keeps `tensors` alive
        return pending

    def close(self) -> bool:
        """Finish what was submitted and end the thread, as Lane.close."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _wait(self) -> None:
        self._start_between(BetweenTasks(lambda: None)).wait(self._thread.is_alive)  # it may have been closed before

    def _start_between(self, work: BetweenTasks) -> BetweenTasks:
        self._queue.put(work)
        return work

    def has_ended(self) -> bool:
        """Return whether the thread has ended, as Lane.has_ended."""
        return not self._thread.is_alive()

    def _run_queue(self) -> None:
        self._own.busy = True
        waiting: deque[Any] = deque()
        under_way: deque[_UnderWay] = deque()
        while True:
            item = self._queue.get()
            if item is not _ENDED:
                waiting.append(item)
            del item  # keep no tensor alive while idle
            while under_way and under_way[0].started.future.done():
                self._end(under_way.popleft())
            while waiting and (not under_way or self._may_overlap(waiting[0], under_way)):
                if waiting[0] is None:
                    return
                if (goes_on := self._begin(waiting.popleft())) is not None:
                    under_way.append(goes_on)
            if under_way:
                self._task = under_way[0].task

    def _may_overlap(self, item: Any, under_way: Sequence[_UnderWay]) -> bool:
        return isinstance(item, tuple) and item[0].overlaps and len(under_way) < _AT_ONCE

    def _begin(self, item: tuple[Task, Pending] | BetweenTasks) -> _UnderWay | None:
        """Run a task, or work between two, as all before it has ended; return the task if it goes on."""
        if isinstance(item, BetweenTasks):
            item()
            return None
        task, pending = item
        started = self._run(task, pending)
        if started is None:
            pending.finish(self._error)
            return None
        started.future.add_done_callback(lambda done: self._queue.put(_ENDED))
        return _UnderWay(task, pending, started)

    def _end(self, ended: _UnderWay) -> None:
        self._run(ended.task, ended.pending, ended.started.finish)
        ended.pending.finish(self._error)
