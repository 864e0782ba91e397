# SPDX-License-Identifier: Apache-2.0
"""Plain sums over gloo overlap, two at once, as stock DDP's do; all else waits for its turn, and all end in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commopt
from commopt import LaneError, recording
from commopt.groups import Started, join
from commopt.lanes import Pending, Task, WorkerLane
from tests.ranks import run

LIMIT_S = 60


class Exchanges:
    """Tasks of a lane that are done when a test says so."""

    def __init__(self) -> None:
        self.lane = WorkerLane(torch.device("cpu"))
        self.begun: list[int] = []
        self.finished: list[int] = []
        self.futures: dict[int, torch.futures.Future[None]] = {}
        self._changed = threading.Condition()

    def submit(self, number: int, *, overlaps: bool = True, wrong: str = "") -> Pending:
        """Submit a task; one that does not overlap ends at once. wrong: is raised at its end."""
        self.futures[number] = torch.futures.Future()

        def finish() -> None:
            if wrong:
                raise ValueError(wrong)
            self._note(self.finished, number)

        def start() -> Started | None:
            self._note(self.begun, number)
            if overlaps:
                return Started(self.futures[number], finish)
            finish()
            return None

        membership = join()
        task = Task(membership, "test", number, start, f"task {number}", 1, "cpu", overlaps)
        return self.lane.submit(task, torch.full((1,), float(number)))

    def end(self, number: int) -> None:
        """Let the exchange of a task be done."""
        self.futures[number].set_result(None)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition of `begun` and `finished` holds."""
        with self._changed:
            deadline = time.monotonic() + LIMIT_S
            while not condition():
                assert time.monotonic() < deadline, (self.begun, self.finished)
                self._changed.wait(0.05)

    def _note(self, where: list[int], number: int) -> None:
        with self._changed:
            where.append(number)
            self._changed.notify_all()


@pytest.fixture
def exchanges(tmp_path: Path) -> Iterator[Exchanges]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    made = Exchanges()
    yield made
    for future in made.futures.values():
        if not future.done():
            future.set_result(None)
    made.lane.close()
    dist.destroy_process_group()


def test_two_at_once_and_they_end_in_order(exchanges: Exchanges) -> None:
    pending = [exchanges.submit(number) for number in range(3)]
    exchanges.wait_for(lambda: exchanges.begun == [0, 1])
    exchanges.end(1)
    exchanges.end(2)
    assert not any(each.is_completed() for each in pending)
    exchanges.end(0)
    assert [float(each.wait()) for each in pending] == [0, 1, 2]
    assert exchanges.finished == exchanges.begun == [0, 1, 2]


def test_what_does_not_overlap_has_the_lane_for_itself(exchanges: Exchanges) -> None:
    exchanges.submit(0)
    exchanges.submit(1, overlaps=False)
    last = exchanges.submit(2)
    exchanges.wait_for(lambda: exchanges.begun == [0])
    exchanges.end(0)
    exchanges.wait_for(lambda: exchanges.begun == [0, 1, 2])
    assert exchanges.finished == [0, 1]
    exchanges.end(2)
    last.wait()


def test_whoever_waits_for_the_lane_waits_for_what_goes_on(exchanges: Exchanges) -> None:
    exchanges.submit(0)
    exchanges.wait_for(lambda: exchanges.begun == [0])
    waiter = threading.Thread(target=exchanges.lane.finish, daemon=True)
    waiter.start()
    exchanges.wait_for(lambda: exchanges.lane.under_way() is not None)
    waiter.join(0.2)
    assert waiter.is_alive()
    exchanges.end(0)
    waiter.join(LIMIT_S)
    assert not waiter.is_alive()
    assert exchanges.lane.under_way() is None


def test_an_error_at_the_end_of_one_reaches_all_behind_it(exchanges: Exchanges) -> None:
    before, wrong, beside, behind = (
        exchanges.submit(0),
        exchanges.submit(1, wrong="the cable is out"),
        exchanges.submit(2),
        exchanges.submit(3, overlaps=False),
    )
    for number in range(3):
        exchanges.end(number)
    before.wait()
    for each in (wrong, beside, behind):
        with pytest.raises(LaneError, match="the cable is out"):
            each.wait()
    assert exchanges.finished == [0]
    assert 3 not in exchanges.begun


def test_the_time_of_two_at_once_counts_once() -> None:
    """Or plans, whose messages take turns, would be priced for each at the speed of half the link."""
    recorder = recording.Recorder()
    recorder.record_always()
    recorder.begin_step(0, torch.device("cpu"))
    messages = []
    for number in range(2):
        recorder.bucket(number, "bucket", 4)
        message = recorder.message([number], "bucket", 4)
        assert message is not None
        message.__enter__()
        recording.primitive("world", "all_reduce", 4).__enter__()
        message.leave()
        messages.append(message)
    recording.primitive("world", "all_reduce", 4).__enter__()  # of no message
    for message in messages:
        for span in message.spans:
            span[-1] = message.mark()
        message.finish()
    recorder.compute_ends()
    (step,) = recorder.steps()
    first, second = step.messages
    assert first.started_us < first.finished_us == second.started_us <= second.finished_us
    assert len(first.spans) == len(second.spans) == 1
    assert second.spans[0].begin_us == second.started_us


# ------------------------------------------------------------------------------------- a real training

LAYERS = 6


def averages_are_exact(rank: int, world_size: int, preset: str) -> int:
    """Train, and compare every average; return how often a message came to the lane while another went on there."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(LAYERS)]
    ddp = commopt.DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-3)
    commopt.attach(ddp, preset, plan="ddp")
    alone = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    with patch.object(WorkerLane, "_may_overlap", autospec=True, side_effect=WorkerLane._may_overlap) as asked:
        for step in range(6):
            inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))
            alone.load_state_dict(ddp.module.state_dict())
            for model in (alone, ddp):
                model.zero_grad()
                model(inputs).square().mean().backward()
            for own, averaged in zip(alone.parameters(), ddp.parameters(), strict=True):
                assert own.grad is not None
                assert averaged.grad is not None
                dist.all_reduce(own.grad)
                torch.testing.assert_close(averaged.grad, own.grad / world_size)
            with torch.no_grad():
                for parameter in ddp.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.1)
        return asked.call_count


@pytest.mark.parametrize(
    ("preset", "nodes", "overlap"),
    [
        ("flat", (2, 2), True),
        ("flat", (1, 1, 1), True),
        ("hierarchical", (1, 1, 1), True),
        ("hierarchical", (2, 2), False),
    ],
)
def test_gradients_are_averaged_while_messages_overlap(preset: str, nodes: tuple[int, ...], overlap: bool) -> None:
    """With several ranks on a node, sums by level do not overlap: they share processors and take turns at the link."""
    found = run(averages_are_exact, sum(nodes), preset, nodes=nodes)
    assert any(found) == overlap
