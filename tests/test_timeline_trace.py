# SPDX-License-Identifier: Apache-2.0
"""The trace is well-formed by the rules of the trace event format, and says what the timeline says."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commopt.timeline import Timeline, trace, write_trace
from tests.timelines import training

MS = 1000.0
NUMBER = (int, float)
# Of each phase used: keys every event must have besides name, ph, pid and tid, and the types of their values.
REQUIRED: dict[str, dict[str, Any]] = {
    "X": {"cat": str, "ts": NUMBER, "dur": NUMBER, "args": dict},
    "i": {"cat": str, "ts": NUMBER, "s": str, "args": dict},
    "s": {"cat": str, "ts": NUMBER, "id": int},  # chrome://tracing takes any text, Perfetto hexadecimal numbers only
    "f": {"cat": str, "ts": NUMBER, "id": int},
    "M": {"args": dict},
}
METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int}
NESTING_SLACK_US = 1e-6  # a sum of two decimal fractions


def problems(document: Any) -> list[str]:
    """What is wrong with a trace, by the format's public description (Trace Event Format, JSON object form)."""
    found = []
    if not isinstance(document.get("traceEvents"), list):
        return ["traceEvents is no list"]
    if document.get("displayTimeUnit") not in ("ms", "ns"):
        found.append("displayTimeUnit")
    flows: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    slices: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for event in document["traceEvents"]:
        phase = event.get("ph")
        if phase not in REQUIRED:
            found.append(f"phase {phase}")
            continue
        keys = {"name": str, "pid": int, "tid": int, **REQUIRED[phase]}
        wrong = [key for key, kind in keys.items() if not isinstance(event.get(key), kind)]
        found += [f"{key} of {event}" for key in wrong]
        if wrong:
            continue
        times = [event[key] for key in ("ts", "dur") if key in event]
        found += [f"time of {event}" for time in times if not math.isfinite(time) or time < 0]
        if phase == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif phase == "i" and event["s"] not in ("g", "p", "t"):
            found.append(f"scope of {event}")
        elif phase in "sf":
            flows[event["cat"], event["name"], event["id"]].append(event)
        elif phase == "M":
            kind = METADATA.get(event["name"])
            key = "sort_index" if event["name"].endswith("sort_index") else "name"
            if kind is None or not isinstance(event["args"].get(key), kind):
                found.append(f"metadata {event}")
    for row, times in slices.items():
        found += [f"slices of {row} overlap: {pair}" for pair in crossings(times)]
    for events in flows.values():
        if [event["ph"] for event in events] != ["s", "f"] or events[0]["ts"] > events[1]["ts"]:
            found.append(f"flow {events}")
        for event in events:
            around = slices[event["pid"], event["tid"]]
            if not any(begin - NESTING_SLACK_US <= event["ts"] <= end + NESTING_SLACK_US for begin, end in around):
                found.append(f"flow outside of slices {event}")
    return found


def crossings(times: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Slices of one row that neither follow nor contain each other."""
    open_until: list[float] = []
    crossing = []
    for begin, end in sorted(times, key=lambda pair: (pair[0], -pair[1])):
        while open_until and open_until[-1] <= begin + NESTING_SLACK_US:
            open_until.pop()
        if open_until and end > open_until[-1] + NESTING_SLACK_US:
            crossing.append((begin, end))
        open_until.append(end)
    return crossing


CASES = {
    "even": training(),
    "jitter": training(ranks=3, jitter_us=777.7, steps=20),
    "late": training(ranks=2, delay_us=lambda step, rank, at: 200 * MS * (rank == at == 1)),
    "long uptime": replace(
        CASE := training(jitter_us=777.7),
        steps=tuple(tuple(record.shifted(3.1e12) for record in step) for step in CASE.steps),
    ),
    "empty": replace(CASE, steps=()),
}


@pytest.mark.parametrize("timeline", CASES.values(), ids=CASES)
def test_the_trace_is_well_formed(timeline: Timeline) -> None:
    assert problems(json.loads(json.dumps(trace(timeline), allow_nan=False))) == []


def test_ranks_are_processes_and_their_events_have_the_times_of_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(training(ranks=2, buckets=2, steps=2, delay_us=lambda *at: 3 * MS * (at[1:] == (1, 1))), path)
    events = json.loads(path.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {0: "rank 0, node 0", 1: "rank 1, node 1"}
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0}
    assert rows == {"gradients", "lane", "waiting for the last rank"}
    first = [event for event in events if event["pid"] == 0 and event.get("ts", 1e9) < 29 * MS]
    slices = [(event["cat"], event["ts"], event["dur"]) for event in first if event["ph"] == "X"]
    assert sorted(slice_ for slice_ in slices if slice_[0] not in ("intra", "inter")) == [
        ("compute", 0.0, 20 * MS),
        ("exposed", 20 * MS, 9 * MS),
        ("message", 15 * MS, 6 * MS),
        ("message", 21 * MS, 8 * MS),
        ("waiting", 21 * MS, 2 * MS),
    ]
    assert [event["ts"] for event in first if event["ph"] == "i"] == [15 * MS, 20 * MS]
    message = next(event for event in first if event.get("cat") == "message" and event["ts"] == 21 * MS)
    assert message["name"] == "bucket 1"
    assert message["args"] == {"step": 0, "buckets": [1], "label": "layer1", "bytes": 1000, "queued_for_us": 1000.0}
    inter = next(event for event in first if event.get("cat") == "inter")
    assert (inter["name"], inter["args"]["bytes"]) == ("inter all_reduce", 50)


def test_a_step_begins_no_earlier_than_the_one_before_has_ended() -> None:
    plain = training(ranks=1, nodes=1, buckets=1, steps=2)  # a step of 21 ms
    ahead = tuple(tuple(replace(record, forward_us=-5 * MS) for record in step) for step in plain.steps)  # of a GPU
    events = trace(replace(plain, steps=ahead))["traceEvents"]
    computing = [(event["ts"], event["dur"]) for event in events if event.get("cat") == "compute"]
    assert computing == [(0, 20 * MS), (26 * MS, 15 * MS)]


def test_waiting_ends_with_the_message_whatever_the_clocks_say() -> None:
    plain = training(ranks=2, buckets=1)
    wrong = tuple((quick, slow.shifted(8 * MS)) for quick, slow in plain.steps)
    waiting = [event for event in trace(replace(plain, steps=wrong))["traceEvents"] if event.get("cat") == "waiting"]
    assert [(event["pid"], event["dur"]) for event in waiting] == [(0, 6 * MS)] * 8


def test_no_thread_has_the_number_of_its_process() -> None:
    many = trace(training(ranks=400, nodes=50, buckets=1, steps=1))["traceEvents"]
    threads = {(event["pid"], event["tid"]) for event in many if event["ph"] == "X"}
    assert len({tid for _, tid in threads}) == len(threads)
    assert all(pid != tid for pid, tid in threads)
