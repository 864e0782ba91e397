"""The last steps of one rank, in a ring."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from time import perf_counter_ns

import torch

from commopt.recording.clock import Clock, Mark, clock_for
from commopt.recording.message import Message
from commopt.recording.records import BucketRecord, StepRecord


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
