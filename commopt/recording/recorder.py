"""The last steps of one rank in a ring: marks in time, messages under way, and their records in the end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch

from commopt.recording.records import BucketRecord, MessageRecord, Span, StepRecord

Mark = Any  # nanoseconds, or a CUDA event


class Clock:
    """The host's clock: perf_counter."""

    def mark(self) -> Mark:
        """Return a mark of this moment; on CUDA, of when the current stream gets here. Never waits."""
        return perf_counter_ns()

    def times_us(self, groups: Sequence[Sequence[Mark]]) -> list[list[float]]:
        """Return the times of marks, which come in groups of one step each, oldest first. May wait for the device."""
        return [[mark / 1000 for mark in group] for group in groups]

    def release(self, marks: Iterable[Mark]) -> None:
        """Take back marks that nobody will ask for again."""

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured, in which a mark would have no time."""
        return False


class CudaClock(Clock):
    """A GPU's: CUDA events out of a pool, which grows until it serves all steps that are kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: deque[torch.cuda.Event] = deque()

    def mark(self) -> Mark:
        """Return an event of when the current stream gets here."""
        try:
            event = self._pool.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def times_us(self, groups: Sequence[Sequence[Mark]]) -> list[list[float]]:
        """Return the times of events; waits for all work of the device.

        The host's clock and the device's are compared once, after the wait. Between events torch gives the time as a
        float32 of milliseconds, so distances are kept short: from step to step back from now, and inside a step.
        """
        torch.cuda.synchronize(self._device)
        later = torch.cuda.Event(enable_timing=True)
        later.record(torch.cuda.current_stream(self._device))
        later.synchronize()
        later_us = perf_counter_ns() / 1000
        times: list[list[float]] = []
        for group in reversed(groups):
            first = group[0]
            first_us = later_us - first.elapsed_time(later) * 1000
            times.append([first_us + first.elapsed_time(event) * 1000 for event in group])
            later, later_us = first, first_us
        return times[::-1]

    def release(self, marks: Iterable[Mark]) -> None:
        """Take events back into the pool."""
        self._pool.extend(marks)

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()


def clock_for(device: torch.device) -> Clock:
    """Return a new clock for `device`."""
    return CudaClock(device) if device.type == "cuda" else Clock()


class Message:
    """Work submitted to a lane; `spans` grows while it runs."""

    __slots__ = ("buckets", "finished", "label", "mark", "nbytes", "queued", "spans", "started")

    def __init__(self, buckets: tuple[int, ...], label: str, nbytes: int, mark: Callable[[], Mark]) -> None:
        self.buckets = buckets
        self.label = label
        self.nbytes = nbytes
        self.mark = mark
        self.queued = mark()
        self.started: Mark | None = None
        self.finished: Mark | None = None
        self.spans: list[tuple[str, str, int, Mark, Mark]] = []

    def marks(self) -> Iterator[Mark]:
        """Yield all marks, in the order in which `record` takes their times."""
        yield from (self.queued, self.started, self.finished)
        for _, _, _, begin, end in self.spans:
            yield from (begin, end)

    def record(self, times_us: Iterator[float]) -> MessageRecord:
        """Return what happened; `times_us` are those of `marks()`."""
        queued_us, started_us, finished_us = next(times_us), next(times_us), next(times_us)
        spans = [Span(level, name, nbytes, next(times_us), next(times_us)) for level, name, nbytes, _, _ in self.spans]
        spans.sort(key=lambda span: span.begin_us)
        return MessageRecord(self.buckets, self.label, self.nbytes, queued_us, started_us, finished_us, tuple(spans))


class _Here(threading.local):
    message: Message | None = None


_here = _Here()
_nothing: AbstractContextManager[None] = nullcontext()


def current() -> Message | None:
    """Return the message this thread works for, or None when nobody records."""
    return _here.message


def running(message: Message | None) -> AbstractContextManager[None]:
    """Make `message` this thread's and mark where its work starts and ends; without an end when the work raises."""
    return _nothing if message is None else _Working(message)


def primitive(level: str, name: str, nbytes: int) -> AbstractContextManager[None]:
    """Record one collective as a span of this thread's message, if there is one."""
    message = _here.message
    return _nothing if message is None else _Primitive(message, level, name, nbytes)


# Classes rather than generators: a third of the time, and these surround every collective.
class _Working(AbstractContextManager[None]):
    __slots__ = ("_before", "_message")

    def __init__(self, message: Message) -> None:
        self._message = message
        self._before: Message | None = None

    def __enter__(self) -> None:
        self._before, _here.message = _here.message, self._message
        self._message.started = self._message.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _here.message = self._before
        if kind is None:
            self._message.finished = self._message.mark()


class _Primitive(AbstractContextManager[None]):
    __slots__ = ("_begin", "_level", "_message", "_name", "_nbytes")

    def __init__(self, message: Message, level: str, name: str, nbytes: int) -> None:
        self._message = message
        self._level = level
        self._name = name
        self._nbytes = nbytes
        self._begin: Mark = None

    def __enter__(self) -> None:
        self._begin = self._message.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        message = self._message
        message.spans.append((self._level, self._name, self._nbytes, self._begin, message.mark()))


class Recorder:
    """Keeps the last `keep_steps` steps; one per HookState.

    The thread of the hook tells it of steps, buckets and messages, the lane's thread marks when messages run, and a
    step may still be under way there when the next one begins. Nothing waits for a device but `steps`.
    `enabled` is switched between steps only. While a CUDA graph is captured nothing is recorded.
    """

    def __init__(self, keep_steps: int = 64) -> None:
        self.enabled = False
        self._keep_steps = keep_steps
        self._forward_us: float | None = None
        self._clocks: dict[torch.device, Clock] = {}
        self._lock = threading.Lock()
        self._ring: deque[_Step] = deque()
        self._open: _Step | None = None

    def forward_begins(self) -> None:
        """Note the host's time; of several forwards before one step (accumulated gradients) the first counts."""
        if self.enabled and self._forward_us is None:
            self._forward_us = perf_counter_ns() / 1000

    def begin_step(self, step: int, device: torch.device) -> None:
        """Begin a step, as its first bucket is ready; a step before it whose backward did not end is forgotten."""
        if not self.enabled:
            return
        clock = self._clocks.get(device)
        if clock is None:
            clock = self._clocks[device] = clock_for(device)
        forward_us, self._forward_us = self._forward_us, None
        with self._lock:
            before, self._open = self._open, None
            if before is not None and before.compute_end is not None:
                self._ring.append(before)
                if len(self._ring) > self._keep_steps:
                    self._ring.popleft().release()
            if not clock.is_capturing():
                self._open = _Step(step, clock, forward_us)

    def bucket(self, number: int, label: str, nbytes: int) -> None:
        """Note that DDP's bucket `number` is ready."""
        step = self._open
        if self.enabled and step is not None:
            step.buckets.append((number, label, nbytes, step.clock.mark()))

    def compute_ends(self) -> None:
        """Note that the step's last gradient is ready."""
        step = self._open
        if self.enabled and step is not None:
            step.compute_end = step.clock.mark()

    def message(self, numbers: Sequence[int], label: str, nbytes: int) -> Message | None:
        """Note that these buckets are handed to the lane now; None when nothing is recorded."""
        step = self._open
        if not self.enabled or step is None:
            return None
        message = Message(tuple(numbers), label, nbytes, step.clock.mark)
        step.messages.append(message)
        return message

    def steps(self) -> list[StepRecord]:
        """Return the steps whose messages have all finished, oldest first; on CUDA this waits for the device."""
        with self._lock:
            kept = [*self._ring, *([] if self._open is None else [self._open])]
            new = [step for step in kept if step.is_complete()]
            for clock in {id(step.clock): step.clock for step in new}.values():
                _settle(clock, [step for step in new if step.clock is clock])
            return [step.record for step in kept if step.record is not None][-self._keep_steps :]

    def clear(self) -> None:
        """Forget all steps, also one under way."""
        with self._lock:
            self._ring.clear()
            self._open = None
            self._forward_us = None


class _Step:
    """Marks of one step, until `record` takes their place."""

    __slots__ = ("buckets", "clock", "compute_end", "forward_us", "messages", "number", "record")

    def __init__(self, number: int, clock: Clock, forward_us: float | None) -> None:
        self.number = number
        self.clock = clock
        self.forward_us = forward_us
        self.buckets: list[tuple[int, str, int, Mark]] = []
        self.compute_end: Mark | None = None
        self.messages: list[Message] = []
        self.record: StepRecord | None = None

    def is_complete(self) -> bool:
        """Whether every bucket travelled, and every message arrived, but nobody has asked for the times yet."""
        if self.record is not None or self.compute_end is None or not self.messages:
            return False
        sent = {number for message in self.messages for number in message.buckets}
        return all(message.finished is not None for message in self.messages) and sent.issuperset(
            number for number, _, _, _ in self.buckets
        )

    def marks(self) -> list[Mark]:
        """All marks in the order in which `settle` takes their times."""
        ready = [mark for _, _, _, mark in self.buckets]
        return [*ready, self.compute_end, *(mark for message in self.messages for mark in message.marks())]

    def settle(self, times_us: Iterator[float]) -> None:
        """Make the record; the marks are no longer needed."""
        buckets = tuple(
            BucketRecord(number, label, nbytes, next(times_us)) for number, label, nbytes, _ in self.buckets
        )
        compute_end_us = next(times_us)
        messages = tuple(message.record(times_us) for message in self.messages)
        self.record = StepRecord(self.number, self.forward_us, compute_end_us, buckets, messages)
        self.buckets, self.messages = [], []

    def release(self) -> None:
        """Give the marks back, unless somebody may still write one."""
        if self.is_complete():
            self.clock.release(self.marks())


def _settle(clock: Clock, steps: Sequence[_Step]) -> None:
    marks = [step.marks() for step in steps]
    for step, times_us in zip(steps, clock.times_us(marks), strict=True):
        step.settle(iter(times_us))
    for group in marks:
        clock.release(group)
