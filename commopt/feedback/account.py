"""What an aggregator may know and remember about the one buffer it is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from commopt.compress import Dice, ErrorFeedback, Momentum, Velocity
from commopt.feedback.config import Feedback
from commopt.feedback.factors import Factors, FactorStore, Make
from commopt.feedback.layout import Layout
from commopt.feedback.ledger import Kind, Ledger, momentum_path
from commopt.feedback.scratch import Scratch
from commopt.kernels.residual import advance

_SAMPLE_EVERY_STEPS = 8
_SAMPLE_NUMEL = 16384


@dataclass(frozen=True)
class Account:
    """A buffer's layout, the step it belongs to, and the ledger with its residuals (None: nothing is remembered).

    number: tells the buffers of one step apart. rank: global. path: the level of the aggregator that asks.
    loss_scale: what the gradients were multiplied by, 0-d float32 on their device; None for 1.
    result_dtype: what the buffer's values will be rounded to in the end, None for its own dtype.
    replicas: how many teams do the same with the same values, as nodes that each gather the sum inside.
    chunk: 0 for a whole buffer; the chunks of one that is cut count from 1.
    """

    layout: Layout
    step: int = 0
    number: int = 0
    rank: int = 0
    ledger: Ledger | None = None
    loss_scale: Tensor | None = None
    path: str = ""
    result_dtype: torch.dtype | None = None
    replicas: int = 1
    chunk: int = 0

    @classmethod
    def unremembered(cls, numel: int, step: int = 0, rank: int = 0) -> Account:
        """Describe a tensor that belongs to no model; `step` makes the dice fall anew."""
        return cls(Layout.anonymous(numel), step, rank=rank)

    def within(self, level: str, layout: Layout, result_dtype: torch.dtype | None = None, replicas: int = 1) -> Account:
        """Return the account of a part of the buffer at a level below."""
        path = f"{self.path}.{level}" if self.path else level
        return replace(self, layout=layout, path=path, result_dtype=result_dtype, replicas=replicas)

    def of_chunk(self, number: int, layout: Layout) -> Account:
        """Return the account of chunk `number` of the buffer, from 1 on; two may be in use at once, by two threads."""
        return replace(self, layout=layout, chunk=number)

    @property
    def scratch(self) -> Scratch:
        """Where to take buffers from."""
        if self.ledger is None:
            return Scratch()
        return self.ledger.scratch.half(self.chunk) if self.chunk else self.ledger.scratch

    def dice(self, kind: Kind, place: int) -> Dice:
        """Return the dice for one encoding: others for each buffer, chunk, step, level, kind and rank.

        An owner's depend on its `place` in the team only: owners of the same sum in other teams must throw the same.
        """
        rank = self.rank if kind == "worker" else place
        what = f"{self.path} {kind} {self.chunk}" if self.chunk else f"{self.path} {kind}"
        return Dice(crc32(what.encode()) | rank << 32, self.step, self.number)

    def leftover(self, layout: Layout, device: torch.device) -> ErrorFeedback | None:
        """Return what was left out of earlier, inexact encodings of `layout`, if anything was."""
        slot = None if self.ledger is None else self.ledger.leftover(self.path, layout, device)
        if self.ledger is None or slot is None:
            return None
        return ErrorFeedback(slot.values, self.ledger.stage(slot, self.chunk, self.rank), self.loss_scale)

    def carry(
        self,
        kind: Kind,
        layout: Layout,
        feedback: Feedback | None,
        device: torch.device,
        momentum: Momentum | None = None,
        whole: Layout | None = None,
    ) -> ErrorFeedback | None:
        """Return the residual that goes into an encoding of `layout` and the place for the one that comes out.

        A worker's with a `momentum` has velocities too. An owner's `layout` is its part of `whole`.
        """
        if self.ledger is None or feedback is None:
            return None
        slot = self.ledger.slot(self.path, kind, layout, device, feedback.dtype, whole or layout)
        old, new = slot.values.float(), self.ledger.stage(slot, self.chunk, self.rank)
        if kind == "worker":
            velocity = self.velocity(layout, feedback, device, momentum)
            return ErrorFeedback(old, new, self.loss_scale, feedback.decay, velocity)
        # Each replica of an owner keeps its part, so that the sum over ranks counts what is missing once. Decay is
        # for what grows old while it waits; a sum is sent to all at once.
        return ErrorFeedback(old, new, self._scale_of_replicas(device))

    def velocity(
        self, layout: Layout, feedback: Feedback | None, device: torch.device, momentum: Momentum | None
    ) -> Velocity | None:
        """Return the velocity of what this rank sends of `layout`, and the place for the next one."""
        if self.ledger is None or feedback is None or momentum is None:
            return None
        slot = self.ledger.slot(momentum_path(self.path), "worker", layout, device, feedback.dtype, layout)
        return Velocity(slot.values.float(), self.ledger.stage(slot, self.chunk, self.rank), momentum)

    def retire_owners(self) -> None:
        """Let what an owner kept of the buffer join what this rank sends: sums are not encoded any more."""
        if self.ledger is not None:
            self.ledger.dissolve(self.path, self.layout, "owner")

    def factors(self, layout: Layout, matrix_rank: int, shapes: tuple[tuple[int, int], ...], make: Make) -> Factors:
        """Return what the last step left of the factors of the matrices in `layout`; see FactorStore.take."""
        store = FactorStore() if self.ledger is None else self.ledger.factors
        return store.take(self.path, layout, matrix_rank, shapes, make)

    def stage_factors(self, factors: Tensor) -> Tensor | None:
        """Return where to write the next values of `factors`, None where nothing is remembered."""
        return None if self.ledger is None else self.ledger.stage_factors(factors)

    def _scale_of_replicas(self, device: torch.device) -> Tensor | None:
        if self.replicas == 1:
            return self.loss_scale
        if self.loss_scale is None:
            return torch.full((), self.replicas, dtype=torch.float32, device=device)
        return self.loss_scale * self.replicas

    def report(self, finite: Tensor) -> None:
        """Tell whether a part of the result is finite (bool, 0-d): else nothing staged is committed."""
        if self.ledger is not None:
            self.ledger.report(finite)

    def sample(self, values: Tensor, scale: float, carry: ErrorFeedback) -> None:
        """Measure now and then, on some of the elements, how much an encoding left out."""
        if self.ledger is None or self.step % _SAMPLE_EVERY_STEPS or self.chunk > 1:  # later ones in no fixed order
            return
        unscale = scale if self.loss_scale is None else scale / self.loss_scale
        gradient = values[:_SAMPLE_NUMEL].float() * unscale
        if carry.velocity is not None:
            old = carry.velocity.old[:_SAMPLE_NUMEL]
            at_hand = Velocity(old, torch.empty_like(old), carry.velocity.momentum)
            advance(gradient.clone(), 1.0, at_hand, None, gradient)
        sent = gradient + carry.decay * carry.old[:_SAMPLE_NUMEL]
        self.ledger.error.add(carry.new[:_SAMPLE_NUMEL], sent)
