"""Marks in time: the host's clock for the CPU, events for a GPU, whose times are known only later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import Any

import torch

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
        """See Clock.mark."""
        try:
            event = self._pool.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def times_us(self, groups: Sequence[Sequence[Mark]]) -> list[list[float]]:
        """See Clock.times_us; waits for all work of the device.

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
        """See Clock.release."""
        self._pool.extend(marks)

    def is_capturing(self) -> bool:
        """See Clock.is_capturing."""
        return torch.cuda.is_current_stream_capturing()


def clock_for(device: torch.device) -> Clock:
    """Return a new clock for `device`."""
    return CudaClock(device) if device.type == "cuda" else Clock()
