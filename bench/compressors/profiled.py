# SPDX-License-Identifier: Apache-2.0
"""What a step is made of on a GPU, from a trace of torch's profiler: launches, kernels, and how long those run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
_LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")

_LONGEST, _NAME = 12, 160  # how many kernels are named, by how many characters


@dataclass(frozen=True)
class Profile:
    """launches: calls that give the device work, a whole graph being one. graphs: how many of them are of graphs.

    kernels: kernels, copies and fills that ran. busy_ms: the sum of their times.
    longest: the names that took most of it, each with how often it ran and its milliseconds.
    """

    launches: int
    graphs: int
    kernels: int
    busy_ms: float
    longest: list[tuple[str, int, float]] = field(default_factory=list)


def profile_of(step: Callable[[], None]) -> Profile:
    """Profile a step, which has to end with all its work done."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        watched.export_chrome_trace(str(path))
        return counted(json.loads(path.read_text())["traceEvents"])


def counted(events: Iterable[Mapping[str, Any]]) -> Profile:
    """Count what a Chrome trace has."""
    whole = [event for event in events if event.get("ph") == "X"]
    calls = [event["name"] for event in whole if event.get("cat") in _ON_HOST]
    ran = [(event["name"][:_NAME], event["dur"]) for event in whole if event.get("cat") in _ON_DEVICE]
    times: dict[str, list[float]] = {}
    for name, taken_us in ran:
        times.setdefault(name, []).append(taken_us)
    longest = sorted(times.items(), key=lambda each: -sum(each[1]))[:_LONGEST]
    return Profile(
        launches=sum(any(kind in name for kind in _LAUNCHES) for name in calls),
        graphs=sum("GraphLaunch" in name for name in calls),
        kernels=len(ran),
        busy_ms=sum(taken_us for _, taken_us in ran) / 1000,
        longest=[(name, len(each), sum(each) / 1000) for name, each in longest],
    )
