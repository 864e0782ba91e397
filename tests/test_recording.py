# SPDX-License-Identifier: Apache-2.0
"""What one rank records: the marks, the ring, what it costs, and CUDA events without a GPU."""

from __future__ import annotations

import gc
import json
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from time import thread_time_ns
from typing import Any

import pytest
import torch

from commopt import recording
from commopt.recording import BucketRecord, MessageRecord, MessageRecorder, Recorder, Span, StepRecord

CPU = torch.device("cpu")


class Ticks:
    """A clock that shows one microsecond more at each look."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        self.ns += 1000
        return self.ns


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr("commopt.recording.recorder.perf_counter_ns", ticks)
    return ticks


def recorder(keep_steps: int = 64) -> Recorder:
    recorder = Recorder(keep_steps)
    recorder.enabled = True
    return recorder


def record(recorder: Recorder, step: int, buckets: int = 2, device: torch.device = CPU) -> None:
    """One step as a hook and a lane would report it, in one thread."""
    recorder.forward_begins()
    recorder.begin_step(step, device)
    for number in range(buckets):
        recorder.bucket(number, f"layer{number}", 100)
        if number == buckets - 1:
            recorder.compute_ends()
        work(recorder.message([number], f"layer{number}", 100))


def work(message: MessageRecorder | None) -> None:
    with recording.running(message), recording.primitive("inter", "all_reduce", 50):
        pass


def test_a_step_has_the_times_at_which_things_were_told(ticks: Ticks) -> None:
    told = recorder()
    record(told, 7, buckets=1)
    (step,) = told.steps()
    # forward 1, ready 2, compute end 3, queued 4, started 5, span 6 to 7, finished 8
    assert step.step == 7
    assert step.forward_us == 1
    assert step.buckets == (BucketRecord(0, "layer0", 100, 2.0),)
    assert step.compute_end_us == 3
    (message,) = step.messages
    assert (message.buckets, message.label, message.nbytes) == ((0,), "layer0", 100)
    assert (message.queued_us, message.started_us, message.finished_us) == (4, 5, 8)
    assert message.spans == (recording.Span("inter", "all_reduce", 50, 6.0, 7.0),)
    assert step.completed_us == 8


def test_records_survive_json_and_change_clocks(ticks: Ticks) -> None:
    told = recorder()
    record(told, 0)
    (step,) = told.steps()
    assert StepRecord.from_lists(json.loads(json.dumps(step.to_lists()))) == step
    assert step.shifted(0.0) == step
    later = step.shifted(2.5)
    assert [late - early for late, early in zip(numbers_in(later), numbers_in(step), strict=True)] == [2.5] * 14
    assert later.layout == step.layout


def numbers_in(step: StepRecord) -> list[float]:
    found: list[float] = []

    def walk(value: Any, name: str = "") -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, key)
        elif isinstance(value, tuple | list):
            for inner in value:
                walk(inner)
        elif name.endswith("_us") and value is not None:
            found.append(value)

    walk(asdict(step))
    return found


def test_a_step_ends_with_its_last_gradient_or_its_last_message() -> None:
    early = MessageRecord((0,), "a", 1, 1.0, 2.0, 3.0, ())
    step = StepRecord(0, None, 5.0, (BucketRecord(0, "a", 1, 1.0),), (early,))
    assert step.completed_us == 5
    assert replace(step, messages=(early, replace(early, finished_us=7.0))).completed_us == 7


def test_steps_are_alike_that_have_the_same_buckets_and_messages() -> None:
    bucket, message = BucketRecord(0, "a", 1, 1.0), MessageRecord((0,), "a", 1, 1.0, 2.0, 3.0, ())
    step = StepRecord(0, None, 5.0, (bucket,), (message,))
    later = replace(step.shifted(9.0), step=1, messages=(replace(message, spans=(Span("world", "reduce", 1, 2, 3),)),))
    assert later.layout == step.layout
    for other in (
        replace(step, buckets=(replace(bucket, nbytes=2),)),
        replace(step, buckets=(replace(bucket, label="b"),)),
        replace(step, messages=(replace(message, label="b"),)),
        replace(step, messages=(replace(message, buckets=(0, 1)),)),
    ):
        assert other.layout != step.layout


def begin(told: Recorder, step: int) -> MessageRecorder | None:
    """Begin a step of one bucket, whose backward ends and whose message is queued."""
    told.begin_step(step, CPU)
    told.bucket(0, "a", 1)
    told.compute_ends()
    return told.message([0], "a", 1)


def numbers_of(told: Recorder) -> list[int]:
    return [step.step for step in told.steps()]


def test_nothing_is_recorded_while_off() -> None:
    off = Recorder()
    record(off, 0)
    assert off.steps() == []
    assert off.message([0], "", 1) is None


def test_what_happens_while_off_is_no_part_of_what_is_recorded_before_or_after() -> None:
    told = recorder()
    record(told, 0)
    told.enabled = False
    record(told, 1, buckets=5)
    told.enabled = True
    work(begin(told, 2))
    before, after = told.steps()
    assert (before.step, len(before.buckets), len(before.messages)) == (0, 2, 2)
    assert (after.step, after.forward_us) == (2, None)


def test_a_message_may_finish_after_the_next_step_began() -> None:
    told = recorder()
    slow = begin(told, 0)
    told.begin_step(1, CPU)
    assert numbers_of(told) == []
    work(slow)
    assert numbers_of(told) == [0]


def test_a_step_is_complete_when_its_backward_has_ended_and_every_bucket_was_sent() -> None:
    told = recorder()
    told.begin_step(0, CPU)
    told.bucket(0, "a", 1)
    work(told.message([0], "a", 1))
    assert numbers_of(told) == []
    told.bucket(1, "b", 1)
    told.compute_ends()
    assert numbers_of(told) == []
    work(told.message([1], "b", 1))
    assert numbers_of(told) == [0]


@pytest.mark.parametrize("where", ["backward", "message"])
def test_a_step_that_raised_is_forgotten(where: str) -> None:
    told = recorder()
    record(told, 0)
    if where == "backward":
        told.begin_step(1, CPU)
        told.bucket(0, "a", 1)
        work(told.message([0], "a", 1))  # and no more of it
    else:
        with pytest.raises(ZeroDivisionError), recording.running(begin(told, 1)):
            raise ZeroDivisionError
    record(told, 2)
    assert numbers_of(told) == [0, 2]


def test_the_ring_keeps_the_last_steps() -> None:
    told = recorder(keep_steps=3)
    for step in range(10):
        record(told, step)
    assert numbers_of(told) == [7, 8, 9]
    for step in range(10, 20):  # backwards that raise take nobody's place
        told.begin_step(step, CPU)
    assert numbers_of(told) == [7, 8, 9]
    told.forward_begins()
    told.clear()
    assert told.steps() == []
    work(begin(told, 20))
    assert told.steps()[0].forward_us is None


def test_of_several_forwards_the_first_counts(ticks: Ticks) -> None:
    told = recorder()
    told.forward_begins()
    told.forward_begins()
    record(told, 0)
    record(told, 1)
    told.begin_step(2, CPU)
    told.begin_step(3, CPU)
    first, second = told.steps()
    assert first.forward_us == 1
    assert second.forward_us is not None
    assert second.forward_us > first.completed_us


def test_a_collective_is_of_the_message_of_its_own_thread_if_there_is_one() -> None:
    told = recorder()
    thread = threading.Thread(target=work, args=(None,))
    with recording.running(begin(told, 0)), recording.primitive("world", "mine", 1):
        thread.start()
        thread.join()
    work(None)
    assert [span.name for span in told.steps()[0].messages[0].spans] == ["mine"]


def test_collectives_are_in_the_order_in_which_they_began() -> None:
    told = recorder()
    with recording.running(begin(told, 0)), recording.primitive("inter", "first", 1):
        with recording.primitive("intra", "second", 1):
            pass
        with recording.primitive("intra", "third", 1):
            pass
    assert [span.name for span in told.steps()[0].messages[0].spans] == ["first", "second", "third"]


# ------------------------------------------------------------------------------------------ what it costs


@contextmanager
def empty() -> Iterator[None]:
    yield


def least_us(*recorders: Recorder | None, buckets: int = 200) -> list[float]:
    """The least processor time of a bucket with five collectives, or of empty contexts, taken in turns."""
    best = [float("inf")] * len(recorders)
    for turn in range(15):
        for place, told in enumerate(recorders):
            if told is not None:
                told.begin_step(turn, CPU)
            began = thread_time_ns()
            for number in range(buckets):
                if told is not None:
                    told.bucket(number, "layer", 100)
                with empty() if told is None else recording.running(told.message([number], "layer", 100)):
                    for _ in range(5):
                        with empty() if told is None else recording.primitive("inter", "all_reduce", 50):
                            pass
            best[place] = min(best[place], (thread_time_ns() - began) / 1000 / buckets)
            if told is not None:
                told.compute_ends()
    return best


@pytest.mark.alone
def test_a_bucket_costs_no_more_than_empty_contexts_and_next_to_nothing_when_it_is_not_recorded() -> None:
    # Against a time of this machine, which may run other tests: whatever slows one slows the other.
    plain, unrecorded, recorded = least_us(None, Recorder(), recorder())
    assert recorded < 1.6 * plain
    assert unrecorded < 0.5 * plain


def memory_of(told: Recorder) -> int:
    """Bytes in use with all steps of the ring in the same state."""
    told.steps()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_memory_and_threads_do_not_grow_over_500_steps() -> None:
    told = recorder(keep_steps=8)
    for step in range(20):
        record(told, step, buckets=5)
    threads = threading.active_count()
    tracemalloc.start()
    try:
        for step in range(20, 40):
            record(told, step, buckets=5)
        before = memory_of(told)
        for step in range(40, 540):
            record(told, step, buckets=5)
            if step % 100 == 0:
                told.steps()
        after = memory_of(told)
    finally:
        tracemalloc.stop()
    assert after - before < 4000  # bytes: less than two steps
    assert threading.active_count() == threads
