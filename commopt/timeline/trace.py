"""A timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commopt.recording import MessageRecord, Span, StepRecord
from commopt.timeline.gather import Timeline
from commopt.timeline.stages import last_starts_us

Event = dict[str, Any]

_COMPUTE, _LANE, _SECOND_LANE, _WAITING = range(4)
_THREADS = {
    _COMPUTE: "gradients",
    _LANE: "lane",
    _SECOND_LANE: "lane, collectives at the same time",
    _WAITING: "waiting for the last rank",
}


def trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as an object for JSON: a process per rank, times in microseconds since the first event."""
    events = [event for place in range(len(timeline.ranks)) for event in _rank(timeline, place)]
    origin_us = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - origin_us, 3)
        if "dur" in event:  # until now its end: both ends are rounded alike, or slices would no longer nest
            event["dur"] = max(0.0, round(round(event["dur"] - origin_us, 3) - event["ts"], 3))
    names = [name for place in range(len(timeline.ranks)) for name in _names(timeline, place, events)]
    return {
        "traceEvents": [*names, *sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0)))],
        "displayTimeUnit": "ms",
        "otherData": {"clock uncertainty in us": f"{max(timeline.uncertainty_us):.1f}"},
    }


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace into a file; raises OSError."""
    Path(path).write_text(json.dumps(trace(timeline), allow_nan=False) + "\n")


def _names(timeline: Timeline, place: int, events: list[Event]) -> Iterator[Event]:
    rank = timeline.ranks[place]
    used = {event["tid"] for event in events if event["pid"] == rank}
    first = _first_tid(rank)
    yield _name("process_name", rank, 0, name=f"rank {rank}, node {timeline.nodes[place]}")
    yield _name("process_sort_index", rank, 0, sort_index=place)
    for tid, name in _THREADS.items():
        if first + tid in used:
            yield _name("thread_name", rank, first + tid, name=name)
            yield _name("thread_sort_index", rank, first + tid, sort_index=tid)


def _name(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _first_tid(rank: int) -> int:
    """Thread numbers unlike any process number: a viewer takes a thread with its process's number for the main one."""
    return 10 * (rank + 1)


def _rank(timeline: Timeline, place: int) -> Iterator[Event]:
    rank, completed_us = timeline.ranks[place], None
    for number, step in enumerate(timeline.steps):
        record = step[place]
        for event in _step(record, last_starts_us(step), completed_us):
            if event["ph"] in "sf":  # unique in the whole trace
                event["id"] = f"{rank}.{number}.{event['id']}"
            yield {**event, "pid": rank, "tid": _first_tid(rank) + event["tid"]}
        completed_us = record.completed_us


def _step(record: StepRecord, last_starts: list[float], completed_us: float | None) -> Iterator[Event]:
    ready_us = min(bucket.ready_us for bucket in record.buckets)
    # On CUDA the forward's time is the host's, which runs ahead: the device was at the step before.
    known = [time_us for time_us in (record.forward_us, completed_us) if time_us is not None]
    begin_us = min(ready_us, max(known, default=ready_us))
    yield _slice(_COMPUTE, f"step {record.step}", "compute", begin_us, record.compute_end_us, step=record.step)
    if record.completed_us > record.compute_end_us:
        yield _slice(
            _COMPUTE,
            "exposed communication",
            "exposed",
            record.compute_end_us,
            record.completed_us,
            step=record.step,
        )
    for bucket in record.buckets:
        args = {"bucket": bucket.number, "label": bucket.label, "bytes": bucket.nbytes}
        yield {
            "name": f"bucket {bucket.number} ready",
            "cat": "ready",
            "ph": "i",
            "s": "t",
            "ts": bucket.ready_us,
            "tid": _COMPUTE,
            "args": args,
        }
    for number, (message, last_start_us) in enumerate(zip(record.messages, last_starts, strict=True)):
        yield from _message(record, number, message, last_start_us)


def _message(record: StepRecord, number: int, message: MessageRecord, last_start_us: float) -> Iterator[Event]:
    name = f"bucket {', '.join(map(str, message.buckets))}"
    yield _slice(
        _LANE,
        name,
        "message",
        message.started_us,
        message.finished_us,
        step=record.step,
        buckets=list(message.buckets),
        label=message.label,
        bytes=message.nbytes,
        queued_for_us=round(message.started_us - message.queued_us, 3),
    )
    flow = {"name": "queued", "cat": "queued", "id": number}
    queued_us = min(message.queued_us, record.compute_end_us)  # an arrow must leave from inside a slice
    yield {**flow, "ph": "s", "ts": queued_us, "tid": _COMPUTE}
    yield {**flow, "ph": "f", "bp": "e", "ts": message.started_us, "tid": _LANE}
    for tid, span in _placed(message):
        yield _slice(
            tid,
            f"{span.level} {span.name}",
            span.level,
            span.begin_us,
            span.end_us,
            level=span.level,
            bytes=span.nbytes,
        )
    if last_start_us > message.started_us:
        until_us = min(last_start_us, message.finished_us)
        yield _slice(_WAITING, name, "waiting", message.started_us, until_us, step=record.step)


def _placed(message: MessageRecord) -> Iterator[tuple[int, Span]]:
    """Put collectives on the lane's row, those that overlap on the second: slices of a row must nest."""
    busy_until = {_LANE: message.started_us, _SECOND_LANE: message.started_us}
    for span in message.spans:
        tid = _LANE if span.begin_us >= busy_until[_LANE] else _SECOND_LANE
        busy_until[tid] = max(busy_until[tid], span.end_us)
        yield tid, span


def _slice(tid: int, name: str, category: str, begin_us: float, end_us: float, **args: Any) -> Event:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "ts": begin_us,
        "dur": end_us,
        "tid": tid,
        "args": args,
    }
