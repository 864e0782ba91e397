# SPDX-License-Identifier: Apache-2.0
"""The one buffer that an aggregator is given: its layout, its step and its residuals. And the option `Feedback`."""

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
from commopt.feedback.residual import Residual, ResidualKind
from commopt.feedback.scratch import Scratch
from commopt.feedback.store import BufferMemory, ResidualStore
from commopt.groups import apply_scale
from commopt.kernels.residual import round_with_residual

SAMPLE_EVERY_STEPS = 32
SAMPLE_NUMEL = 16384


@dataclass(frozen=True, repr=False)
class Feedback(ConciseRepr):
    """Add the residual of the last encoding to each gradient (Karimireddy et al., arXiv 1901.09847).

    decay: the share of the old residual that is added, in (0, 1]; below 1 some of the gradient is dropped on purpose.
    dtype: how residuals are stored: torch.float32, or torch.bfloat16 with stochastic rounding for half the memory.
    """

    decay: float = 1.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        decay = self.decay
        if not isinstance(decay, (int, float)) or isinstance(decay, bool) or not 0 < decay <= 1:
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

    number: tells the buffers of one step apart.
    rank: global.
    loss_scale: the factor that the gradients were multiplied by, 0-d float32 on their device; None for 1.
    path: the level of the aggregator that asks.
    result_dtype: the dtype that the buffer's values will be rounded to in the end, None for its own dtype.
    share: the part of all ranks whose gradients were added up into this buffer; None where it is this one alone.
    memory: the residuals that earlier steps have found for the buffer.
    scratch: where to take memory from.
    steps: the number of Adam's steps of the parameters of the whole buffer; None where nobody counts them.
    weight: what each rank that was added up into this buffer counts for, 1 for as much as the mean of all.
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
    memory: BufferMemory = field(default_factory=BufferMemory)
    scratch: Scratch = field(default_factory=Scratch)
    steps: ParameterSteps | None = None
    weight: float = 1.0

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

    def rng_key(self, kind: ResidualKind) -> RngKey:
        """Return the key of one encoding's random bits: another for each buffer, step, level, kind and rank."""
        return RngKey(crc32(f"{self.path} {kind}".encode()) | self.rank << 32, self.step, self.number)

    # ---------------------------------------------------------------------------------- residuals

    def error_feedback(
        self,
        kind: ResidualKind,
        layout: Layout,
        feedback: Feedback | None,
        device: torch.device,
        whole: Layout | None = None,
    ) -> ErrorFeedback | None:
        """Return the residual that goes into an encoding of `layout`, and memory for the one that comes out.

        A server's `layout` is its part of `whole`.
        """
        if self.store is None or feedback is None:
            return None
        residual = self.memory.found.get((self.path, kind, layout))
        if residual is None:
            residual = self.residual(kind, layout, feedback, device, whole)
        old, new = self.store.transaction.stage(residual, self.rank)
        if kind == "worker":
            return ErrorFeedback(old, new, self.loss_scale, feedback.decay)
        # Decay is for residuals that grow old before they are sent; a sum is sent to all at once.
        return ErrorFeedback(old, new, self.loss_scale)

    def residual(
        self, kind: ResidualKind, layout: Layout, feedback: Feedback, device: torch.device, whole: Layout | None = None
    ) -> Residual:
        """Return the residual itself. There must be a store, and a caller that writes the values must lock it."""
        assert self.store is not None
        residual = self.store.residual(self.path, kind, layout, device, feedback.dtype, whole or layout)
        self.memory.found[self.path, kind, layout] = residual
        return residual

    def moment(self, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the buffer's average `name` (EXP_AVG, ANCHOR), float32, and memory for the next one."""
        assert self.store is not None
        path = f"{self.path}.{name}".lstrip(".")
        average = self.memory.found.get((path, "worker", self.layout))
        if average is None:
            average = self.store.residual(path, "worker", self.layout, device, torch.float32, self.layout)
            self.memory.found[path, "worker", self.layout] = average
        return self.store.transaction.stage(average, self.rank)

    def has_residual(self, layout: Layout) -> bool:
        """Return whether there is a residual for elements of `layout` that a step may have to look for."""
        return self.store is not None and not self.memory.complete and self.store.has(self.path, layout)

    def flush(self, layout: Layout, device: torch.device) -> ErrorFeedback | None:
        """Return the residual of earlier, inexact encodings of `layout`, if there is one: to be sent exactly, once."""
        if self.store is None or not self.has_residual(layout):
            return None
        residual = self.store.residual(self.path, "worker", layout, device, torch.float32, layout)
        residual.flushing = True
        self.memory.found[self.path, "flush", layout] = residual
        return ErrorFeedback(*self.store.transaction.stage(residual, self.rank), self.loss_scale)

    def flush_into(self, buffer: Tensor, scale: float) -> float:
        """Scale `buffer` and add its residuals, where its aggregator keeps none itself; return the remaining scale.

        They are gone once this is committed. Nothing is communicated: the residuals, and hence whether anything is
        added, differ from rank to rank.
        """
        residual = None if self.memory.paths else self.flush(self.layout, buffer.device)
        if residual is None:
            return scale
        scale_and_add(buffer, buffer, scale, residual)
        return 1.0

    def factors(self, layout: Layout, matrix_rank: int, columns: tuple[int, ...], make: Make) -> Factors:
        """Return the last step's factors of the matrices in `layout`; see FactorStore.take."""
        store = FactorStore() if self.store is None else self.store.factors
        return store.take(self.path, layout, matrix_rank, columns, make)

    # ------------------------------------------------------------------------------------- results

    def report(self, finite: Tensor) -> None:
        """Report whether a part of the result is finite (bool, 0-d): if not, nothing staged is committed."""
        if self.store is not None:
            self.store.transaction.flags.append(finite)

    def sample(self, values: Tensor, scale: float, residual: ErrorFeedback) -> None:
        """Measure the error of an encoding on some of the elements; for every SAMPLE_EVERY_STEPS-th step."""
        if self.store is None:
            return
        gradient, old = values[:SAMPLE_NUMEL].float(), residual.old[:SAMPLE_NUMEL]
        if residual.decay != 1.0:
            old = old * residual.decay
        if self.loss_scale is None:
            sent = torch.add(old, gradient, alpha=scale)
        else:
            sent = torch.addcmul(old, gradient, scale / self.loss_scale)
        self.store.error.add(residual.new[:SAMPLE_NUMEL], sent)


def scale_and_add(values: Tensor, target: Tensor, scale: float, residual: ErrorFeedback | None) -> None:
    """Set `target` to `scale * values` plus the old residual, rounded once; the new residual is the rounding error.

    `target` may be `values`, which are overwritten where that saves memory.
    """
    if residual is None:
        apply_scale(values, scale)
        if target is not values:
            target.copy_(values)
    elif target.dtype == torch.float64:
        old = residual.old if residual.loss_scale is None else residual.old * residual.loss_scale
        target.copy_(apply_scale(values, scale)).add_(old, alpha=residual.decay)
        residual.new.zero_()
    else:
        round_with_residual(values, target, scale, residual)
