# SPDX-License-Identifier: Apache-2.0
"""PowerSGD (Vogels et al., arXiv 1905.13727): matrices travel as products of two factors with few columns.

A gradient M [rows, cols] is multiplied by a factor Q [cols, r]. The sum of that over the ranks, made orthonormal, is P;
the sum of M^T P is the new Q, and everybody takes P Q^T for the average. What that leaves out of a rank's own M stays
there for the next step, and the next step starts from this Q, which is what makes it good: repeated, it is a power
iteration. `powersgd_reference.py` has one step in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator, Buffer, Step, WorkKind, mark_non_finite, work
from commopt.aggregate.matrices import Rule, beyond_rank, divide, plan
from commopt.aggregate.sums import add_up, calls_of_sum
from commopt.compress import Candidates, ErrorFeedback, KernelCost
from commopt.errors import ConfigurationError
from commopt.feedback import (
    BufferContext,
    Feedback,
    Layout,
    Spans,
    checked_patterns,
    require_feedback,
    require_repeatable,
    scale_and_add,
)
from commopt.groups import Team, TeamShape

_NBYTES = torch.float32.itemsize


@dataclass(frozen=True, repr=False)
class PowerSGD(Aggregator):
    """Exchange low-rank factors of the matrices in a buffer; everything else travels dense, in the first message.

    Between two to four nodes over gloo factors travel as bfloat16, and the residual takes what that loses.

    A parameter of two dimensions or more is a matrix; (out, in, height, width) becomes (out, in * height * width) or
    whatever split of the shape has the fewest rows and columns together. Standalone tensors have no shapes here:
    they are averaged exactly.

    What is zero on all ranks stays zero in whole rows and columns, and in single elements of others (docs/feedback.md).

    matrix_rank: r, the columns of a factor; 1 to 4 for vision, 4 to 32 for transformers.
    min_compression_rate: matrices that would shrink by less travel dense.
    start_step: the first step to compress; everything travels dense before. Advised: 10 % of all steps, and no less
        than the learning rate takes to warm up.
    feedback: how what the product leaves out is kept for the next step; None forgets it, which is for experiments.
    dense: patterns of parameter names that travel uncompressed ("*.bias").
    """

    matrix_rank: int = 4
    min_compression_rate: float = 2
    start_step: int = 2
    feedback: Feedback | None = Feedback()
    dense: tuple[str, ...] = ()

    linear = True

    def __post_init__(self) -> None:
        for name, least in (("matrix_rank", 1), ("start_step", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"PowerSGD({name}={value!r}) must be a whole number, {least} or more")
        rate = self.min_compression_rate
        if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 1 <= rate < float("inf"):
            raise ConfigurationError(
                f"PowerSGD(min_compression_rate={rate!r}) must be a number from 1 on; at 1 everything that shrinks at "
                f"all is compressed"
            )
        require_feedback("PowerSGD", self.feedback)
        object.__setattr__(self, "dense", checked_patterns("PowerSGD", self.dense))

    # --------------------------------------------------------------------------------- all_reduce

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Exchange factors, or everything as it is; one rank alone sends nothing, but applies what was kept before."""
        if buffer.numel() == 0:
            return
        dtype = context.result_dtype or buffer.dtype
        if team.size == 1:
            kept = None if self.feedback is None else context.flush(context.layout, buffer.device)
            scale_and_add(buffer, buffer, scale, kept)
        elif self._as_it_is(context.layout, dtype, context.step):
            self._reduce_as_it_is(buffer, dtype, team, scale, context)
        else:
            from commopt.aggregate.exchange import Exchange  # few need them
            from commopt.aggregate.exchange_in_place import InPlace

            found = plan(context.layout, self._rule)
            kind = InPlace if InPlace.suits(found, buffer, dtype, self.feedback, context) else Exchange
            kind(found, self.matrix_rank, self.feedback, buffer, dtype, scale, context).run(team)

    def _reduce_as_it_is(
        self, buffer: Tensor, dtype: torch.dtype, team: Team, scale: float, context: BufferContext
    ) -> None:
        """Do as Flat does, in the dtype of the result, but send along what is kept from before."""
        work = buffer
        if buffer.dtype != dtype:
            work = context.scratch.take("rounded", buffer.numel(), dtype, buffer.device)
        scale_and_add(buffer, work, scale, self._leftover(dtype, context, buffer.device))
        add_up(work, 0, team, context.scratch)
        buffer.copy_(work)
        if context.store is not None:
            finite = work.isfinite().all()
            mark_non_finite(buffer, finite)
            context.report(finite)

    def _leftover(self, dtype: torch.dtype, context: BufferContext, device: torch.device) -> ErrorFeedback | None:
        """Return what is kept of a buffer that is not compressed now: sent once, or rounded to `dtype` again."""
        if self.feedback is None or not context.has_residual(context.layout):
            return None
        if dtype.itemsize < torch.float32.itemsize:
            return context.error_feedback("worker", context.layout, self.feedback, device)
        return context.flush(context.layout, device)

    # -------------------------------------------------------------------------------------- facts

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Step, ...]:
        """Return a sum of all values, or one of left factors and what is dense, and one of right ones."""
        if buffer.nbytes == 0 or team.size == 1:
            return ()
        if self._as_it_is(buffer.layout, buffer.dtype, buffer.step):
            return calls_of_sum(0, buffer.nbytes, team, buffer.device)
        found = plan(buffer.layout, self._rule)
        what, numel = f"PowerSGD({self.matrix_rank})", found.stacked.numel
        left, right = (found.rows[side] * self.matrix_rank for side in ("left", "right"))
        first = calls_of_sum(left, _NBYTES * found.dense.numel, team, buffer.device)
        second = calls_of_sum(right, 0, team, buffer.device)
        return work("factor", what, numel), *first, work("refresh", what, numel), *second

    def check_capture(self, step: int, team: TeamShape) -> None:
        """Refuse residuals that are rounded at random."""
        super().check_capture(step, team)
        require_repeatable(str(self), self.feedback)

    def divide(self, layout: Layout, dtype: torch.dtype, parts: int) -> tuple[Spans, ...] | None:
        """Return whole matrices, or blocks of rows."""
        return divide(layout, self._rule, parts) if plan(layout, self._rule).groups else None

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """One level: even without feedback it has to be told names and shapes."""
        return ("",)

    def with_dense(self, patterns: Sequence[str]) -> PowerSGD:
        """Return the same with more patterns in `dense`."""
        return replace(self, dense=(*self.dense, *patterns))

    @classmethod
    def candidates(cls) -> Candidates[Aggregator]:
        """Return ranks 16 to 1; what rank 4 leaves out is the usual limit."""
        return Candidates("powersgd", tuple(cls(matrix_rank) for matrix_rank in (16, 8, 4, 2, 1)), usual=2)

    def squared_error(self, layout: Layout, buffer: Tensor) -> float:
        """Return what is beyond the best matrix_rank directions, to which it comes near once factors are warm."""
        return sum(
            beyond_rank(buffer[matrix.begin : matrix.end].view(matrix.rows, matrix.cols), self.matrix_rank)
            for matrix in plan(layout, self._rule).matrices
        )

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return what the matrices take; the factors themselves are small.

        They are filled with gradients and residuals (three passes), read for the product, what travels is subtracted
        (two) and the result written. Ten kernels, four of them for orthonormal columns. A second message reads the
        matrices once more, for another product and its orthonormal columns.
        """
        what = f"PowerSGD({self.matrix_rank})"
        return {("factor", what): KernelCost(7 * _NBYTES, 10), ("refresh", what): KernelCost(_NBYTES, 5)}

    @property
    def _rule(self) -> Rule:
        return Rule(self.matrix_rank, self.min_compression_rate, self.dense)

    def _as_it_is(self, layout: Layout, dtype: torch.dtype, step: int | None) -> bool:
        """Return whether a buffer travels dense and in its own dtype.

        With feedback the parameters of a 16-bit buffer do not, even without a matrix among them: what rounding takes
        from their average is kept. A tensor that belongs to no model has no name.
        """
        if step is not None and step < self.start_step:
            return True
        if plan(layout, self._rule).groups:
            return False
        keeps_rounding = self.feedback is not None and dtype.itemsize < _NBYTES
        return not keeps_rounding or layout.names == {""}
