"""Time a loop of calls on every rank, and agree on the slowest."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import torch
import torch.distributed as dist

_SILENT_S = 1.0
_REFRESH_S = 0.2


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the mean of the loop on the slowest rank, and percentiles over its iterations.

    An iteration lasts from when the last rank has ended the one before until the last rank has ended it, so the
    iterations add up to the loop. (The longest duration on any rank would count a wait twice, as ranks drift.)
    """

    mean_us: float
    p50_us: float
    p99_us: float

    @classmethod
    def of(cls, ends_us: Sequence[float]) -> Timing:
        """Derive it from the time at which the last rank ended each iteration, counted from the common start."""
        singles_us = [end - start for start, end in pairwise([0.0, *ends_us])]
        return cls(ends_us[-1] / len(ends_us), percentile(singles_us, 0.50), percentile(singles_us, 0.99))


class Progress:
    """Says on a terminal how far a long row is; on anything else, or on another rank than 0, it is silent."""

    def __init__(self, rank: int) -> None:
        self._active = rank == 0 and sys.stderr.isatty()
        self._label = ""
        self._due_s = 0.0

    def start(self, label: str) -> None:
        """Begin a new row."""
        self._label = label
        self._due_s = time.perf_counter() + _SILENT_S

    def step(self, phase: str, done: int, total: int) -> None:
        """Show how far it is, if that is due."""
        if self._active and time.perf_counter() > self._due_s:
            sys.stderr.write(f"\r\x1b[K{self._label}: {phase} {done}/{total}")
            sys.stderr.flush()
            self._due_s = time.perf_counter() + _REFRESH_S

    def clear(self) -> None:
        """Wipe the line before a row is printed."""
        if self._active:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def time_calls(
    call: Callable[[], object], iterations: int, warm_up_iterations: int, device: torch.device, progress: Progress
) -> Timing:
    """Run `call` without barriers between iterations, as nccl-tests does; collective over the world."""
    for done in range(warm_up_iterations):
        progress.step("warm-up", done, warm_up_iterations)
        call()
    _synchronize(device)
    measure = _ends_on_gpu if device.type == "cuda" else _ends_on_cpu
    ends_us = torch.tensor(measure(call, iterations, progress), dtype=torch.float64, device="cpu")
    dist.all_reduce(ends_us, op=dist.ReduceOp.MAX)
    return Timing.of(ends_us.tolist())


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest of `values` that at least `fraction` of them do not exceed."""
    return sorted(values)[max(0, ceil(fraction * len(values)) - 1)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1, device="cpu"))  # a barrier that never touches the GPU


def _ends_on_cpu(call: Callable[[], object], iterations: int, progress: Progress) -> list[float]:
    ends_us = []
    start_s = time.perf_counter()
    for done in range(iterations):
        progress.step("iteration", done, iterations)
        call()
        ends_us.append((time.perf_counter() - start_s) * 1e6)
    return ends_us


def _ends_on_gpu(call: Callable[[], object], iterations: int, progress: Progress) -> list[float]:
    start, *ends = [torch.cuda.Event(enable_timing=True) for _ in range(iterations + 1)]
    start.record()
    for done, end in enumerate(ends):
        progress.step("iteration", done, iterations)
        call()
        end.record()
    end.synchronize()
    return [start.elapsed_time(end) * 1e3 for end in ends]
