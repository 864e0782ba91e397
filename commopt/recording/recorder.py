# SPDX-License-Identifier: Apache-2.0
"""Recorder of the last steps of one rank: marks in time, running messages, and the resulting records."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch

from commopt.recording.records import BucketRecord, MessageRecord, Span, StepRecord

Mark = Any  # nanoseconds, or a CUDA event


class Clock:
    """The host's clock: perf_counter."""

    def mark(self) -> Mark:
        """Return a mark of now; on CUDA, of the time at which the current stream gets here. Never waits."""
        return perf_counter_ns()

    def times_us(self, groups: Sequence[Sequence[Mark]]) -> list[list[float]]:
        """Return the times of marks in groups of one step each, oldest first. May wait for the device."""
        return [[mark / 1000 for mark in group] for group in groups]

    def release(self, marks: Iterable[Mark]) -> None:
        """Take back marks that are no longer needed."""

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is being captured, in which marks have no time."""
        return False


class CudaClock(Clock):
    """A GPU's clock: CUDA events from a pool, which grows to the size that the kept steps need."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: deque[torch.cuda.Event] = deque()

    def mark(self) -> Mark:
        """Return an event for the time at which the current stream gets here."""
        try:
            event = self._pool.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def times_us(self, groups: Sequence[Sequence[Mark]]) -> list[list[float]]:
        """Return the times of events; waits for all work of the device.

        The host's clock and the device's are compared once, after the wait. torch returns the time between events in
        float32 milliseconds, so only short distances are measured: from step to step, back from now, and inside a step.
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
        """Put events back into the pool."""
        self._pool.extend(marks)

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()


def clock_for(device: torch.device) -> Clock:
    """Return a new clock for `device`."""
    return CudaClock(device) if device.type == "cuda" else Clock()


class MessageRecorder(AbstractContextManager[None]):
    """Context manager that marks start and end of one message on the lane; it has no end if the message raises.

    spans: its collectives so far, each the fields of a Span with marks for times.
    """

    __slots__ = ("_before", "buckets", "finished", "label", "mark", "nbytes", "queued", "spans", "started")

    def __init__(self, buckets: tuple[int, ...], label: str, nbytes: int, mark: Callable[[], Mark]) -> None:
        self.buckets = buckets
        self.label = label
        self.nbytes = nbytes
        self.mark = mark
        self.queued = mark()
        self.started: Mark = None
        self.finished: Mark = None
        self.spans: list[list[Any]] = []
        self._before: MessageRecorder | None = None

    def __enter__(self) -> None:
        self._before, _thread_state.message = _thread_state.message, self
        self.started = self.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _thread_state.message = self._before
        if kind is None:
            self.finished = _thread_state.ended = self.mark()

    def leave(self) -> None:
        """Let the thread run another message before this one has finished."""
        _thread_state.message = self._before

    def finish(self) -> None:
        """End a message that was left. Of the time that it shared with the message before, nothing counts as its."""
        before, self.finished = _thread_state.ended, self.mark()
        _thread_state.ended = self.finished
        self.started = max(self.started, before)
        for span in self.spans:
            span[-2] = max(span[-2], before)

    def record(self) -> MessageRecord:
        """Return the record, with marks for times."""
        spans = tuple(Span(*span) for span in self.spans)
        return MessageRecord(self.buckets, self.label, self.nbytes, self.queued, self.started, self.finished, spans)


class _ThreadState(threading.local):
    message: MessageRecorder | None = None
    ended: Mark = 0
    """The end of the message that ended last."""


_thread_state = _ThreadState()
_nothing: AbstractContextManager[None] = nullcontext()


def running(message: MessageRecorder | None) -> AbstractContextManager[None]:
    """Return the context in which `message` runs; an empty one if nothing is recorded."""
    return _nothing if message is None else message


def primitive(level: str, name: str, nbytes: int) -> AbstractContextManager[None]:
    """Record one collective as a span of the message that this thread runs, if any."""
    message = _thread_state.message
    return _nothing if message is None else _SpanRecorder(message, level, name, nbytes)


# A class rather than a generator: it takes a third of the time, around every collective.
class _SpanRecorder(AbstractContextManager[None]):
    __slots__ = ("_message", "_span")

    def __init__(self, message: MessageRecorder, *what: Any) -> None:
        self._message = message
        self._span: list[Any] = [*what, None, None]

    def __enter__(self) -> None:
        self._message.spans.append(self._span)
        self._span[-2] = self._message.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._span[-1] = self._message.mark()


class Recorder:
    """Records the last `keep_steps` steps; one per HookState.

    The hook's thread notes steps, buckets and messages. The lane's thread marks the start and end of messages, and may
    still run messages of one step when the next begins. Only `steps` waits for a device. Nothing is recorded during the
    capture of a CUDA graph.

    enabled: whether steps are recorded; changed between steps only.
    always: whether recording stays enabled after a measurement.
    """

    def __init__(self, keep_steps: int = 64, *, always: bool = False) -> None:
        self.enabled = self.always = always
        self._keep_steps = keep_steps
        self._forward_us: float | None = None
        self._clocks: dict[torch.device, Clock] = {}
        self._lock = threading.Lock()
        self._ring: deque[_StepMarks] = deque()
        self._open: _StepMarks | None = None

    def record_always(self) -> None:
        """Record every step from now on."""
        self.enabled = self.always = True

    def forward_begins(self) -> None:
        """Note the start of a forward on the host. Of several before one step (accumulation) the first counts."""
        if self.enabled and self._forward_us is None:
            self._forward_us = perf_counter_ns() / 1000

    def begin_step(self, step: int, device: torch.device) -> None:
        """Begin a step when its first bucket is ready. A previous step whose backward did not end is dropped."""
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
                self._open = _StepMarks(step, clock, forward_us)

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

    def message(self, numbers: Sequence[int], label: str, nbytes: int) -> MessageRecorder | None:
        """Return the recorder of a message of these buckets, queued now; None if nothing is recorded."""
        step = self._open
        if not self.enabled or step is None:
            return None
        message = MessageRecorder(tuple(numbers), label, nbytes, step.clock.mark)
        step.messages.append(message)
        return message

    def steps(self) -> list[StepRecord]:
        """Return the steps whose messages have all finished, oldest first. On CUDA this waits for the device."""
        with self._lock:
            kept = [*self._ring, *([] if self._open is None else [self._open])]
            new = [step for step in kept if step.is_complete()]
            for clock in {id(step.clock): step.clock for step in new}.values():
                _make_records(clock, [step for step in new if step.clock is clock])
            return [step.record for step in kept if step.record is not None][-self._keep_steps :]

    def clear(self) -> None:
        """Drop all steps, including a running one."""
        with self._lock:
            self._ring.clear()
            self._open = None
            self._forward_us = None


class _StepMarks:
    """Marks of one step, until `record` replaces them."""

    __slots__ = ("buckets", "clock", "compute_end", "forward_us", "messages", "number", "record")

    def __init__(self, number: int, clock: Clock, forward_us: float | None) -> None:
        self.number = number
        self.clock = clock
        self.forward_us = forward_us
        self.buckets: list[tuple[int, str, int, Mark]] = []
        self.compute_end: Mark = None
        self.messages: list[MessageRecorder] = []
        self.record: StepRecord | None = None

    def is_complete(self) -> bool:
        """Return whether all messages of all buckets have finished and `record` is not made yet."""
        if self.record is not None or self.compute_end is None or not self.messages:
            return False
        sent = {number for message in self.messages for number in message.buckets}
        return all(message.finished is not None for message in self.messages) and sent.issuperset(
            number for number, _, _, _ in self.buckets
        )

    def marked(self) -> StepRecord:
        """Return the record, with marks for times."""
        buckets = tuple(BucketRecord(*bucket) for bucket in self.buckets)
        messages = tuple(message.record() for message in self.messages)
        return StepRecord(self.number, None, self.compute_end, buckets, messages)

    def release(self) -> None:
        """Give the marks back, unless another thread may still write one."""
        if self.is_complete():
            self.clock.release(_marks_in(self.marked()))


def _marks_in(record: StepRecord) -> list[Mark]:
    """Return the marks of a record, with the end of backward last: the first must be the earliest."""
    end, *others = record.times_us()
    return [*others, end]


def _make_records(clock: Clock, steps: Sequence[_StepMarks]) -> None:
    """Make the records of complete steps; their marks are no longer needed."""
    records = [step.marked() for step in steps]
    marks = [_marks_in(record) for record in records]
    for step, record, (*others_us, end_us) in zip(steps, records, clock.times_us(marks), strict=True):
        step.record = replace(record.at([end_us, *others_us]), forward_us=step.forward_us)
        step.buckets = []
        step.messages = []
    for group in marks:
        clock.release(group)
