"""A bucket's way to the lane: `BucketPath.reduce` takes it in, `Reduction` averages it there."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from commopt import lanes
from commopt.aggregate import Aggregator, Flat, context_for
from commopt.errors import CommoptError, ConfigurationError
from commopt.feedback import GradientCosine, Layout, sample_numel
from commopt.groups import Team, TeamShape, WireBytes
from commopt.hooks.checks import REDUCIBLE, UnusedAverages, refuse_bucket, warn_of_unknown_scaler
from commopt.hooks.registration import Registration, Step
from commopt.recording import Message as Recorded
from commopt.recording import running

_FOLD_AFTER = 64


class BucketPath:
    """Makes messages of DDP's buckets and puts them on the lane, as `registration` has it; counts what that costs."""

    def __init__(self, registration: Registration) -> None:
        self.traffic = Traffic()
        self.hook_ns = self.hook_calls = 0
        self._registration = registration
        self._cosine_of = -1  # which plan, by its number, the samples of averages are of
        self._raising_task = -1
        self._lately_ns: deque[int] = deque(maxlen=64)
        self._unused: UnusedAverages | None = None

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks; the future resolves to `bucket.buffer()` itself."""
        entered_ns = perf_counter_ns()
        registration = self._registration
        buffer, number, last = bucket.buffer(), bucket.index(), bucket.is_last()
        if buffer.dtype not in REDUCIBLE or buffer.layout != torch.strided:
            refuse_bucket(bucket, buffer, registration.module)
        if buffer.storage_offset() != 0 or not buffer.is_contiguous():
            # DDP would read the result from the start of its storage, whatever the tensor says.
            raise CommoptError(f"DDP's bucket {number} does not fill its storage; report this torch version")
        layout = registration.layouts.of(bucket)
        if number == 0:
            self._begin_step(buffer.device)
        if buffer.device != registration.device:
            self._require_one_device(buffer.device)
        if registration.recorder.enabled:
            registration.recorder.bucket(number, layout.title, buffer.nbytes)
        if last:
            self._check_step()
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._raising_task and graph_task != -1:
            self._let_backward_raise(graph_task)
        handle = self._send(layout, buffer, number, last=last)
        if last:
            self._end_step()
        spent_ns = perf_counter_ns() - entered_ns
        self._lately_ns.append(spent_ns)
        self.hook_ns += spent_ns
        self.hook_calls += 1
        # DDP's join() calls the hook outside of any backward.
        return handle.future if graph_task == -1 else handle.ended

    def _begin_step(self, device: torch.device) -> None:
        registration = self._registration
        if registration.joined is None:
            registration.join()
        steps = registration.steps
        registration.controller.require_repeatable(steps)
        if registration.averages is not None:  # a rank without data, in DDP's join(), makes no forward before this
            registration.averages.take_turn()
        if registration.device is None:
            registration.device = device
        registration.controller.begin_step(steps)
        if registration.recorder.enabled:
            registration.recorder.begin_step(steps, device)
        registration.step = Step(steps, registration.store, registration.scaler)
        if registration.watches_cosine and registration.controller.changes != self._cosine_of:
            self._cosine_of = registration.controller.changes
            registration.cosine = GradientCosine(steps)  # a new plan is judged by its own samples

    def _let_backward_raise(self, graph_task: int) -> None:
        """Let the backward under way raise the error of a lane that fails meanwhile.

        Such a LaneError stays what it is, where DDP makes a RuntimeError of a future's. A step may have several graph
        tasks (a reentrant checkpoint, two backwards of one forward). DDP waits for the futures in the one in which it
        shows the last bucket, which it does not always call the last: so every task that shows one gets a callback.
        """
        engine = Variable._execution_engine
        # From within a callback, so that it comes after DDP's own, which waits for the lane.
        engine.queue_callback(lambda: engine.queue_callback(lanes.require_healthy))
        self._raising_task = graph_task

    def _require_one_device(self, device: torch.device) -> None:
        registration = self._registration
        if registration.keeps_residuals:
            raise ConfigurationError(
                f"gradients lie on {registration.device} and {device}; error feedback keeps one device per DDP model: "
                f"put the model on one, or use a lossless aggregator"
            )
        registration.controller.give_up(
            f"gradients lie on {registration.device} and {device}, and messages are of one device"
        )

    def _check_step(self) -> None:
        """See, once a step is complete, to what an aggregator that remembers needs."""
        registration = self._registration
        if registration.recorder.enabled:
            registration.recorder.compute_ends()
        if not registration.keeps_residuals:
            return
        if registration.reduced_steps == 0 and registration.scaler is None:
            warn_of_unknown_scaler()
        if not registration.store.per_step:
            self._unused = self._unused or UnusedAverages()
            self._unused.step_is_reduced()
        registration.layouts.require_expected()

    def _send(self, layout: Layout, buffer: Tensor, index: int, *, last: bool) -> lanes.Work:
        """Queue the average of bucket `index`, `last` of its step."""
        registration, step, device = self._registration, self._registration.step, buffer.device
        client, recorder, aggregator = registration.joined, registration.recorder, registration.controller.aggregator
        assert client is not None  # since the step began
        registration.controller.add_bucket(layout, buffer)
        number = len(step.buffers)
        cosine = None
        if registration.watches_cosine and not aggregator.lossless and registration.cosine.takes(step.number):
            cosine = registration.cosine
            self.traffic.count(_FLAT, anonymous(sample_numel(layout.numel)), torch.float32, device, step.number)
        # Words only for who asks for them: this is on the way of backward.
        recorded = recorder.message((index,), layout.title, buffer.nbytes) if recorder.enabled else None
        task = Reduction(buffer, layout, number, last, step, aggregator, client.team, cosine, recorded)
        handle = client.submit(task, task, buffer, numel=layout.numel)
        step.buffers.append(layout)
        self.traffic.count(aggregator, layout, buffer.dtype, device, step.number)
        return handle

    def _end_step(self) -> None:
        registration = self._registration
        assert registration.device is not None  # of the first bucket
        usual_us = median(self._lately_ns) / 1000 if registration.recorder.enabled and self._lately_ns else 0.0
        cosine = registration.cosine if registration.watches_cosine else None
        meeting = registration.controller.end_step(
            registration.steps, registration.device, usual_us, cosine, registration.store
        )
        if meeting is not None:
            registration.controller.pending = registration.client.run(meeting.hold, meeting.what)
        registration.steps += 1
        registration.reduced_steps += 1
        if registration.averages is not None:
            registration.averages.steps = registration.steps

    def wire_bytes(self) -> WireBytes:
        """Return the payload this rank has sent, nothing before it has joined."""
        registration = self._registration
        if registration.joined is None:
            return WireBytes()
        team, averages = registration.joined.team, registration.averages
        sent = self.traffic.wire_bytes(team)
        return sent if averages is None else sent + averages.sent


# ----------------------------------------------------------------------------------------- on the lane


@dataclass(eq=False, slots=True)
class Reduction:
    """The lane's work for one bucket: its `buffer` is averaged and its residuals are committed.

    number: of the bucket in its step. last: whether none follows. cosine: compares the average with the exact one.
    """

    buffer: Tensor
    layout: Layout
    number: int
    last: bool
    step: Step
    aggregator: Aggregator
    team: Team
    cosine: GradientCosine | None
    recorded: Recorded | None

    def __str__(self) -> str:
        return f"bucket {self.number} by {self.aggregator}"

    def __call__(self) -> None:
        """Do it."""
        store, team, parts = self.step.store, self.team, [self.buffer.view(-1)]
        with nullcontext() if self.recorded is None else running(self.recorded):
            if self.number == 0:
                store.begin_step()
            scaler, loss_scale = self.step.scaler, None
            if scaler is not None:
                loss_scale = _loss_scale(scaler, self.buffer.device)
            number, rank = self.step.number, team.ranks[team.rank]
            account = context_for(self.aggregator, self.layout, team, store, number, self.number, rank, loss_scale)
            scale = account.add_leftover(parts[0], 1.0 / team.size)
            exact = None if self.cosine is None else self.cosine.exact(parts[0], team, scale)
            self.aggregator.all_reduce(parts[0], team, scale, account)
            if self.cosine is not None and exact is not None:
                self.cosine.add(exact, parts[0])
            store.end_bucket(parts, last=self.last)


def _loss_scale(scaler: Any, device: torch.device) -> Tensor | None:
    """Return what gradients are multiplied by, on `device`; None for 1. No host sync."""
    if not scaler.is_enabled() or scaler._scale is None:
        return None
    scale: Tensor = scaler._scale
    return scale.detach().to(device, torch.float32, non_blocking=True)


# ----------------------------------------------------------------------------------------- what was sent

_FLAT = Flat()


@dataclass(eq=False)
class _Kind:
    """All that tells how long a buffer's messages are, and the steps it was sent in; `before` by their phases."""

    aggregator: Aggregator
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    steps: list[int] = field(default_factory=list)
    before: Counter[int] = field(default_factory=Counter)


class Traffic:
    """Counts the payload that one rank sends: a step is like many others, so there are few kinds of buffers."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int, torch.dtype, torch.device], _Kind] = {}

    def count(
        self, aggregator: Aggregator, layout: Layout, dtype: torch.dtype, device: torch.device, step: int
    ) -> None:
        """Note one all_reduce of a buffer."""
        key = id(aggregator), id(layout), dtype, device  # a kind keeps both alive
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind(aggregator, layout, dtype, device)
        kind.steps.append(step)
        if len(kind.steps) == _FOLD_AFTER:
            kind.before.update(aggregator.phase(step) for step in kind.steps)
            kind.steps = []

    def wire_bytes(self, team: TeamShape) -> WireBytes:
        """Return the payload this rank has sent so far."""
        sent = WireBytes()
        for kind in list(self._kinds.values()):  # a copy: another thread may ask during a step
            phases = kind.before + Counter(kind.aggregator.phase(step) for step in tuple(kind.steps))
            for phase, times in phases.items():
                sent += kind.aggregator.wire_bytes(kind.layout, kind.dtype, team, kind.device, phase) * times
        return sent


@lru_cache(maxsize=1024)
def anonymous(numel: int) -> Layout:
    """Return the layout of a buffer whose names do not matter."""
    return Layout.anonymous(numel)
