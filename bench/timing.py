# SPDX-License-Identifier: Apache-2.0
"""Time operations in turns, by the host's clock or by a GPU's, so that all of them meet the same noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter
from typing import TypeAlias

import torch

_L2_SIZES = 4  # of other memory read before: nothing of the last turn is left in the L2, nor anything to write back
_HOLD_S = 2e-3
_EMPTY_PAIRS = 31


@dataclass(frozen=True)
class Reading:
    """What a clock read of one or more calls together."""

    taken_s: float
    """Without what the clock itself takes, so that of nothing at all it may be a little less than 0."""
    host_s: float
    """Until the last call had returned."""
    queued: bool
    """Whether a device had all calls in its queue before it began the first: nothing in `taken_s` is the host's."""


Clock: TypeAlias = Callable[[Callable[[], object], int], Reading]
"""Runs an operation so many times and tells how long that took."""


def host_clock(operation: Callable[[], object], calls: int) -> Reading:
    """Time calls on the CPU."""
    started = perf_counter()
    for _ in range(calls):
        operation()
    taken_s = perf_counter() - started
    return Reading(taken_s, taken_s, queued=False)


class GpuClock:
    """Time calls between two events of the current stream, with nothing of theirs in the L2.

    events_s: what two events with nothing between them take, the median of some pairs; no reading has it in it.
    hold_s: how long the device reads other memory before the first event, at least a few times its L2. Calls that the
    host has queued by then are timed without the gaps that launching them leaves.
    """

    def __init__(self, device: torch.device, hold_s: float = _HOLD_S) -> None:
        nbytes = _L2_SIZES * torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.zeros(ceil(nbytes / 4), device=device)
        self._reads = 1
        self.events_s = 0.0
        once_s = min(self(self._other.sum, 1).taken_s for _ in range(3))
        self._reads = ceil(hold_s / once_s)
        self.events_s = median(self(self._other.sum, 0).taken_s for _ in range(_EMPTY_PAIRS))

    def __call__(self, operation: Callable[[], object], calls: int) -> Reading:
        """Time calls between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(self._reads):
            self._other.sum()
        begin.record()
        started = perf_counter()
        for _ in range(calls):
            operation()
        host_s = perf_counter() - started
        queued = not begin.query()
        end.record()
        end.synchronize()
        return Reading(begin.elapsed_time(end) / 1000 - self.events_s, host_s, queued)


def clock_of(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return GpuClock(device) if device.type == "cuda" else host_clock


def events_us(clock: Clock) -> float:
    """Return what a clock's events take by themselves, which its readings leave out; the host's has none."""
    return 1e6 * clock.events_s if isinstance(clock, GpuClock) else 0.0


@dataclass(frozen=True)
class Timings:
    """The readings of one operation, each of as many calls."""

    calls: int
    readings: tuple[Reading, ...]

    @property
    def best_us(self) -> float:
        """Microseconds of one call in the fastest turn."""
        return 1e6 * min(reading.taken_s for reading in self.readings) / self.calls

    @property
    def median_us(self) -> float:
        """Microseconds of one call in the median turn."""
        return 1e6 * median(reading.taken_s for reading in self.readings) / self.calls

    @property
    def host_us(self) -> float:
        """Microseconds until one call has returned, in the median turn."""
        return 1e6 * median(reading.host_s for reading in self.readings) / self.calls

    @property
    def queued(self) -> bool:
        """Whether in most turns the device had all calls in its queue before it began the first."""
        return 2 * sum(reading.queued for reading in self.readings) > len(self.readings)


def interleave(
    operations: Sequence[Callable[[], object]], repeats: int, clock: Clock, calls: Sequence[int]
) -> list[Timings]:
    """Time operations, after a round that counts for nothing; in each turn an operation is called `calls` times."""
    readings: list[list[Reading]] = [[] for _ in operations]
    for _ in range(repeats + 1):
        for operation, count, taken in zip(operations, calls, readings, strict=True):
            taken.append(clock(operation, count))
    return [Timings(count, tuple(taken[1:])) for count, taken in zip(calls, readings, strict=True)]


def times_s(
    operations: Sequence[Callable[[], object]], repeats: int, device: torch.device | None = None
) -> list[list[float]]:
    """Return the seconds of every run of each operation, after a round that counts for nothing.

    device: where they run, whose clock is read; None is the CPU.
    """
    clock = host_clock if device is None else clock_of(device)
    turns = interleave(operations, repeats, clock, [1] * len(operations))
    return [[reading.taken_s for reading in each.readings] for each in turns]
