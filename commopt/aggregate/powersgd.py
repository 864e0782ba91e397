# SPDX-License-Identifier: Apache-2.0
"""PowerSGD (Vogels et al., arXiv 1905.13727): matrices travel as products of two factors with few columns.

A gradient M [rows, cols] is multiplied by a factor Q [cols, r]. The sum of that over the ranks, made orthonormal, is P;
the sum of M^T P is the new Q, and every rank takes P Q^T for the average. A rank keeps the rest of its own M as the
residual of the next step. The next step starts from this Q: repeated, that is a power iteration, which makes the
factors good. `powersgd_reference.py` has one step in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from commopt.aggregate.base import Action, Aggregator, Buffer, WorkKind, mark_non_finite, work
from commopt.aggregate.matrices import RankRule, beyond_rank, divide, matrix_plan
from commopt.aggregate.sums import LinearAggregator, Sums
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
from commopt.groups import TeamShape
from commopt.kernels.finite import all_finite

_NBYTES = torch.float32.itemsize


@dataclass(frozen=True, repr=False)
class PowerSGD(LinearAggregator):
    """Exchange low-rank factors of the matrices in a buffer; everything else travels dense, in the first message.

    Between two to four nodes over gloo factors travel as bfloat16, and the residual takes the rounding error.

    A parameter of two dimensions or more is a matrix; (out, in, height, width) becomes (out, in * height * width) or
    whatever split of the shape has the fewest rows and columns together. Standalone tensors have no shapes here:
    they are averaged exactly.

    Zeros that all ranks share stay zero: whole rows and columns, and single elements of others (docs/feedback.md).

    matrix_rank: r, the columns of a factor; 1 to 4 for vision, 4 to 32 for transformers.
    min_compression_rate: matrices that would shrink by less travel dense.
    start_step: the first step to compress; everything travels dense before. Advised: 10 % of all steps, and no less
        than the learning rate takes to warm up.
    feedback: how the residual of the product is kept for the next step; None drops it, which is for experiments.
    dense: patterns of parameter names that travel uncompressed ("*.bias").
    """

    matrix_rank: int = 4
    min_compression_rate: float = 2
    start_step: int = 2
    feedback: Feedback | None = Feedback()
    dense: tuple[str, ...] = ()

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

    def sum_up(self, buffer: Tensor, sums: Sums, scale: float, context: BufferContext) -> None:
        """Exchange factors, or everything as it is; one rank alone sends nothing, but adds its residual."""
        if buffer.numel() == 0:
            return
        dtype = context.result_dtype or buffer.dtype
        if sums.size == 1:
            residual = None if self.feedback is None else context.flush(context.layout, buffer.device)
            scale_and_add(buffer, buffer, scale, residual)
        elif self._as_it_is(context.layout, dtype, context.step):
            self._sum_as_it_is(buffer, dtype, sums, scale, context)
        else:
            from commopt.aggregate.exchange import Exchange  # few need them
            from commopt.aggregate.exchange_in_place import InPlace

            plan = matrix_plan(context.layout, self._rule)
            kind = InPlace if InPlace.suits(plan, buffer, dtype, self.feedback, context) else Exchange
            kind(plan, self.matrix_rank, self.feedback, buffer, dtype, scale, context).run(sums)

    def _sum_as_it_is(
        self, buffer: Tensor, dtype: torch.dtype, sums: Sums, scale: float, context: BufferContext
    ) -> None:
        """Average as Flat does, in the dtype of the result, with the residual added."""
        values = buffer
        if buffer.dtype != dtype:
            values = context.scratch.take("rounded", buffer.numel(), dtype, buffer.device)
        scale_and_add(buffer, values, scale, self._residual(dtype, context, buffer.device))
        sums.add_up(values, 0, context.scratch)
        buffer.copy_(values)
        if context.store is not None:
            finite = all_finite(values)
            mark_non_finite(buffer, finite)
            context.report(finite)

    def _residual(self, dtype: torch.dtype, context: BufferContext, device: torch.device) -> ErrorFeedback | None:
        """Return the residual of a buffer that is not compressed now: sent once, or rounded to `dtype` again."""
        if self.feedback is None or not context.has_residual(context.layout):
            return None
        if dtype.itemsize < torch.float32.itemsize:
            return context.error_feedback("worker", context.layout, self.feedback, device)
        return context.flush(context.layout, device)

    # -------------------------------------------------------------------------------------- facts

    def sum_calls(self, buffer: Buffer, sums: Sums) -> tuple[Action, ...]:
        """Return a sum of all values; or a sum of left factors and dense elements, and one of right factors."""
        if buffer.nbytes == 0 or sums.size == 1:
            return ()
        if self._as_it_is(buffer.layout, buffer.dtype, buffer.step):
            return sums.calls(0, buffer.nbytes, buffer.device)
        plan = matrix_plan(buffer.layout, self._rule)
        what, numel = f"PowerSGD({self.matrix_rank})", plan.stacked.numel
        left, right = (plan.rows[side] * self.matrix_rank for side in ("left", "right"))
        first = sums.calls(left, _NBYTES * plan.dense.numel, buffer.device)
        second = sums.calls(right, 0, buffer.device)
        return work("factor", what, numel), *first, work("refresh", what, numel), *second

    def check_capture(self, step: int, team: TeamShape) -> None:
        """Refuse residuals that are rounded at random."""
        super().check_capture(step, team)
        require_repeatable(str(self), self.feedback)

    def divide(self, layout: Layout, dtype: torch.dtype, parts: int) -> tuple[Spans, ...] | None:
        """Return whole matrices, or blocks of rows."""
        return divide(layout, self._rule, parts) if matrix_plan(layout, self._rule).groups else None

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """Its own level: even without feedback it needs the names and shapes of parameters."""
        return ("",)

    def with_dense(self, patterns: Sequence[str]) -> PowerSGD:
        """Return the same with more patterns in `dense`."""
        return replace(self, dense=(*self.dense, *patterns))

    @classmethod
    def candidates(cls) -> Candidates[Aggregator]:
        """Return ranks 16 to 1; the error of rank 4 is the usual limit."""
        return Candidates("powersgd", tuple(cls(matrix_rank) for matrix_rank in (16, 8, 4, 2, 1)), usual=2)

    def squared_error(self, layout: Layout, buffer: Tensor) -> float:
        """Return the error of the best approximation by `matrix_rank`, which warm factors come near to."""
        return sum(
            beyond_rank(buffer[matrix.begin : matrix.end].view(matrix.rows, matrix.cols), self.matrix_rank)
            for matrix in matrix_plan(layout, self._rule).matrices
        )

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return the passes over the matrices; the factors themselves are small.

        They are filled with gradients and residuals (three passes), read for the product, the product is subtracted
        (two) and the result written. Ten kernels, four of them for orthonormal columns. A second message reads the
        matrices once more, for another product and its orthonormal columns.
        """
        what = f"PowerSGD({self.matrix_rank})"
        return {("factor", what): KernelCost(7 * _NBYTES, 10), ("refresh", what): KernelCost(_NBYTES, 5)}

    @property
    def _rule(self) -> RankRule:
        return RankRule(self.matrix_rank, self.min_compression_rate, self.dense)

    def _as_it_is(self, layout: Layout, dtype: torch.dtype, step: int | None) -> bool:
        """Return whether a buffer travels dense and in its own dtype.

        With feedback the parameters of a 16-bit buffer do not, even without a matrix among them: the residual takes the
        rounding error of their average. A tensor that belongs to no model has no name.
        """
        if step is not None and step < self.start_step:
            return True
        if matrix_plan(layout, self._rule).groups:
            return False
        keeps_rounding = self.feedback is not None and dtype.itemsize < _NBYTES
        return not keeps_rounding or layout.names == {""}
