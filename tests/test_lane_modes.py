# SPDX-License-Identifier: Apache-2.0
"""On CUDA a lane works in the thread that submits, on the CPU in its own: what the caller has set must not count.

Here the CPU's lane works in the submitting thread too, whose hook is called under autocast, a default device and a
dispatch mode. A run is compared with one that differs only in the lane's thread.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import commopt
from commopt import LaneError, lanes
from commopt.feedback import Layout
from commopt.groups import broadcast_bytes, gather_bytes, join
from commopt.hooks.buckets import DDPRegistration
from commopt.lanes import WorkerLane, registry
from commopt.lanes.lane import fresh_modes
from commopt.schedule import calibration
from tests.gpu_training import Learner, kept
from tests.ranks import run

DTYPES = (torch.bfloat16, torch.float16)
STRATEGIES = [name for name in commopt.PRESETS if name != "auto"]  # whose choices depend on the clock
OPTIONS = {"quantized": ":rounding=stochastic"}


def test_a_future_resolves_to_the_tensor_itself() -> None:
    """DDP would copy what another one holds into the bucket, in every step."""
    bucket = torch.arange(3.0)
    pending = lanes.Pending(bucket)
    ended, future = pending.ended, pending.future
    pending.finish(None)
    assert ended.value().data_ptr() == future.value().data_ptr() == bucket.data_ptr()


# ------------------------------------------------------------------------------ the lane of a GPU, on the CPU


class Inline(WorkerLane):
    """Runs all work where it is submitted, as StreamLane does: ranks submit in one order, so no collective waits."""

    _order = threading.Lock()

    def _start(self, task: lanes.Task, pending: lanes.Pending, tensors: Sequence[Tensor]) -> lanes.Pending:
        with self._order:
            self._own.busy = here.busy = True
            try:
                started = self._run(task, pending)
                if started is not None:
                    self._run(task, pending, started.finish)
            finally:
                self._own.busy = here.busy = False
        pending.finish(self._error)
        if self._error is not None:
            raise LaneError(*self._error.args)
        return pending


class Here(threading.local):
    """Whether this thread runs the work of a lane."""

    busy = False


here = Here()


class OutsideOfLanes(TorchDispatchMode):
    """Fails when an operation of a lane comes by."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not here.busy, f"{func} of a lane"
        return func(*args, **(kwargs or {}))


@contextmanager
def modes(dtype: torch.dtype) -> Iterator[None]:
    """A default device on which nothing has values, autocast, and a mode that no lane must meet."""
    with torch.device("meta"), torch.autocast("cpu", dtype=dtype), OutsideOfLanes():
        yield


@contextmanager
def lane_under(dtype: torch.dtype, *, inline: bool) -> Iterator[None]:
    """Let hooks be called in `modes`, and the lane be one that works inline, or not."""
    reduce = DDPRegistration.reduce

    def reduce_under_modes(self: DDPRegistration, bucket: Any) -> Any:
        with modes(dtype):
            return reduce(self, bucket)

    lane = patch.object(registry, "WorkerLane", Inline if inline else WorkerLane)
    with lane, patch.object(DDPRegistration, "reduce", reduce_under_modes):
        yield


@pytest.mark.parametrize("inference", [False, True])
def test_what_the_caller_has_set_is_put_aside_and_put_back(inference: bool) -> None:
    with torch.enable_grad(), modes(torch.bfloat16):
        with suppress(OSError), fresh_modes(inference=inference):
            made = torch.ones(2, 2)  # where nobody says
            assert made.device.type == "cpu"
            assert (made @ made).dtype == torch.float32
            assert made.is_inference() == inference
            assert not torch.is_grad_enabled()
            assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
            raise OSError
        made = torch.ones(2, 2)
        assert made.device.type == "meta"
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled()
        assert isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), OutsideOfLanes)


# ------------------------------------------------------------------------------ every preset


def train(strategy: str, rank: int, dtype: torch.dtype, *, inline: bool) -> dict[str, Tensor]:
    """Return all parameters and what the strategy keeps after some steps."""
    with lane_under(dtype, inline=inline):
        learner = Learner("resnet", rank, "cpu", strategy)
        for _ in range(3):  # PowerSGD's first two are dense
            learner.step()
        assert learner.state is not None
        return {"parameters": learner.parameters(), **kept(learner.state)}


def differing(rank: int, world_size: int, strategies: Sequence[str]) -> list[str]:
    """Return what comes out otherwise when the lane works in the thread that runs backward."""
    found = []
    for number, strategy in enumerate(strategies):
        for dtype in DTYPES if "powersgd" in strategy else DTYPES[number % 2 :][:1]:
            registry._close_all()
            wanted = train(strategy, rank, dtype, inline=False)
            registry._close_all()
            got = train(strategy, rank, dtype, inline=True)
            assert wanted.keys() == got.keys()
            found += [f"{strategy}, {dtype}: {name}" for name in wanted if not torch.equal(wanted[name], got[name])]
    return found


def test_every_preset_trains_to_the_same_bits_in_the_callers_thread() -> None:
    strategies = [name + OPTIONS.get(name, "") for name in STRATEGIES]
    assert run(differing, 4, strategies, nodes=(2, 2), timeout_s=300) == [[]] * 4


# ------------------------------------------------------------------------------ between steps


def meeting(rank: int, world_size: int) -> tuple[list[bytes], bytes, int]:
    """Exchange bytes and time an aggregator on the lane, as a meeting of planning does."""
    membership = join()
    layout = Layout.of_parameters([("weight", (64, 64))])
    found: list[Any] = []

    def work() -> None:
        found.append(gather_bytes(membership.team, b"x" * rank))
        found.append(broadcast_bytes(membership.team, b"plan" if rank == 0 else None, 0))
        costs = calibration.calibrate({"flat": commopt.Flat()}, [layout], torch.float32, membership.team, 0.1)
        found.append(len(costs["flat"]))

    result = torch.zeros(1)
    task = lanes.Task(membership, "test", 0, work, "meeting", 1, "cpu")
    with lane_under(torch.float16, inline=True), modes(torch.float16):
        lanes.lane_for(result.device).submit(task, result).wait()
    return found[0], found[1], found[2]


def test_a_meeting_under_a_default_device() -> None:
    assert run(meeting, 2, nodes=(1, 1)) == [([b"", b"x"], b"plan", 1)] * 2


_FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
    *("rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def test_every_tensor_is_made_on_a_named_device() -> None:
    """Hooks run on the caller's threads before they reach the lane."""
    root = Path(commopt.__file__).parent
    nameless = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr) in {("torch", name) for name in _FACTORIES}
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert not nameless
