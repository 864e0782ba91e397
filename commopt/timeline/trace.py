"""A timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from commopt.recording import MessageRecord, StepRecord
from commopt.timeline.gather import Timeline
from commopt.timeline.rows import KINDS, Event, on_rows
from commopt.timeline.stages import last_starts_us

_GRADIENTS, _LANE, _WAITING = KINDS


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as an object for JSON: a process per rank, times in microseconds since the first event."""
    names: list[Event] = []
    events: list[Event] = []
    flows = count()
    starts = [last_starts_us(step, timeline.nodes) for step in timeline.steps]
    for place, rank in enumerate(timeline.ranks):
        own = [(step[place], last_starts[place]) for step, last_starts in zip(timeline.steps, starts, strict=True)]
        placed, rows = on_rows(_rank(own, flows), rank)
        events += placed
        names.append(_name("process_name", rank, 0, name=f"rank {rank}, node {timeline.nodes[place]}"))
        names.append(_name("process_sort_index", rank, 0, sort_index=place))
        for order, (tid, name) in enumerate(sorted(rows.items())):
            names.append(_name("thread_name", rank, tid, name=name))
            names.append(_name("thread_sort_index", rank, tid, sort_index=order))
    origin_us = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - origin_us, 3)
        if "dur" in event:  # until now its end: both ends are rounded alike, or slices would no longer nest
            event["dur"] = max(0.0, round(round(event["dur"] - origin_us, 3) - event["ts"], 3))
    return {
        "traceEvents": [*names, *sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))],
        "displayTimeUnit": "ms",
        "otherData": {"clock uncertainty in us": f"{max(timeline.uncertainty_us):.1f}"},
    }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace into a file; raises OSError."""
    Path(path).write_text(json.dumps(trace(timeline), allow_nan=False) + "\n")


def _name(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _rank(steps: Sequence[tuple[StepRecord, list[float]]], flows: Iterator[int]) -> Iterator[Event]:
    completed_us = None
    for record, last_starts in steps:
        yield from _step(record, last_starts, completed_us, flows)
        completed_us = record.completed_us


def _step(
    record: StepRecord, last_starts: list[float], completed_us: float | None, flows: Iterator[int]
) -> Iterator[Event]:
    ready_us = min(bucket.ready_us for bucket in record.buckets)
    # On CUDA the forward's time is the host's, which runs ahead: the device was at the step before.
    known = [time_us for time_us in (record.forward_us, completed_us) if time_us is not None]
    begin_us = min(ready_us, max(known, default=ready_us))
    number = record.step
    compute = _slice(_GRADIENTS, f"step {number}", "compute", begin_us, record.compute_end_us, step=number)
    yield compute
    ends = record.compute_end_us, record.completed_us
    yield _slice(_GRADIENTS, "exposed communication", "exposed", *ends, step=number)
    for bucket in record.buckets:
        yield {
            "name": f"bucket {bucket.number} ready",
            "cat": "ready",
            "ph": "i",
            "s": "t",
            "ts": bucket.ready_us,
            "inside": compute,
            "args": {"bucket": bucket.number, "label": bucket.label, "bytes": bucket.nbytes},
        }
    for message, last_start_us in zip(record.messages, last_starts, strict=True):
        yield from _message(message, compute, last_start_us, next(flows))


def _message(message: MessageRecord, compute: Event, last_start_us: float, flow: int) -> Iterator[Event]:
    name, number = f"bucket {', '.join(map(str, message.buckets))}", compute["args"]["step"]
    sent = _slice(
        _LANE,
        name,
        "message",
        message.started_us,
        message.finished_us,
        step=number,
        buckets=list(message.buckets),
        label=message.label,
        bytes=message.nbytes,
        queued_for_us=round(message.started_us - message.queued_us, 3),
    )
    yield sent
    # An arrow must leave from inside a slice. Its id is a number: Perfetto drops arrows with other ids.
    queued_us = min(message.queued_us, compute["dur"])
    arrow = {"name": "queued", "cat": "queued", "id": flow}
    yield {**arrow, "ph": "s", "ts": queued_us, "inside": compute}
    yield {**arrow, "ph": "f", "bp": "e", "ts": message.started_us, "inside": sent}
    for span in message.spans:
        what = f"{span.level} {span.name}"
        part = _slice(_LANE, what, span.level, span.begin_us, span.end_us, level=span.level, bytes=span.nbytes)
        yield {**part, "inside": sent}
    if last_start_us > message.started_us:
        until_us = min(last_start_us, message.finished_us)
        yield _slice(_WAITING, name, "waiting", message.started_us, until_us, step=number)


def _slice(kind: str, name: str, category: str, begin_us: float, end_us: float, **args: Any) -> Event:
    """Return a slice whose `dur` is its end until all events are known."""
    return {"name": name, "cat": category, "ph": "X", "ts": begin_us, "dur": end_us, "kind": kind, "args": args}
