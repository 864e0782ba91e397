"""What a profiler's trace says about streams: how long the lane and backward ran at once, and who waited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
"""Of a Chrome trace: cat, name, ts and dur in microseconds, pid, tid, args."""

Span = tuple[float, float]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cuda_runtime", "cuda_driver")
_COLLECTIVE = "nccl"  # in the names of NCCL's kernels
# These wait for all of the device without having it in their name.
_WAITING = {"cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost"}


@dataclass(frozen=True)
class Overlap:
    """Of one rank; times are sums over the steps.

    lane_streams: those with NCCL's kernels, as the profiler numbers them. backward_stream: the busiest other one, None
    when there is none. waits: calls inside the steps that wait for the device, by call and the operator that made it.
    """

    steps: int
    lane_streams: tuple[int, ...]
    backward_stream: int | None
    lane_kernels: int
    backward_kernels: int
    lane_ms: float
    backward_ms: float
    both_ms: float
    waits: dict[str, int]


def overlap_of(events: Iterable[Event], step_name: str) -> Overlap:
    """Find out what ran beside what in the steps, which are marked on the host by `record_function(step_name)`.

    Kernels count from the start of the first step on: the trace must end with the work of the last one.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [_span(event) for event in whole if event["name"] == step_name and event.get("cat") == "user_annotation"]
    begin_us = min((first for first, _ in steps), default=float("inf"))
    by_stream: dict[int, list[Event]] = {}
    for event in whole:
        if event.get("cat") in _ON_DEVICE and event["ts"] >= begin_us:
            by_stream.setdefault(int(event["args"]["stream"]), []).append(event)
    lane = sorted(stream for stream, found in by_stream.items() if any(_COLLECTIVE in each["name"] for each in found))
    busy = {stream: union(map(_span, found)) for stream, found in by_stream.items()}
    backward = max((stream for stream in by_stream if stream not in lane), key=lambda s: length(busy[s]), default=None)
    on_lane = union(span for stream in lane for span in busy[stream])
    on_backward = [] if backward is None else busy[backward]
    return Overlap(
        steps=len(steps),
        lane_streams=tuple(lane),
        backward_stream=backward,
        lane_kernels=sum(len(by_stream[stream]) for stream in lane),
        backward_kernels=0 if backward is None else len(by_stream[backward]),
        lane_ms=length(on_lane) / 1000,
        backward_ms=length(on_backward) / 1000,
        both_ms=length(common(on_lane, on_backward)) / 1000,
        waits=dict(sorted(_waits(whole, steps).items())),
    )


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the same times as spans that are in order and do not touch."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def common(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """Return the times that are in both unions."""
    found: list[Span] = []
    one, other = 0, 0
    while one < len(first) and other < len(second):
        begin, end = max(first[one][0], second[other][0]), min(first[one][1], second[other][1])
        if begin < end:
            found.append((begin, end))
        if first[one][1] < second[other][1]:
            one += 1
        else:
            other += 1
    return found


def length(spans: Iterable[Span]) -> float:
    """Return the sum of their lengths."""
    return sum(end - begin for begin, end in spans)


def _covers(spans: Sequence[Span], time: float) -> bool:
    return any(begin <= time < end for begin, end in spans)


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _waits(events: Sequence[Event], steps: Sequence[Span]) -> Counter[str]:
    found: Counter[str] = Counter()
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    for event in events:
        if event.get("cat") in _ON_HOST and waits(event["name"]) and _covers(steps, event["ts"]):
            found[f"{event['name']} in {_innermost(operators, event)}"] += 1
    return found


def waits(call: str) -> bool:
    """Return whether a call of the CUDA runtime or driver keeps the host, or the device, waiting."""
    copies = "memcpy" in call.lower() and "async" not in call.lower()
    return copies or "Synchronize" in call or call in _WAITING


def _innermost(operators: Sequence[Event], call: Event) -> str:
    """Return the name of the last operator that had begun, and not ended, in the thread of `call`."""
    around = [
        each
        for each in operators
        if (each["pid"], each["tid"]) == (call["pid"], call["tid"])
        and each["ts"] <= call["ts"] <= each["ts"] + each["dur"]
    ]
    return str(max(around, key=lambda each: each["ts"])["name"]) if around else "no operator"
