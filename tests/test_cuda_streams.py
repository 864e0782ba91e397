# SPDX-License-Identifier: Apache-2.0
"""The CUDA lane on a made-up GPU: every byte is read after it was written, and used again after it was read.

Ranks are made up too: all have the same values, and a collective is an operation on the current stream. What DDP does
around the hook is done here: buckets filled on streams of their own, futures waited for at the end.
"""

from __future__ import annotations

import inspect
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import commopt
from commopt import Aggregator, Compressed, Flat, Hierarchical, LaneError, PowerSGD, Quantize, lanes
from commopt.attached.checkpoint import snapshot_of
from commopt.attached.options import AttachOptions
from commopt.feedback import Layout, ResidualStore, restore, save
from commopt.feedback.checkpoint import MAX_MAGNITUDE
from commopt.groups import Membership, Team, TeamShape
from commopt.groups.store import limited
from commopt.hooks.buckets import DDPRegistration
from commopt.lanes import LaneClient, client, lane, registry, stream
from commopt.schedule import calibration
from tests.fake_cuda import DEVICE, Gpu
from topology import Cluster

BUCKETS = ("first", "second", "third")
NUMEL = 96 * 64


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMOPT_KERNELS", "torch")


# ------------------------------------------------------------------------------ made-up ranks


class Echo(Team):
    """Ranks that all do what this one does; `used` counts their collectives."""

    used = 0

    def __init__(self, nodes: tuple[int, ...], level: str = "world", *parts: Team) -> None:
        TeamShape.__init__(self, nodes, 0, {"cuda": "nccl"}, level)
        self.intra, self.inter = parts or (None, None)
        self.ranks = tuple(range(len(nodes)))
        self._group, self._closed = None, False

    @property
    def closed(self) -> bool:
        return False

    def _call(self, primitive: str, call: Any, *tensors: Tensor, over_gloo: Any = None, **how: Any) -> None:
        self.used += 1
        output, source = tensors[0].view(-1), tensors[-1].view(-1)
        if primitive in ("all_reduce", "reduce"):
            output.mul_(self.size)
        elif primitive == "broadcast":
            output.mul_(1)
        elif primitive == "reduce_scatter":
            output.copy_(source.view(self.size, -1)[0]).mul_(self.size)
        elif primitive == "all_gather":
            output.view(self.size, -1).copy_(source.reshape(1, -1).expand(self.size, -1))
        else:
            assert primitive == "all_to_all"
            output.view(self.size, -1).copy_(source.view(self.size, -1)[:1].expand(self.size, -1))


class Setup(Membership):
    """Lives as long as the device."""

    def __post_init__(self) -> None:
        self.gpu = Gpu.now()
        super().__post_init__()

    @property
    def alive(self) -> bool:
        return bool(Gpu.entered) and Gpu.now() is self.gpu


def setup() -> Setup:
    """Two nodes with two ranks each."""
    team = Echo((0, 0, 1, 1), "world", Echo((0, 0), "intra"), Echo((0, 1), "inter"))
    group: Any = lambda: None  # noqa: E731
    store = limited(dist.HashStore(), "made up", 60.0)
    return Setup("made up", group, group, Cluster.from_ranks_per_node(4, 2), team, 60.0, store)


@dataclass
class GradBucket:
    """Stands for DDP's, of which torch lets nobody make one."""

    number: int
    values: Tensor
    parameter: nn.Parameter

    def buffer(self) -> Tensor:
        return self.values

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.number + 1 == len(BUCKETS)

    def parameters(self) -> list[nn.Parameter]:
        return [self.parameter]


class Training:
    """Steps of a model of three parameters, each in a bucket of its own."""

    def __init__(self, aggregator: Aggregator, scaler: Any = None) -> None:
        self.model = nn.ParameterDict({name: nn.Parameter(torch.zeros(96, 64)) for name in BUCKETS})
        self.registration = DDPRegistration(AttachOptions(scaler=scaler), aggregator, self.model)
        client = self.registration.joined = LaneClient(setup(), "test")
        self.registration._begin(aggregator, client)
        self.streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self.buckets = [torch.zeros(NUMEL, device=DEVICE) for _ in BUCKETS]

    def fill(self, place: int, values: Tensor) -> Tensor:
        """Return what a bucket is filled with."""
        return values

    def step(self, number: int) -> list[Tensor]:
        """Fill each bucket on another stream, as autograd may; return what DDP would read."""
        for each in self.streams[1:]:
            each.wait_stream(self.streams[0])
        futures = []
        for place, (name, each) in enumerate(zip(BUCKETS, self.streams, strict=True)):
            with torch.cuda.stream(each):
                drawn = torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * number + place))
                self.buckets[place].copy_(self.fill(place, drawn).to(DEVICE))
                bucket: Any = GradBucket(place, self.buckets[place], self.model[name])
                futures.append(self.registration.reduce(bucket))
            torch.zeros(NUMEL, device=DEVICE)  # backward goes on, in memory that is free
        for each in self.streams[1:]:
            self.streams[0].wait_stream(each)
        averages = [future.wait() for future in futures]
        for average in averages:
            average.mul(2)  # the optimizer
        return averages


@contextmanager
def device() -> Iterator[Gpu]:
    """A GPU of its own, with no lane yet."""
    registry._close_all()
    with Gpu() as gpu, patch.object(registry, "_forget_old_world"):  # without a process group there would be none
        try:
            yield gpu
        finally:
            gpu.finish()
            registry._close_all()


STRATEGIES = [name for name in commopt.PRESETS if name != "auto"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_preset_waits_for_what_it_reads(strategy: str) -> None:
    with device() as gpu:
        training = Training(commopt.build_preset(strategy))
        for number in range(4):
            averages = training.step(number)
        assert not gpu.faults
        assert all(bool(average.isfinite().all()) for average in averages)


def scaled() -> list[str]:
    """Train with a loss scale on the device, which changes between steps."""
    with device() as gpu:
        scaler: Any = SimpleNamespace(is_enabled=lambda: True, _scale=torch.full((), 4.0, device=DEVICE))
        training = Training(Compressed(Quantize(4)), scaler=scaler)
        for number in range(3):
            training.step(number)
            scaler._scale.mul_(2)
    return gpu.faults


def test_a_loss_scale_is_read_before_it_changes() -> None:
    assert not scaled()


def loaded(aggregator: Aggregator, where: str) -> list[str]:
    """Go on from a checkpoint that was loaded to `where`, in buffers that become others."""
    with device() as gpu:
        training = Training(aggregator)
        for number in range(3):
            training.step(number)
        store = training.registration.store
        saved = tree_map(lambda each: each.to(where) if isinstance(each, Tensor) else each, save(store))
        store = training.registration.store = ResidualStore()
        restore(store, saved, training.registration.layouts.numels, lambda name: MAX_MAGNITUDE)
        del saved
        for number in range(3, 5):
            training.step(number)
            for slot in list(store.residuals()):
                store.release(slot.path, slot.layout)
    return gpu.faults


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("aggregator", [Compressed(Quantize(4)), PowerSGD(start_step=0)], ids=str)
def test_residuals_of_a_checkpoint(aggregator: Aggregator, where: str) -> None:
    assert not loaded(aggregator, where)


def standalone() -> list[str]:
    """Gather from memory that is let go at once, poll, and read on a stream that has not waited."""
    with device() as gpu:
        membership, sums = setup(), torch.zeros(4, device=DEVICE)
        on_device = lanes.lane_for(DEVICE)
        gathered = torch.zeros(400, device=DEVICE)
        source = torch.ones(100, device=DEVICE)

        def gather(source: Tensor) -> lanes.Pending:
            run = partial(membership.team.all_gather, gathered, source)
            task = lanes.Task(membership, "test", 0, run, "all_gather", 400, "cuda")
            return on_device.submit(task, gathered, [source])

        ticket = gather(source)
        del source
        torch.zeros(100, device=DEVICE)
        assert not ticket.is_completed(), "launched is not done"
        gpu.finish()
        assert ticket.is_completed()
        with torch.cuda.stream(torch.cuda.Stream()):
            sums.add_(gathered.view(100, 4).sum(0))
    with device() as other:
        membership, gathered = setup(), torch.zeros(400, device=DEVICE)
        on_device = lanes.lane_for(DEVICE)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            assert gather(torch.ones(100, device=DEVICE)).wait() is gathered
            gathered.mul_(2)
    return gpu.faults + other.faults


def test_a_standalone_call() -> None:
    assert not standalone()


def test_an_error_of_a_launch_raises_where_it_is_made_and_says_how_to_recover() -> None:
    with device():
        membership, values = setup(), torch.zeros(4, device=DEVICE)

        def fail() -> None:
            raise ValueError("no such kernel")

        on_device = lanes.lane_for(DEVICE)
        task = lanes.Task(membership, "test", 0, fail, "all_reduce", 4, "cuda")
        with pytest.raises(LaneError, match=r"(?s)no such kernel.*TORCH_NCCL_ASYNC_ERROR_HANDLING=0"):
            on_device.submit(task, values, [values])
        with pytest.raises(LaneError, match=r"(?s)no such kernel.*TORCH_NCCL_ASYNC_ERROR_HANDLING=0"):
            lanes.require_healthy()


# ------------------------------------------------------------------------------ communicators


@pytest.mark.parametrize(
    ("aggregator", "used"),
    [(Flat(), {"world"}), (Hierarchical(form="reduce_scatter"), {"intra", "inter"})],
    ids=["flat", "hierarchical"],
)
def test_no_level_is_connected_that_is_not_used(aggregator: Aggregator, used: set[str]) -> None:
    with device():
        training = Training(aggregator)
        training.step(0)
        team: Any = training.registration.client.team
        assert {each.level for each in (team, team.intra, team.inter) if each.used} == used


class Connecting(Flat):
    """Takes long to send a thing for the first time."""

    connected = False

    def all_reduce(self, *arguments: Any) -> None:
        if not Connecting.connected:
            time.sleep(0.5)
        Connecting.connected = True
        super().all_reduce(*arguments)


def test_trials_do_not_time_how_communicators_connect() -> None:
    layouts = [Layout.of_parameters([("weight", (numel,))]) for numel in (1024, 4096, 8192, 16384)]
    with device():
        points = calibration.calibrate({"flat": Connecting()}, layouts, torch.float32, setup().team, 0.5)["flat"]
    assert Connecting.connected
    assert len(points) == len(layouts), "the budget was spent on connecting"


# ------------------------------------------------------------------------------ what the made-up GPU sees


def with_snapshots() -> list[str]:
    """Ask for a state after each step, and read them when later steps were launched."""
    with device() as gpu:
        training, taken = Training(Compressed(Quantize(4))), []
        for number in range(5):
            training.step(number)
            taken.append((snapshot_of(training.registration, "a test", pinned=True), save(training.registration.store)))
        for snapshot, state in taken:
            found = snapshot.result()
            assert snapshot.done()
            assert found["residuals"]
            for role, pieces in state["residuals"].items():
                for key, values in pieces.items():
                    assert torch.equal(found["residuals"][role][key], values)
    return gpu.faults


def test_states_are_copied_on_the_lanes_stream() -> None:
    assert not with_snapshots()


def everything() -> list[str]:
    """Run all of the above."""
    return [*scaled(), *standalone()]


MUTANTS = {
    "the lane waits for no stream": (lane, "Pending", "stream.wait_event(self._ready)", "pass"),
    "memory is not recorded": (stream, "StreamLane", "tensor.record_stream(self._stream)", "pass"),
    "the work runs on the caller's stream": (stream, "StreamLane", "with on_stream(self._stream):", "if True:"),
    "results are finished on another stream": (
        stream,
        "StreamLane",
        "pending.finish(error)",
        "with torch.cuda.stream(torch.cuda.Stream()): pending.finish(error)",
    ),
    "an operation has ended once it is launched": (lane, "Pending", "self.kernels_end.query()", "True"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_lane_with_a_fault_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mutant leaves out one of the lane's precautions."""
    module, of, line, instead = MUTANTS[name]
    source = textwrap.dedent(inspect.getsource(getattr(module, of)))
    assert source.count(line) == 1, f"{of} has another text now"
    scope = dict(vars(module))
    exec(compile("from __future__ import annotations\n" + source.replace(line, instead), name, "exec"), scope)
    for user in (module, lanes, client, lane, stream, registry):
        if hasattr(user, of):
            monkeypatch.setattr(user, of, scope[of])
    try:
        faults = everything()
    except AssertionError:  # of is_completed()
        return
    assert faults


def test_states_before_the_first_step_are_copied_on_the_lane_of_the_buckets() -> None:
    with device():
        training = Training(Compressed(Quantize(bits=8)))
        registration = training.registration
        before = registration.client.lane
        state = snapshot_of(registration, "state_dict", pinned=True).result()
        training.step(0)
        assert registration.client.lane is before
    assert state["steps"] == 0


def test_tasks_without_a_device_stay_on_the_first_lane() -> None:
    """Messages of another device than the first, such as buffers of a model, take no meeting to another lane."""
    taken = []

    def lane_of(where: torch.device) -> Any:
        taken.append(where.type)
        return Mock()

    with device(), patch.object(client, "lane_for", lane_of):
        one = LaneClient(setup(), "test")
        one.submit("bucket", lambda: None, torch.zeros(1, device="meta"))
        one.submit("buffers", lambda: None, torch.zeros(1))
        one.run(lambda: None, "meeting")
    assert taken == ["meta", "cpu", "meta"]
