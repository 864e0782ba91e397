"""Time operations in turns, so that all of them meet the same noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from bench.clocks import Clock, Reading, clock_of, host_clock


@dataclass(frozen=True)
class Turns:
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


def take_turns(
    operations: Sequence[Callable[[], object]], repeats: int, clock: Clock, calls: Sequence[int]
) -> list[Turns]:
    """Time operations, after a round that counts for nothing; in each turn an operation is called `calls` times."""
    readings: list[list[Reading]] = [[] for _ in operations]
    for _ in range(repeats + 1):
        for operation, count, taken in zip(operations, calls, readings, strict=True):
            taken.append(clock(operation, count))
    return [Turns(count, tuple(taken[1:])) for count, taken in zip(calls, readings, strict=True)]


def times_s(
    operations: Sequence[Callable[[], object]], repeats: int, device: torch.device | None = None
) -> list[list[float]]:
    """Return the seconds of every run of each operation, after a round that counts for nothing.

    device: where they run, whose clock is read; None is the CPU.
    """
    clock = host_clock if device is None else clock_of(device)
    turns = take_turns(operations, repeats, clock, [1] * len(operations))
    return [[reading.taken_s for reading in each.readings] for each in turns]
