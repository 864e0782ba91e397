# SPDX-License-Identifier: Apache-2.0
"""What a step is made of on a GPU, from a trace of torch's profiler: launches, kernels, and how long those run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
_LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


@dataclass(frozen=True)
class Profile:
    """launches: calls that give the device work, a whole graph being one. graphs: how many of them are of graphs.

    kernels: kernels, copies and fills that ran. busy_ms: the sum of their times.
    """

    launches: int
    graphs: int
    kernels: int
    busy_ms: float


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
    ran = [event["dur"] for event in whole if event.get("cat") in _ON_DEVICE]
    return Profile(
        launches=sum(any(kind in name for kind in _LAUNCHES) for name in calls),
        graphs=sum("GraphLaunch" in name for name in calls),
        kernels=len(ran),
        busy_ms=sum(ran) / 1000,
    )
