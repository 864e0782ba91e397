"""A second lane of the CPU by itself: order, errors, modes; that of a GPU is in test_cuda_streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commopt import LaneError, recording
from commopt.lanes.second import SecondWorker


@pytest.fixture
def second() -> Iterator[SecondWorker]:
    lane = SecondWorker(threading.local())
    yield lane
    assert lane.close()


def test_work_runs_in_order_beside_its_caller(second: SecondWorker) -> None:
    may_go, done = threading.Event(), []

    def first() -> None:
        assert may_go.wait(5)
        done.append(1)

    started = [second.start(first), second.start(lambda: done.append(2))]
    assert not done, "the caller waited"
    may_go.set()
    started[1].join()
    assert done == [1, 2]
    started[0].join()


def test_an_error_comes_out_where_it_is_waited_for_and_ends_the_lane(second: SecondWorker) -> None:
    done = []

    def fail() -> None:
        raise OSError("disk on fire")

    failed, later = second.start(fail), second.start(lambda: done.append(1))
    with pytest.raises(OSError, match="disk on fire"):
        failed.join()
    with pytest.raises(LaneError, match="stopped"):
        later.join()
    with pytest.raises(LaneError, match="stopped"):
        second.start(lambda: done.append(2)).join()
    assert not done


def test_after_stop_nothing_begins(second: SecondWorker) -> None:
    begun, may_go = threading.Event(), threading.Event()
    done: list[Any] = []

    def run() -> None:
        begun.set()
        done.append(may_go.wait(5))

    running = second.start(run)
    assert begun.wait(5)
    waiting = second.start(lambda: done.append("waiting"))
    second.stop()
    may_go.set()
    running.join()
    with pytest.raises(LaneError, match="stopped"):
        waiting.join()
    assert done == [True]


def test_its_thread_is_known_as_the_lanes_own() -> None:
    """Whose work calls commopt again is told so; else it would wait for its own end."""
    own, seen = threading.local(), []
    lane = SecondWorker(own)
    lane.start(lambda: seen.append(own.busy)).join()
    assert seen == [True]
    assert not hasattr(own, "busy"), "of another thread"
    assert lane.close()


def test_modes_and_messages_follow(second: SecondWorker) -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.extend([torch.is_grad_enabled(), torch.is_inference_mode_enabled(), recording.current()])

    recorder = recording.Recorder()
    recorder.enabled = True
    recorder.begin_step(0, torch.device("cpu"))
    message = recorder.message([0], "first", 4)
    with torch.inference_mode(), recording.running(message):
        second.start(look).join()
    second.start(look).join()
    assert seen == [False, True, message, False, False, None]
