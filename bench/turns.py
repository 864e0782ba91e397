"""Time operations in turns, so that all of them meet the same noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch


def times_s(
    operations: Sequence[Callable[[], object]], repeats: int, device: torch.device | None = None
) -> list[list[float]]:
    """Return the seconds of every run of each operation, after a round that counts for nothing.

    device: where they run; on CUDA its own clock counts, from one operation to the next in its queue.
    """
    clock = _on_gpu if device is not None and device.type == "cuda" else _on_cpu
    times: list[list[float]] = [[] for _ in operations]
    for _ in range(repeats + 1):
        for operation, taken in zip(operations, times, strict=True):
            taken.append(clock(operation))
    return [taken[1:] for taken in times]


def _on_cpu(operation: Callable[[], object]) -> float:
    started = perf_counter()
    operation()
    return perf_counter() - started


def _on_gpu(operation: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    operation()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
