# SPDX-License-Identifier: Apache-2.0
"""`Reduction`, the lane's task for one message of any attached model, and `SentBytes`, the count of its payload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Call, Flat, committed_steps, context_for, exchange_norm
from commopt.aggregate.base import Action
from commopt.feedback import (
    BufferContext,
    ExactSample,
    Layout,
    ParameterSteps,
    ResidualStore,
    Spans,
    is_average,
    sample_numel,
    sample_stride,
)
from commopt.groups import Started, Team, TeamShape, WireBytes
from commopt.lanes import Agreement, LaneClient, Pending
from commopt.recording import MessageRecorder

_FLAT = Flat()
_FOLD_AFTER = 64
_NOTHING = nullcontext()


@dataclass(frozen=True)
class Step:
    """The common part of the messages of one step.

    number: of the step.
    store: keeps residuals; None where nothing is remembered.
    scaler: the torch.amp.GradScaler that multiplied the loss, or None.
    buffers: the layouts of the buffers sent so far, in order.
    gradients: those buffers, until the end of the step.
    skips: whether parameters without a gradient on any rank may be among the others.
    replay: averages a bucket by CUDA graphs and returns True, or does nothing; None on a CPU.
    weight: returns, on the lane, what this rank counts for, 1 for as much as the mean of all; None: all alike.
    """

    number: int
    store: ResidualStore | None
    scaler: Any = None
    buffers: list[Layout] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    skips: bool = False
    replay: Callable[[Reduction], bool] | None = None
    weight: Callable[[], float] | None = None


@dataclass(eq=False, slots=True)
class Reduction:
    """The lane's task for one message: a contiguous buffer of any shape becomes `scale` times its sum over `team`.

    number: of the message in its step.
    last: whether none follows, so that the residuals of the step may be committed.
    title: names the message in errors; by default its number does.
    scale: None for the average.
    unit: FSDP divides by it after the average; residuals are in units of `.grad`.
    spans: the elements that are averaged, where the others are padding; empty for all.
    base: is subtracted from the result, so that a difference is left; None for none.
    source: with `scatter`, the gradients of all shards.
    scatter: sets `buffer` to this rank's shard of the sum of `source`; None for an all_reduce of `buffer`.
    turn: is entered around the message, and raises unless it is the same message on all ranks.
    exact_sample: compares the result with the exact one.
    recorded: takes the times of the message.
    plain_team: its own all_reduce is the whole message, and the next one can be started beside it; None otherwise.
    """

    buffer: Tensor
    layout: Layout
    step: Step
    aggregator: Aggregator
    team: Team
    number: int = 0
    last: bool = True
    title: str = ""
    scale: float | None = None
    unit: float = 1.0
    spans: Spans = ()
    base: Tensor | None = None
    source: Tensor | None = None
    scatter: Callable[..., None] | None = None
    turn: AbstractContextManager[None] | None = None
    exact_sample: ExactSample | None = None
    recorded: MessageRecorder | None = None
    plain_team: Team | None = field(default=None, init=False)

    def __str__(self) -> str:
        return f"{self.title or f'bucket {self.number}'} by {self.aggregator}"

    def submit(self, client: LaneClient, sent: SentBytes, agreement: Agreement | None = None) -> Pending:
        """Count the message in `sent` and queue it.

        agreement: nothing is sent unless ranks have reached it; None where the message itself is the next one for all.
        """
        layout, buffer = self.layout, self.buffer
        if self.scatter is None:  # else its sender knows the calls
            sent.count(self.aggregator, layout, buffer.dtype, buffer.device, self.step.number, self.team)
        if self.last or self.step.skips or self.exact_sample is not None:
            self._count_sums(sent)
        run = self if agreement is None else agreement.guard(self)
        client.step, client.bucket = self.step.number, self.number
        numel, also = layout.numel, self.base
        if self.source is not None:
            numel, also = self.source.numel(), self.source
        if buffer.device.type == "cpu" and self.aggregator.lossless:
            self._note_plain_team()
        inputs = () if also is None else (also,)
        return client.submit(self, run, buffer, inputs, numel, overlaps=self.plain_team is not None)

    def _note_plain_team(self) -> None:
        if self.scatter or self.spans or self.base is not None or self.turn or self.exact_sample:
            return
        team = self.aggregator.sums_of(self.team)
        if team is not None and team.starts_all_reduce(self.buffer):
            self.plain_team = team

    def _count_sums(self, sent: SentBytes) -> None:
        """Count the small sums that go with the message."""
        device, step, team = self.buffer.device, self.step.number, self.team
        if self.exchanges_usage:
            sent.count_sum(len(self.layout.pieces), torch.float32, device, step, team)
        if self.exchanges_norm:
            sent.count_sum(1, torch.float64, device, step, team)
        if self.exact_sample is not None:
            numel = sample_numel(self.layout.numel) * (2 if self.aggregator.residual_paths else 1)
            sent.count_sum(numel, torch.float32, device, step, team)

    @property
    def exchanges_norm(self) -> bool:
        """Whether it ends with a number of float64 that all ranks add up, as Adam(clip_norm=...) needs."""
        return self.last and (adam := self.aggregator.adam) is not None and adam.clip_norm is not None

    @property
    def exchanges_usage(self) -> bool:
        """Whether it begins with a float32 for each parameter that all ranks add up, as Adam needs where some rest."""
        return self.step.skips and self.aggregator.adam is not None

    def __call__(self) -> Started | None:
        """Average the buffer, on the lane; return what goes on there while the next message begins."""
        store = self.step.store
        if store is not None and self.number == 0:
            store.transaction.begin_step()
            store.transaction.commits = []
        if self.plain_team is not None:
            return self._start(self.plain_team)
        replay = self.step.replay
        if self.turn is not None or self.recorded is not None:
            with self.turn or _NOTHING, self.recorded or _NOTHING:
                if replay is None or not replay(self):
                    self.average()
        elif replay is None or not replay(self):
            self.average()
        return None

    def _start(self, team: Team) -> Started:
        recorded, flat = self.recorded, self.buffer.view(-1)
        if recorded is not None:
            recorded.__enter__()
        context, scale = self._context(flat, self._loss_scale())
        started = team.start_all_reduce(flat, scale=context.flush_into(flat, scale))
        if recorded is not None:
            recorded.leave()

        def finish() -> None:
            started.finish()
            if recorded is not None:
                recorded.finish()
            self._end([flat])

        return replace(started, finish=finish)

    def average(self) -> None:
        """Average the buffer, kernel by kernel."""
        store, team, flat = self.step.store, self.team, self.buffer.view(-1)
        if self.spans:
            flat = self._without_padding(flat)
        loss_scale = None
        if self.step.scaler is not None or self.unit != 1.0:
            loss_scale = self._loss_scale()
        context, scale = self._context(flat, loss_scale)
        if self.aggregator.adam is not None:
            context = replace(context, steps=self._count_steps(flat))
        results = [flat]
        if self.scatter is not None:
            self.scatter(flat, self.source, scale=scale, context=context)
            results = []  # it reports on its own
        else:
            scale = context.flush_into(flat, scale)
            exact = None if self.exact_sample is None else self._exact(self.exact_sample, flat, scale, loss_scale)
            self.aggregator.all_reduce(flat, team, scale, context)
            if self.exact_sample is not None and exact is not None:
                self.exact_sample.add(exact, flat, self.step.number, self.layout, loss_scale)
            if self.exchanges_norm and store is not None:
                exchange_norm(store, team, flat.device)
        if self.spans:
            self._put_back(flat)
            whole = self.buffer.view(-1)
            results = results and [whole[begin:end] for begin, end in self.spans]  # `flat` ends with the bucket
        self._end(results)
        if self.base is not None:
            flat.sub_(self.base)

    def _context(self, flat: Tensor, loss_scale: Tensor | None) -> tuple[BufferContext, float]:
        """Return the context of the message, and the factor of its sum."""
        store, team = self.step.store, self.team
        scale = 1.0 / team.size if self.scale is None else self.scale
        if store is None:
            context = BufferContext.unremembered(flat.numel())
        else:
            number, rank = self.step.number, team.ranks[team.rank]
            context = context_for(self.aggregator, self.layout, team, store, number, self.number, rank, loss_scale)
        return (
            (context, scale) if self.step.weight is None else self._weighted(flat, context, scale, self.step.weight())
        )

    def _weighted(
        self, flat: Tensor, context: BufferContext, scale: float, weight: float
    ) -> tuple[BufferContext, float]:
        """Let this rank's values count for `weight`: as part of the factor, so that they are rounded once."""
        if weight == 0:  # what a rank without samples has may be NaN, and no factor of a sum is zero
            (flat if self.source is None else self.source).zero_()
        return replace(context, weight=weight), scale * (weight or 1.0)

    def _end(self, results: list[Tensor]) -> None:
        """Let the store know the end of the message. results: where something is not finite if anything is not."""
        if (store := self.step.store) is not None:
            store.transaction.end_bucket(results, last=self.last)
            if self.last and store.transaction.steps == 1:  # DDP's first step has one bucket of everything
                store.scratch.clear()

    def _loss_scale(self) -> Tensor | None:
        """Return the factor between `.grad` and the values here, None for 1. No host sync."""
        device, scaler = self.buffer.device, self.step.scaler
        scale = None if scaler is None else loss_scale_of(scaler, device)
        if self.unit == 1.0:
            return scale
        one = torch.ones((), dtype=torch.float32, device=device) if scale is None else scale
        return one * self.unit

    def _without_padding(self, flat: Tensor) -> Tensor:
        """Return a copy of the elements in `spans`."""
        parts, store = [flat[begin:end] for begin, end in self.spans], self.step.store
        assert store is not None  # of a model of FSDP
        place = store.scratch.take("without padding", self.layout.numel, flat.dtype, flat.device)
        return torch.cat(parts, out=place)

    def _put_back(self, values: Tensor) -> None:
        """Write the elements in `spans` where they came from."""
        flat, sizes = self.buffer.view(-1), [end - begin for begin, end in self.spans]
        for (begin, end), part in zip(self.spans, values.split(sizes), strict=True):
            flat[begin:end].copy_(part)

    def _count_steps(self, flat: Tensor) -> ParameterSteps:
        """Return how many steps Adam has made of each parameter, and count this one if it is committed.

        A parameter rests in a step in which its gradient is exactly zero on all ranks, as torch's AdamW leaves one
        alone whose .grad is None: only DDP knows more, and only once it has all buckets.
        """
        store, layout = self.step.store, self.layout
        assert store is not None
        steps = store.counts.take(layout, flat.device, lambda: committed_steps(store))
        staged = store.transaction.stage_factors(steps.before)
        if not self.exchanges_usage:
            torch.add(steps.before, 1, out=staged)
            return steps
        parts = flat.split([piece.numel for piece in layout.pieces])
        used = torch.stack([part.any() for part in parts]).float()
        self.team.all_reduce(used)
        steps.equal = False
        torch.add(steps.before, (used > 0).double(), out=staged)
        return replace(steps, used=used > 0)

    def _exact(self, exact_sample: ExactSample, flat: Tensor, scale: float, loss_scale: Tensor | None) -> Tensor:
        kept, store = None, self.step.store
        if store is not None and self.aggregator.residual_paths:
            kept = sampled(store, self.layout, flat.device)
        if kept is not None and loss_scale is not None:
            kept *= loss_scale
        return exact_sample.exact(flat, kept, self.team, scale)


def sampled(store: ResidualStore, layout: Layout, device: torch.device) -> Tensor:
    """Return the residuals of the elements of an ExactSample, over all levels; float32, unscaled."""
    stride = sample_stride(layout.numel)
    total = torch.zeros(sample_numel(layout.numel), dtype=torch.float32, device=device)
    for slot in store.residuals():
        if is_average(slot.path) or not slot.layout.shares_names(layout):
            continue
        for here, there, numel in layout.common(slot.layout):
            begin = here + -here % stride
            found = slot.values[there + begin - here : there + numel : stride]
            total[begin // stride :][: len(found)] += found.to(device)
    return total


def loss_scale_of(scaler: Any, device: torch.device) -> Tensor | None:
    """Return what gradients are multiplied by, on `device`; None for 1. No host sync."""
    if not scaler.is_enabled() or scaler._scale is None:
        return None
    scale: Tensor = scaler._scale
    return scale.detach().to(device, torch.float32, non_blocking=True)


# ----------------------------------------------------------------------------------------- sent bytes


@dataclass(eq=False)
class _SentAlike:
    """Messages that are equally long in the same phase of training.

    nbytes: the payload of one at a step, None being past all warm-up; by another aggregator, if one is given.
    phase: of a step.
    steps: those of the latest messages.
    before: the phases of all earlier ones.
    last: the last step in which one was sent.
    times: how many were sent in it.
    """

    nbytes: Callable[[int | None, Aggregator | None], WireBytes]
    phase: Callable[[int], int]
    steps: list[int] = field(default_factory=list)
    before: Counter[int] = field(default_factory=Counter)
    last: int = -1
    times: int = 0


class SentBytes:
    """Counts the payload that this rank sends. Lengths are computed only when somebody asks for the sum."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _SentAlike] = {}

    def count(
        self,
        aggregator: Aggregator,
        layout: Layout,
        dtype: torch.dtype,
        device: torch.device,
        step: int,
        team: TeamShape,
    ) -> None:
        """Count one all_reduce of a buffer."""
        key = id(aggregator), id(layout), id(team), dtype, device  # _of_buffer keeps all three alive
        alike = self._known.get(key)
        if alike is None:
            alike = self._known[key] = _of_buffer(aggregator, layout, dtype, device, team)
        alike.steps.append(step)
        alike.last, alike.times = step, alike.times + 1 if step == alike.last else 1
        if len(alike.steps) == _FOLD_AFTER:
            alike.before.update(map(alike.phase, alike.steps))
            alike.steps = []

    def count_sum(self, numel: int, dtype: torch.dtype, device: torch.device, step: int, team: TeamShape) -> None:
        """Count one plain all_reduce beside those of gradients."""
        self.count(_FLAT, anonymous(numel), dtype, device, step, team)

    def count_calls(
        self, key: Hashable, calls: Callable[[], Sequence[Action]], team: TeamShape, times: int = 1
    ) -> None:
        """Count messages of another kind. calls: describes one, as all with an equal `key`."""
        alike = self._known.get(key)
        if alike is None:

            def nbytes(step: int | None, instead: Aggregator | None) -> WireBytes:
                return sum((each.wire_bytes(team) for each in calls() if isinstance(each, Call)), WireBytes())

            alike = self._known[key] = _SentAlike(nbytes, lambda step: 0)
        alike.before[0] += times

    def wire_bytes(self) -> WireBytes:
        """Return the payload this rank has sent so far."""
        sent = WireBytes()
        for alike in list(self._known.values()):  # a copy: another thread may ask during a step
            phases = alike.before + Counter(map(alike.phase, tuple(alike.steps)))
            for phase, times in phases.items():
                sent += alike.nbytes(phase, None) * times
        return sent

    def usual(self, instead: Aggregator | None = None) -> WireBytes:
        """Return the payload of a step with the last one's buffers, past the dense steps that some begin with.

        instead: averages the buffers in the place of the aggregator that does.
        """
        known = list(self._known.values())
        last = max((alike.last for alike in known), default=-1)
        return sum((alike.nbytes(None, instead) * alike.times for alike in known if alike.last == last), WireBytes())


def _of_buffer(
    aggregator: Aggregator, layout: Layout, dtype: torch.dtype, device: torch.device, team: TeamShape
) -> _SentAlike:
    def nbytes(step: int | None, instead: Aggregator | None) -> WireBytes:
        by = aggregator if instead is None or aggregator is _FLAT else instead
        return by.wire_bytes(layout, dtype, team, device, step)

    return _SentAlike(nbytes, aggregator.phase)


@lru_cache(maxsize=1024)
def anonymous(numel: int) -> Layout:
    """Return the layout of a buffer whose names do not matter."""
    return Layout.anonymous(numel)
