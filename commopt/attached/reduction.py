# SPDX-License-Identifier: Apache-2.0
"""The lane's work for one buffer, `Reduction`, and the count of what it sends, `Traffic`; of whatever model."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Flat, committed_steps, context_for, exchange_norm
from commopt.feedback import ExactSample, Layout, ParameterSteps, ResidualStore, is_average, sample_numel, sample_stride
from commopt.groups import Team, TeamShape, WireBytes
from commopt.recording import MessageRecorder as Recorded
from commopt.recording import running

_FLAT = Flat()
_FOLD_AFTER = 64


@dataclass(frozen=True)
class Step:
    """What the messages of one step have in common.

    scaler: the torch.amp.GradScaler that multiplied its loss, or None. buffers: what was sent in it so far, in order.
    skips: whether parameters without a gradient on any rank may be among the others.
    """

    number: int
    store: ResidualStore
    scaler: Any
    buffers: list[Layout] = field(default_factory=list)
    skips: bool = False


@dataclass(eq=False, slots=True)
class Reduction:
    """The lane's work for one buffer, contiguous and of any shape: it becomes `scale` times its sum over `team`.

    number: of the buffer in its step. last: whether none follows, and the step's residuals may be committed. shadow:
    compares the result with the exact one. scale: None for the average.
    """

    buffer: Tensor
    layout: Layout
    number: int
    last: bool
    step: Step
    aggregator: Aggregator
    team: Team
    shadow: ExactSample | None = None
    recorded: Recorded | None = None
    scale: float | None = None

    def __str__(self) -> str:
        return f"bucket {self.number} by {self.aggregator}"

    @property
    def exchanges_norm(self) -> bool:
        """Whether it ends with a number of float64 that all ranks add up, as Adam(clip_norm=...) needs."""
        return self.last and (adam := self.aggregator.adam) is not None and adam.clip_norm is not None

    @property
    def asks_who_is_used(self) -> bool:
        """Whether it begins with a float32 for each parameter that all ranks add up, as Adam needs where some rest."""
        return self.step.skips and self.aggregator.adam is not None

    def __call__(self) -> None:
        """Do it."""
        store, team, flat = self.step.store, self.team, self.buffer.view(-1)
        with nullcontext() if self.recorded is None else running(self.recorded):
            if self.number == 0:
                store.transaction.begin_step()
                store.transaction.finite = None
            scaler, loss_scale = self.step.scaler, None
            if scaler is not None:
                loss_scale = loss_scale_of(scaler, self.buffer.device)
            number, rank = self.step.number, team.ranks[team.rank]
            context = context_for(self.aggregator, self.layout, team, store, number, self.number, rank, loss_scale)
            if self.aggregator.adam is not None:
                context = replace(context, steps=self._count_steps(flat))
            scale = context.flush_into(flat, 1.0 / team.size if self.scale is None else self.scale)
            exact = None if self.shadow is None else self._exact(self.shadow, flat, scale, loss_scale)
            self.aggregator.all_reduce(flat, team, scale, context)
            if self.shadow is not None and exact is not None:
                self.shadow.add(exact, flat, number, self.layout, loss_scale)
            if self.exchanges_norm:
                exchange_norm(store, team, flat.device)
            store.transaction.end_bucket([flat], last=self.last)

    def _count_steps(self, flat: Tensor) -> ParameterSteps:
        """Return how many steps Adam has made of each parameter, and count this one if it is committed.

        A parameter rests in a step in which its gradient is exactly zero on all ranks, as torch's AdamW leaves one
        alone whose .grad is None: only DDP knows more, and only once it has all buckets.
        """
        store, layout = self.step.store, self.layout
        steps = store.counts.take(layout, flat.device, lambda: committed_steps(store))
        staged = store.transaction.stage_factors(steps.before)
        if not self.asks_who_is_used:
            torch.add(steps.before, 1, out=staged)
            return steps
        parts = flat.split([piece.numel for piece in layout.pieces])
        used = torch.stack([part.any() for part in parts]).float()
        self.team.all_reduce(used)
        steps.equal = False
        torch.add(steps.before, (used > 0).double(), out=staged)
        return replace(steps, used=used > 0)

    def _exact(self, shadow: ExactSample, flat: Tensor, scale: float, loss_scale: Tensor | None) -> Tensor:
        kept = sampled(self.step.store, self.layout, flat.device) if self.aggregator.residual_paths else None
        if kept is not None and loss_scale is not None:
            kept *= loss_scale
        return shadow.exact(flat, kept, self.team, scale)


def sampled(store: ResidualStore, layout: Layout, device: torch.device) -> Tensor:
    """Return what is kept for those elements of a buffer of an ExactSample, over all levels; float32, unscaled."""
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


# ----------------------------------------------------------------------------------------- what was sent


@dataclass(eq=False)
class _Kind:
    """All that tells how long a buffer's messages are, and the steps it was sent in; `before` by their phases.

    last, times: the last of them, and how often it was sent there.
    """

    aggregator: Aggregator
    layout: Layout
    dtype: torch.dtype
    device: torch.device
    steps: list[int] = field(default_factory=list)
    before: Counter[int] = field(default_factory=Counter)
    last: int = -1
    times: int = 0

    def note(self, step: int) -> None:
        """Take note of one more time."""
        self.steps.append(step)
        self.last, self.times = step, self.times + 1 if step == self.last else 1


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
        kind.note(step)
        if len(kind.steps) == _FOLD_AFTER:
            kind.before.update(aggregator.phase(step) for step in kind.steps)
            kind.steps = []

    def count_exact(self, numel: int, dtype: torch.dtype, device: torch.device, step: int) -> None:
        """Note one plain all_reduce beside the gradients'."""
        self.count(_FLAT, anonymous(numel), dtype, device, step)

    def wire_bytes(self, team: TeamShape) -> WireBytes:
        """Return the payload this rank has sent so far."""
        sent = WireBytes()
        for kind in list(self._kinds.values()):  # a copy: another thread may ask during a step
            phases = kind.before + Counter(kind.aggregator.phase(step) for step in tuple(kind.steps))
            for phase, times in phases.items():
                sent += kind.aggregator.wire_bytes(kind.layout, kind.dtype, team, kind.device, phase) * times
        return sent

    def usual(self, team: TeamShape, instead: Aggregator | None = None) -> WireBytes:
        """Return the payload of a step with the last one's buffers, past the dense steps that some begin with.

        instead: what would average them in the place of what does.
        """
        kinds = list(self._kinds.values())
        last = max((kind.last for kind in kinds), default=-1)
        sent = WireBytes()
        for kind in (each for each in kinds if each.last == last):
            by = kind.aggregator if instead is None or kind.aggregator is _FLAT else instead
            sent += by.wire_bytes(kind.layout, kind.dtype, team, kind.device) * kind.times
        return sent


@lru_cache(maxsize=1024)
def anonymous(numel: int) -> Layout:
    """Return the layout of a buffer whose names do not matter."""
    return Layout.anonymous(numel)
