# SPDX-License-Identifier: Apache-2.0
"""A timeline in Chrome's trace event format, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from commopt.recording import MessageRecord, StepRecord
from commopt.timeline.recordings import Timeline, last_starts_us

Event = dict[str, Any]

_ROWS = _GRADIENTS, _LANE, _WAITING = ("gradients", "lane", "waiting for the last rank")


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as a JSON object: a process per rank, times in microseconds since the first event."""
    names: list[Event] = []
    events: list[Event] = []
    flows = count()
    starts = [last_starts_us(step, timeline.nodes) for step in timeline.steps]
    for place, rank in enumerate(timeline.ranks):
        names.append(_name("process_name", rank, 0, name=f"rank {rank}, node {timeline.nodes[place]}"))
        names.append(_name("process_sort_index", rank, 0, sort_index=place))
        for order, row in enumerate(_ROWS):
            names.append(_name("thread_name", rank, _thread(rank, row), name=row))
            names.append(_name("thread_sort_index", rank, _thread(rank, row), sort_index=order))
        completed_us = None
        for step, last_starts in zip(timeline.steps, starts, strict=True):
            events += _step(rank, step[place], last_starts[place], completed_us, flows)
            completed_us = step[place].completed_us
    origin_us = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - origin_us, 3)
        if "dur" in event:  # holds the end so far: both ends are rounded alike, so that slices nest
            event["dur"] = max(0.0, round(round(event["dur"] - origin_us, 3) - event["ts"], 3))
    return {
        "traceEvents": [*names, *sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))],
        "displayTimeUnit": "ms",
        "otherData": {"clock uncertainty in us": f"{max(timeline.uncertainty_us):.1f}"},
    }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace to a file. Raises OSError."""
    Path(path).write_text(json.dumps(trace(timeline), allow_nan=False) + "\n")


def _thread(rank: int, row: str) -> int:
    """Return a thread's number, which must differ from its process's: a viewer would take it for the main thread."""
    return (rank + 1) * len(_ROWS) + _ROWS.index(row)


def _name(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _step(
    rank: int, record: StepRecord, last_starts: list[float], completed_us: float | None, flows: Iterator[int]
) -> Iterator[Event]:
    """Yield the events of a step.

    completed_us: end of the step before, the earliest beginning: viewers drop slices that overlap in one row.
    """
    known = [time_us for time_us in (record.forward_us, completed_us) if time_us is not None]
    # On CUDA the forward's time is the host's, which runs ahead while the device is still in the step before.
    begin_us = max(known, default=min(bucket.ready_us for bucket in record.buckets))
    compute_end_us = max(record.compute_end_us, begin_us)
    yield _slice(rank, _GRADIENTS, f"step {record.step}", "compute", begin_us, compute_end_us, step=record.step)
    ends = compute_end_us, max(record.completed_us, compute_end_us)
    yield _slice(rank, _GRADIENTS, "exposed communication", "exposed", *ends, step=record.step)
    for bucket in record.buckets:
        args = {"bucket": bucket.number, "label": bucket.label, "bytes": bucket.nbytes}
        yield {**_point(rank, _GRADIENTS, f"bucket {bucket.number} ready", "ready", "i", bucket.ready_us), "args": args}
    for message, last_start_us in zip(record.messages, last_starts, strict=True):
        queued_us = max(min(message.queued_us, compute_end_us), begin_us)  # an arrow must start inside a slice
        yield from _message(rank, record.step, message, queued_us, last_start_us, next(flows))


def _message(
    rank: int, step: int, message: MessageRecord, queued_us: float, last_start_us: float, flow: int
) -> Iterator[Event]:
    name = f"bucket {', '.join(map(str, message.buckets))}"
    yield _slice(
        rank,
        _LANE,
        name,
        "message",
        message.started_us,
        message.finished_us,
        step=step,
        buckets=list(message.buckets),
        label=message.label,
        bytes=message.nbytes,
        queued_for_us=round(message.started_us - message.queued_us, 3),
    )
    # Its id is a number: Perfetto drops arrows with other ids.
    yield {**_point(rank, _GRADIENTS, "queued", "queued", "s", queued_us), "id": flow}
    yield {**_point(rank, _LANE, "queued", "queued", "f", message.started_us), "id": flow, "bp": "e"}
    for span in message.spans:
        what = f"{span.level} {span.name}"
        yield _slice(rank, _LANE, what, span.level, span.begin_us, span.end_us, level=span.level, bytes=span.nbytes)
    if last_start_us > message.started_us:
        until_us = min(last_start_us, message.finished_us)
        yield _slice(rank, _WAITING, name, "waiting", message.started_us, until_us, step=step)


def _slice(rank: int, row: str, name: str, category: str, begin_us: float, end_us: float, **args: Any) -> Event:
    """Return a slice whose `dur` holds its end until all events are known."""
    return {**_point(rank, row, name, category, "X", begin_us), "dur": end_us, "args": args}


def _point(rank: int, row: str, name: str, category: str, phase: str, time_us: float) -> Event:
    event = {"name": name, "cat": category, "ph": phase, "ts": time_us, "pid": rank, "tid": _thread(rank, row)}
    return {**event, "s": "t"} if phase == "i" else event
