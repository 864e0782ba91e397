# SPDX-License-Identifier: Apache-2.0
"""What an aggregator may know and remember about the one buffer it is given, and how feedback is done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from zlib import crc32

import torch
from torch import Tensor

from commopt.compress import ErrorFeedback, RngKey
from commopt.concise_repr import ConciseRepr
from commopt.errors import ConfigurationError
from commopt.feedback.counts import ParameterSteps
from commopt.feedback.factors import Factors, FactorStore, Make
from commopt.feedback.layout import Layout
from commopt.feedback.store import Kind, Memory, Residual, ResidualStore, Scratch
from commopt.groups import apply_scale
from commopt.kernels.residual import round_with_carry

SAMPLE_EVERY_STEPS = 8
SAMPLE_NUMEL = 16384


@dataclass(frozen=True, repr=False)
class Feedback(ConciseRepr):
    """Add to each gradient what compression left out of the last one (Karimireddy et al., arXiv 1901.09847).

    decay: the share of the old residual that is kept, in (0, 1]; below 1 some of the gradient is lost on purpose.
    dtype: how residuals are stored: torch.float32, or torch.bfloat16 with stochastic rounding for half the memory.
    """

    decay: float = 1.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"Feedback(decay={self.decay!r}) must be above 0 and at most 1; 1 loses nothing")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigurationError(
                f"Feedback(dtype={self.dtype}) cannot hold residuals; use torch.float32 or torch.bfloat16"
            )


def require_feedback(whose: str, feedback: object) -> None:
    """Raise ConfigurationError unless `feedback`, an option of `whose`, is a Feedback or None."""
    if not (feedback is None or isinstance(feedback, Feedback)):
        raise ConfigurationError(f"{whose}(feedback={feedback!r}) must be a Feedback(), or None for none")


def require_repeatable(whose: str, feedback: Feedback | None) -> None:
    """Raise ConfigurationError when residuals are rounded at random, by bits that a CUDA graph would repeat."""
    if feedback is not None and feedback.dtype != torch.float32:
        raise ConfigurationError(
            f"{whose} keeps residuals in {feedback.dtype}, rounded at random, and a CUDA graph would repeat the same "
            f"random bits in every step; use feedback=Feedback(dtype=torch.float32)"
        )


@dataclass(frozen=True)
class BufferContext:
    """A buffer's layout, the step it belongs to, and the store with its residuals (None: nothing is remembered).

    number: tells the buffers of one step apart. rank: global. path: the level of the aggregator that asks.
    loss_scale: what the gradients were multiplied by, 0-d float32 on their device; None for 1.
    result_dtype: what the buffer's values will be rounded to in the end, None for its own dtype.
    share: the part of all ranks whose gradients were added up into this buffer; None where it is this one alone.
    memory: what earlier steps have found for the buffer.
    steps: how many Adam has made of the parameters of the whole buffer; None where nobody counts them.
    """

    layout: Layout
    step: int = 0
    number: int = 0
    rank: int = 0
    store: ResidualStore | None = None
    loss_scale: Tensor | None = None
    path: str = ""
    result_dtype: torch.dtype | None = None
    share: float | None = None
    memory: Memory = field(default_factory=Memory)
    scratch: Scratch = field(default_factory=Scratch)  # where to take buffers from
    steps: ParameterSteps | None = None

    @classmethod
    def unremembered(cls, numel: int, step: int = 0, rank: int = 0) -> BufferContext:
        """Describe a tensor that belongs to no model; each `step` has other random bits."""
        return cls(Layout.anonymous(numel), step, rank=rank)

    def within(
        self, level: str, layout: Layout, result_dtype: torch.dtype | None = None, share: float | None = None
    ) -> BufferContext:
        """Return the context of a part of the buffer at a level below."""
        path = f"{self.path}.{level}" if self.path else level
        return replace(self, layout=layout, path=path, result_dtype=result_dtype, share=share)

    def rng(self, kind: Kind) -> RngKey:
        """Return the key of one encoding's random bits: another for each buffer, step, level, kind and rank."""
        return RngKey(crc32(f"{self.path} {kind}".encode()) | self.rank << 32, self.step, self.number)

    # ---------------------------------------------------------------------------------- residuals

    def carry(
        self,
        kind: Kind,
        layout: Layout,
        feedback: Feedback | None,
        device: torch.device,
        whole: Layout | None = None,
    ) -> ErrorFeedback | None:
        """Return the residual that goes into an encoding of `layout` and the place for the one that comes out.

        A server's `layout` is its part of `whole`.
        """
        if self.store is None or feedback is None:
            return None
        slot = self.memory.found.get((self.path, kind, layout))
        if slot is None:
            slot = self.residual(kind, layout, feedback, device, whole)
        old, new = self.store.stage(slot, self.rank)
        if kind == "worker":
            return ErrorFeedback(old, new, self.loss_scale, feedback.decay)
        # Decay is for what grows old while it waits; a sum is sent to all at once.
        return ErrorFeedback(old, new, self.loss_scale)

    def residual(
        self, kind: Kind, layout: Layout, feedback: Feedback, device: torch.device, whole: Layout | None = None
    ) -> Residual:
        """Return the residual itself, for which there has to be a store; who writes it locks that."""
        assert self.store is not None
        slot = self.store.slot(self.path, kind, layout, device, feedback.dtype, whole or layout)
        self.memory.found[self.path, kind, layout] = slot
        return slot

    def moment(self, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the average kept as `name` (EXP_AVG, ANCHOR) of the buffer, float32, and the next one's place."""
        assert self.store is not None
        path = f"{self.path}.{name}".lstrip(".")
        slot = self.memory.found.get((path, "worker", self.layout))
        if slot is None:
            slot = self.store.slot(path, "worker", self.layout, device, torch.float32, self.layout)
            self.memory.found[path, "worker", self.layout] = slot
        return self.store.stage(slot, self.rank)

    def holds(self, layout: Layout) -> bool:
        """Return whether anything is kept for the elements of `layout`; asked of a settled buffer, whether was."""
        return self.store is not None and not self.memory.settled and self.store.holds(self.path, layout)

    def leftover(self, layout: Layout, device: torch.device) -> ErrorFeedback | None:
        """Return what was left out of earlier, inexact encodings of `layout`, if anything was: to be sent once."""
        if self.store is None or not self.holds(layout):
            return None
        slot = self.store.slot(self.path, "worker", layout, device, torch.float32, layout)
        slot.once = True
        self.memory.found[self.path, "leftover", layout] = slot
        return ErrorFeedback(*self.store.stage(slot, self.rank), self.loss_scale)

    def add_leftover(self, buffer: Tensor, scale: float) -> float:
        """Scale `buffer` and add what others kept of it, where what sends it next keeps no residuals.

        Once, and gone when it is committed. Returns the scale that is left to be applied. Without communication: what
        is held, and hence whether anything is added, differs from rank to rank.
        """
        carry = None if self.memory.paths else self.leftover(self.layout, buffer.device)
        if carry is None:
            return scale
        scale_and_add(buffer, buffer, scale, carry)
        return 1.0

    def factors(self, layout: Layout, matrix_rank: int, columns: tuple[int, ...], make: Make) -> Factors:
        """Return what the last step left of the factors of the matrices in `layout`; see FactorStore.take."""
        store = FactorStore() if self.store is None else self.store.factors
        return store.take(self.path, layout, matrix_rank, columns, make)

    # ------------------------------------------------------------------------------------ verdicts

    def report(self, finite: Tensor) -> None:
        """Tell whether a part of the result is finite (bool, 0-d): else nothing staged is committed."""
        if self.store is not None:
            self.store.flags.append(finite)

    def sample(self, values: Tensor, scale: float, carry: ErrorFeedback) -> None:
        """Measure, on some of the elements, how much an encoding left out; for every SAMPLE_EVERY_STEPS-th step."""
        if self.store is None:
            return
        unscale = scale if self.loss_scale is None else scale / self.loss_scale
        gradient = values[:SAMPLE_NUMEL].float() * unscale
        sent = gradient + carry.decay * carry.old[:SAMPLE_NUMEL]
        self.store.error.add(carry.new[:SAMPLE_NUMEL], sent)


def scale_and_add(values: Tensor, target: Tensor, scale: float, carry: ErrorFeedback | None) -> None:
    """Set `target` to `scale * values` plus what `carry` brings, rounded once; it takes what that leaves out.

    `target` may be `values`, which are overwritten where that saves memory.
    """
    if carry is None:
        apply_scale(values, scale)
        if target is not values:
            target.copy_(values)
    elif target.dtype == torch.float64:
        kept = carry.old if carry.loss_scale is None else carry.old * carry.loss_scale
        target.copy_(apply_scale(values, scale)).add_(kept, alpha=carry.decay)
        carry.new.zero_()
    else:
        round_with_carry(values, target, scale, carry)
