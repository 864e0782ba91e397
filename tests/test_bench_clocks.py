# SPDX-License-Identifier: Apache-2.0
"""Clocks of the benchmarks: operations in turns, and what a GPU's clock does around what it times."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor

from bench.timing import GpuClock, clock_of, events_us, host_clock, times_s

CPU = torch.device("cpu")


def test_operations_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    taken = times_s([lambda: calls.append("a"), lambda: calls.append("b")], repeats=3)
    assert calls == ["a", "b"] * 4
    assert [len(times) for times in taken] == [3, 3]
    assert min(chain(*taken)) > 0


class FakeGpu:
    """A device that takes 50 us to read a buffer, 3 us for an event and 10 us for anything else, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lead_s: float) -> None:
        self.lead_s = lead_s  # how far the host is ahead
        self.now_s = self.synchronized_s = 0.0
        self.reads = 0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                gpu.now_s += 3e-6
                self.at_s = gpu.now_s

            def query(self) -> bool:
                return gpu.now_s - gpu.synchronized_s > gpu.lead_s

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return 1000 * (end.at_s - self.at_s)

        class Properties:
            L2_cache_size = 100

        def read(tensor: Tensor) -> Tensor:
            assert tensor.nbytes == 400
            self.reads += 1
            self.now_s += 50e-6
            return tensor

        def synchronize() -> None:
            self.synchronized_s = self.now_s

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
        monkeypatch.setattr(Tensor, "sum", read)

    def work(self) -> None:
        self.now_s += 10e-6


@pytest.mark.parametrize(("lead_s", "queued"), [(1.0, True), (1e-3, False)])
def test_a_gpu_is_kept_busy_while_calls_are_queued(
    monkeypatch: pytest.MonkeyPatch, lead_s: float, queued: bool
) -> None:
    gpu = FakeGpu(monkeypatch, lead_s)
    clock = GpuClock(CPU, hold_s=1.99e-3)
    assert events_us(clock) == pytest.approx(3.0)
    gpu.reads = 0
    reading = clock(gpu.work, 7)
    assert gpu.reads == 38  # of 53 us each, with the event
    assert reading.taken_s == pytest.approx(70e-6)
    assert clock(gpu.work, 0).taken_s == pytest.approx(0.0, abs=1e-12)
    assert reading.host_s > 0
    assert reading.queued is queued


def test_the_clock_of_the_host_has_no_events() -> None:
    assert clock_of(CPU) is host_clock
    assert events_us(host_clock) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_clock_of_a_gpu() -> None:
    device = torch.device("cuda")
    clock = clock_of(device)
    values, other = torch.ones(2, 2**24, device=device)
    once, thrice = (
        min((clock(lambda: other.copy_(values), calls) for _ in range(5)), key=lambda each: each.taken_s)
        for calls in (1, 3)
    )
    assert once.queued
    assert thrice.queued
    assert 1e-6 < once.taken_s < 0.1
    assert thrice.taken_s > 2 * once.taken_s
    assert not clock(lambda: torch.cuda.synchronize(), 1).queued
