# SPDX-License-Identifier: Apache-2.0
"""Recording on a GPU: with events of a made-up device, and where there is a real one, on that."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter_ns
from typing import Any

import pytest
import torch

from commopt import recording
from commopt.recording import Recorder
from tests.test_recording import numbers_in, record, recorder, work


class Gpu:
    """A device whose work takes as long as it is told, behind a host that never waits; times are in ms."""

    made = 0
    synchronized = 0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self
        self.events: list[Any] = []
        self.now_ms = 0.0
        self.capturing = False

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                gpu.made += 1
                gpu.events.append(self)
                self.at_ms: float | None = None
                self.is_over = False

            def record(self, stream: object) -> None:
                assert stream == "current stream of cuda:0"
                self.at_ms, self.is_over = gpu.now_ms, False

            def synchronize(self) -> None:
                gpu.synchronized += 1
                self.is_over = True

            def elapsed_time(self, later: Event) -> float:
                assert self.at_ms is not None
                assert later.at_ms is not None
                assert self.is_over
                assert later.is_over
                return torch.tensor(later.at_ms - self.at_ms, dtype=torch.float32).item()

        def synchronize(device: torch.device) -> None:
            gpu.synchronized += 1
            for event in gpu.events:
                event.is_over = True

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current stream of {device}")
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)

    def step(self, told: Recorder, number: int) -> None:
        """Two buckets: ready after 10 and 20 ms; each message takes 5 ms, of which 3 in a collective."""
        told.begin_step(number, torch.device("cuda", 0))
        for bucket in range(2):
            self.now_ms += 10
            told.bucket(bucket, "layer", 8)
            if bucket == 1:
                told.compute_ends()
            with recording.running(told.message([bucket], "layer", 8)):
                self.now_ms += 1
                with recording.primitive("world", "all_reduce", 8):
                    self.now_ms += 3
                self.now_ms += 1


def test_times_on_a_gpu_come_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told = Gpu(monkeypatch), recorder()
    for number in range(3):
        gpu.step(told, number)
    assert gpu.synchronized == 0  # nobody has waited so far
    before = perf_counter_ns() / 1000
    steps = told.steps()
    after = perf_counter_ns() / 1000
    assert before <= steps[-1].completed_us <= after  # the device is idle now: the end of the last step is now
    for number, step in enumerate(steps):
        start = steps[0].buckets[0].ready_us - 10_000 + number * 30_000
        since = [round((time_us - start) / 1000, 2) for time_us in numbers_in(step)]
        # compute end, ready twice, then queued, started, finished and the span of each message
        assert since == [25, 10, 25, 10, 10, 15, 11, 14, 25, 25, 30, 26, 29]


def test_times_on_a_gpu_stay_exact_over_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told = Gpu(monkeypatch), recorder(keep_steps=64)
    gpu.now_ms = 1e7  # a float32 of this many ms has steps of one ms
    for number in range(64):
        gpu.step(told, number)
        gpu.now_ms += 1000 / 3
    steps = told.steps()
    period_us = 30_000 + 1e6 / 3
    for before, after in pairwise(steps):
        assert after.completed_us - before.completed_us == pytest.approx(period_us, abs=0.1)


def test_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told = Gpu(monkeypatch), recorder(keep_steps=4)
    for number in range(10):
        gpu.step(told, number)
    made = gpu.made
    for number in range(10, 100):
        gpu.step(told, number)
    assert gpu.made == made
    told.steps()
    for number in range(100, 110):
        gpu.step(told, number)
    assert gpu.made == made + 1  # the one that the host's clock was compared with
    assert [step.step for step in told.steps()] == [106, 107, 108, 109]


def test_events_of_an_unfinished_step_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told = Gpu(monkeypatch), recorder(keep_steps=1)
    told.begin_step(0, torch.device("cuda", 0))
    told.bucket(0, "layer", 8)
    told.compute_ends()
    stuck = told.message([0], "layer", 8)
    for number in range(1, 5):
        gpu.step(told, number)
    work(stuck)  # writes its marks late, into events of its own
    assert [step.step for step in told.steps()] == [4]


def test_steps_of_two_devices_have_a_clock_each(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told = Gpu(monkeypatch), recorder()
    for number in range(4):
        if number % 2:
            gpu.step(told, number)
        else:
            record(told, number)
    steps = told.steps()
    assert [step.step for step in steps] == [0, 1, 2, 3]
    assert all(record.completed_us - record.buckets[0].ready_us == pytest.approx(20_000) for record in steps[1::2])


def test_a_captured_step_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, told = Gpu(monkeypatch), recorder()
    gpu.capturing = True
    gpu.step(told, 0)
    assert gpu.made == 0
    gpu.capturing = False
    gpu.step(told, 1)
    assert [step.step for step in told.steps()] == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_times_what_runs_on_its_streams() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    main, lane, told = torch.cuda.current_stream(), torch.cuda.Stream(), recorder()
    torch.cuda.synchronize()
    begin_us = perf_counter_ns() / 1000
    for number in range(3):
        told.begin_step(number, device)
        torch.cuda._sleep(50_000_000)
        told.bucket(0, "layer", 8)
        told.compute_ends()
        message = told.message([0], "layer", 8)
        lane.wait_stream(main)
        with torch.cuda.stream(lane), recording.running(message), recording.primitive("world", "all_reduce", 8):
            torch.cuda._sleep(100_000_000)
        main.wait_stream(lane)
    queued_us = perf_counter_ns() / 1000
    steps = told.steps()
    end_us = perf_counter_ns() / 1000
    assert queued_us - begin_us < (end_us - begin_us) / 4  # recording waited for nothing
    assert begin_us < steps[0].buckets[0].ready_us
    assert steps[-1].completed_us < end_us
    for before, after in pairwise(steps):
        compute_us = after.compute_end_us - before.completed_us
        (message_record,) = after.messages
        assert message_record.started_us == pytest.approx(after.compute_end_us, abs=200)
        assert message_record.finished_us - message_record.started_us == pytest.approx(2 * compute_us, rel=0.1)
