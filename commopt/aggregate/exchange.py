# SPDX-License-Identifier: Apache-2.0
"""One exchange of the low-rank factors of a buffer's matrices: from gradients to messages and back."""

from __future__ import annotations

from functools import cached_property
from zlib import crc32

import torch
from torch import Tensor

from commopt.aggregate.base import mark_non_finite
from commopt.aggregate.matrices import MatrixGroup, MatrixPlan
from commopt.aggregate.residuals import add_rounding_error, unscaled
from commopt.aggregate.sums import Sums
from commopt.aggregate.zero_matrices import MaskedMatrices, count_beside
from commopt.compress import ErrorFeedback
from commopt.feedback import SAMPLE_EVERY_STEPS, BufferContext, Factors, Feedback, Side, Spans
from commopt.kernels import lowrank
from commopt.kernels.finite import all_finite
from commopt.kernels.loader import cpu_kernels
from commopt.kernels.lowrank import MatrixTable
from commopt.kernels.residual import cache_numel

_MOST_ADDED_ALONE = 2  # matrices of a GPU: a launch costs more than another pass over more of them
_WORDS = 4  # uniform numbers that make one that is nearly normal


class Exchange:
    """The matrices of one buffer in one step, stacked by shape in the memory of the next residual.

    All values are float32, unscaled and in units of the average, until they are written back times the loss scale.

    dtype: the dtype to which the values will be rounded in the end.
    """

    def __init__(
        self,
        plan: MatrixPlan,
        matrix_rank: int,
        feedback: Feedback | None,
        buffer: Tensor,
        dtype: torch.dtype,
        scale: float,
        context: BufferContext,
    ) -> None:
        self._plan = plan
        self._matrix_rank = matrix_rank
        self._context = context
        self._buffer = buffer
        self._device = buffer.device
        self._dtype = dtype
        self._scale = scale
        factor = unscaled(scale, context.loss_scale)
        self._factor = float(factor) if self._device.type == "cpu" else factor  # a device waits for no host
        self._rounds = dtype.itemsize < torch.float32.itemsize
        self._one_residual = self._rounds or plan.splits  # of the matrices and of the dense elements
        self._dense_residual: ErrorFeedback | None = None
        self._residual: ErrorFeedback | None = None
        self._mask: MaskedMatrices | None = None
        self._take_residual(feedback)
        if feedback is not None and not self._one_residual and plan.dense_spans:
            self._dense_residual = context.flush(plan.dense, self._device)

    def _take_residual(self, feedback: Feedback | None) -> None:
        """Get the residual, and memory for the matrices."""
        plan = self._plan
        layout = plan.everything if self._one_residual else plan.stacked
        self._residual = self._context.error_feedback("worker", layout, feedback, self._device)
        if self._residual is not None:
            self._stacked = self._residual.new
        else:
            self._stacked = self._context.scratch.take("matrices", plan.stacked.numel, torch.float32, self._device)

    def run(self, sums: Sums) -> None:
        """P = orth(sum of M Q), then Q = sum of M^T P and the update P Q^T, where Q starts from the last step's."""
        plan, context = self._plan, self._context
        factors = context.factors(plan.stacked, self._matrix_rank, plan.heights["right"], self._random)
        numel = plan.rows["left"] * self._matrix_rank
        message = context.scratch.take("message", numel + plan.dense.numel + 1, torch.float32, self._device)
        left, dense = message[:numel].view(-1, self._matrix_rank), message[numel:-1]
        self._fill_dense(dense)
        self._project(factors.rights, left)
        keeps = self._residual is not None
        self._mask = mask = MaskedMatrices.of(plan, self._matrices, sums, context, keeps=keeps)
        if mask is None:
            message = message[:-1]
        else:
            message[-1:] = mask.touched()
            count_beside(numel, plan.dense.numel, sums, context)
        sums.add_up(message, numel, context.scratch)  # any left factors will do, if all have the same
        if mask is not None:
            mask.arrived(message[-1:], sums, context)
        self._orthogonalize("left", left, left, factors)
        shape = (plan.rows["right"], self._matrix_rank)
        right = context.scratch.take("second message", shape, torch.float32, self._device)
        self._refresh(left, right)
        error = sums.add_up(right.view(-1), right.numel(), context.scratch)
        if error is not None:
            self._add_rounding_error(left, error.view_as(right))
        self._put_masked()
        if context.store is not None:
            self._orthogonalize("right", right, context.store.transaction.stage_factors(factors.rights), factors)
        self._write(left, right, dense, sums)

    def _project(self, rights: Tensor, left: Tensor) -> None:
        """Make the matrices M of gradients and residuals, and set `left` to M Q for each."""
        if self._begins_at_once(rights, left):
            return
        together = self._device.type == "cuda"
        if together:
            self._fill(self._plan.groups)
        for group in self._plan.parts(cache_numel(self._device)):
            if not together:
                self._fill((group,))  # a cache still holds what was just written
            lowrank.project(group.stack(self._stacked), group.factors("right", rights), group.factors("left", left))

    def _begins_at_once(self, rights: Tensor, left: Tensor) -> bool:
        """Do it by one kernel for all matrices; return False where that cannot."""
        residual, table = self._residual, self._device_table
        if table is None or (residual is not None and residual.decay != 1.0):
            return False
        old = None if residual is None else residual.old
        return lowrank.begin_all(table, self._buffer, old, self._factor, rights, left, self._stacked)

    @cached_property
    def _device_table(self) -> MatrixTable | None:
        """The matrices for kernels that take all of them at once; None where there are none."""
        kernels = lowrank.kernels_for(self._device, self._matrix_rank)
        return None if kernels is None else self._plan.table_on(self._device)

    def _refresh(self, left: Tensor, right: Tensor) -> None:
        """Set `right` to M^T P for each matrix M, and subtract the product from M: the residual is left."""
        table = self._device_table
        for group in self._plan.parts(cache_numel(self._device)):
            factors = group.factors("left", left), group.factors("right", right)
            lowrank.refresh(group.stack(self._stacked), *factors, subtracts=table is None)
        if table is not None:
            lowrank.multiply_all("subtract", table, left, right, self._stacked)
        self._sample()

    def _matrices(self) -> Tensor:
        """Return the matrices M, stacked; until `_refresh` subtracts from them."""
        return self._stacked[: self._plan.stacked.numel]

    def _put_masked(self) -> None:
        """Put this rank's values of masked elements into the residual."""
        if self._mask is not None:
            self._mask.put_into(self._stacked[: self._plan.stacked.numel])

    def _add_rounding_error(self, left: Tensor, error: Tensor) -> None:
        """Add the rounding error of this rank's right factors to the residual."""
        error.neg_()
        for group in self._plan.groups:
            lowrank.subtract(group.stack(self._stacked), group.factors("left", left), group.factors("right", error))

    # ------------------------------------------------------------------------------------- factors

    def _random(self, side: Side) -> Tensor:
        """Return orthonormal factors [rows of all, r] that are random, but the same on every rank and machine."""
        drawn = torch.empty(self._plan.rows[side], self._matrix_rank, dtype=torch.float32, device="cpu")
        for piece, part in zip(self._plan.stacked.pieces, drawn.split(self._plan.heights[side]), strict=True):
            # Not by name: who registers without a module has no names, and trains alike.
            text = f"{piece.shape} {piece.begin}:{piece.end} {side}"
            generator = torch.Generator().manual_seed(crc32(text.encode()))
            words = torch.randint(1 << 16, (_WORDS, *part.shape), generator=generator, device="cpu")
            torch.sub(words.sum(0), (_WORDS * 0xFFFF) // 2, out=part)  # integers: every machine draws the same
        factors = drawn.to(self._device)
        self._orthogonalize(side, factors, factors, None)
        return factors

    def _orthogonalize(self, side: Side, factors: Tensor, out: Tensor, known: Factors | None) -> None:
        """Set `out` to the orthogonalized factors [rows of all, r] of one side; all matrices of a height at once.

        known: has the initial factors that are their noise; None for no noise.
        """
        if not factors.numel():
            return None  # a bucket, or a rank's share of one, without matrices
        if lowrank.kernels_for(self._device, self._matrix_rank) is not None:
            return self._orthogonalize_padded(side, factors, out, known)
        initial = None if known is None else _noise(side, factors, known.initial[side])
        cpu = cpu_kernels() if self._device.type == "cpu" else None
        if cpu is not None:
            return lowrank.orthogonalize_rows(cpu, factors, initial, out, self._plan.height_table[side])
        by_height = self._plan.by_height[side]
        stacks = self._by_height(factors, by_height)
        found = [torch.empty_like(stack) for stack in stacks]
        lowrank.orthogonalize_each(stacks, found, None if initial is None else self._by_height(initial, by_height))
        for (_, spans), stack in zip(by_height, found, strict=True):
            parts = stack.view(-1, self._matrix_rank).split([last - first for first, last in spans])
            for (first, last), part in zip(spans, parts, strict=True):
                out[first:last] = part

    def _orthogonalize_padded(self, side: Side, factors: Tensor, out: Tensor, known: Factors | None) -> None:
        """Do so with four kernels for matrices of similar heights."""
        padded = self._plan.padded[side]
        slots, initial = padded.slots(self._device), None
        shape = (padded.rows, self._matrix_rank)
        stacked = self._context.scratch.take("padded factors", shape, torch.float32, self._device).zero_()
        stacked.index_copy_(0, slots, factors)
        if known is not None:
            if side not in known.padded:
                known.padded[side] = padded.noise(known.initial[side])
            initial = _noise(side, stacked, known.padded[side])
        for first, count, height in padded.stacks:
            part = slice(first, first + count * height)
            stack = stacked[part].view(count, height, -1)
            begin = None if initial is None else initial[part].view_as(stack)
            lowrank.orthogonalize(stack, stack, begin)
        torch.index_select(stacked, 0, slots, out=out)

    def _by_height(self, factors: Tensor, by_height: tuple[tuple[int, Spans], ...]) -> list[Tensor]:
        """Return factors [rows of all, r] as stacks [count, height, r]."""
        return [
            torch.cat([factors[first:last] for first, last in spans]).view(-1, height, self._matrix_rank)
            for height, spans in by_height
        ]

    # ------------------------------------------------------------------------------------- sending

    def _fill_dense(self, target: Tensor) -> None:
        """Put the dense elements into their part of a message, with their residual."""
        residual, first = self._dense_residual, 0
        if self._residual is not None and self._one_residual:
            residual, first = self._residual, self._plan.stacked.numel
            self._stacked[first:].zero_()
        if self._plan.dense_spans:
            parts = [self._buffer[begin:end] for begin, end in self._plan.dense_spans]
            self._add(parts[0] if len(parts) == 1 else torch.cat(parts), residual, first, target)

    def _fill(self, groups: tuple[MatrixGroup, ...]) -> None:
        """Make matrices of gradients and residuals: many of them where they have been put one after the other."""
        ranges = [each for group in groups for each in group.ranges]
        values = [self._buffer[matrix.begin : matrix.end] for matrix, _, _ in ranges]
        if len(ranges) > _MOST_ADDED_ALONE and self._device.type == "cuda" and self._buffer.dtype == torch.float32:
            first, last = ranges[0][1], ranges[-1][2]
            stacked = torch.cat(values, out=self._stacked[first:last])
            return self._add(stacked, self._residual, first, stacked)
        for part, (_, first, last) in zip(values, ranges, strict=True):
            self._add(part, self._residual, first, self._stacked[first:last])

    def _add(self, values: Tensor, residual: ErrorFeedback | None, first: int, out: Tensor) -> None:
        """Set `out` to the unscaled `values` plus the old residual from element `first` on: in one pass if possible."""
        if residual is None:
            out.copy_(values).mul_(self._factor)
            return
        old = residual.old[first : first + out.numel()]
        if residual.decay != 1.0 or values.dtype != torch.float32:
            out.copy_(values).mul_(self._factor).add_(old, alpha=residual.decay)
        elif isinstance(self._factor, Tensor):
            torch.addcmul(old, values, self._factor, out=out)
        else:
            torch.add(old, values, alpha=self._factor, out=out)

    def _sample(self) -> None:
        """Let the context measure the error of the first matrix."""
        if self._residual is None or not self._plan.groups or self._context.step % SAMPLE_EVERY_STEPS:
            return
        matrix = self._plan.matrices[0]
        first = self._residual.cut(0, matrix.rows * matrix.cols)
        self._context.sample(self._buffer[matrix.begin : matrix.end], self._scale, first)

    # ----------------------------------------------------------------------------------- receiving

    def _write(self, left: Tensor, right: Tensor, dense: Tensor, sums: Sums) -> None:
        """Put the products of the factors, and the dense elements, into the buffer, and report whether all is finite.

        The right factors and the dense elements are changed.
        """
        if self._context.loss_scale is not None:
            right.mul_(self._context.loss_scale)
            dense.mul_(self._context.loss_scale)
        finite = all_finite(right)
        if self._plan.dense_spans:
            finite = finite & all_finite(dense)
        self._decode(left, right, finite, sums)
        self._keep_rounding(self._plan.stacked.numel, dense, sums)
        if self._plan.dense_spans:
            targets = [self._buffer[begin:end] for begin, end in self._plan.dense_spans]
            torch._foreach_copy_(targets, list(dense.split([len(target) for target in targets])))
        if self._rounds:  # the cast may overflow what was finite
            finite = finite & all_finite(self._buffer, self._dtype)
        mark_non_finite(self._buffer, finite)
        self._context.report(finite)

    def _decode(self, left: Tensor, right: Tensor, finite: Tensor, sums: Sums) -> None:
        """Put the products of the factors into the buffer."""
        direct = self._buffer.dtype == torch.float32
        table = self._device_table
        at_once = table is not None and lowrank.multiply_all("decode", table, left, right, self._buffer)
        if at_once and self._mask is None and not self._rounds:
            return
        for group in self._plan.groups:
            lefts, rights = group.factors("left", left), group.factors("right", right)
            for number, (matrix, first, last) in enumerate(group.ranges):
                target = values = self._buffer[matrix.begin : matrix.end]
                if not direct:
                    values = self._context.scratch.take("decoded", last - first, torch.float32, self._device)
                if not at_once:
                    one = slice(number, number + 1)
                    lowrank.decode(lefts[one], rights[one], values.view(1, group.rows, group.cols))
                if self._mask is not None:
                    self._mask.clear(values, first)
                self._keep_rounding(first, values, sums)
                if not direct:
                    target.copy_(values)

    def _keep_rounding(self, offset: int, values: Tensor, sums: Sums) -> None:
        """Add the rounding error of this rank's share of `values`, elements from `offset` on, to the residual."""
        if not self._rounds or self._residual is None:
            return
        numel = self._plan.layout.numel
        begin, end = (max(rank * numel // sums.size - offset, 0) for rank in (sums.rank, sums.rank + 1))
        exact = values[begin:end]
        residual = self._stacked[offset + begin : offset + begin + exact.numel()]
        add_rounding_error(residual, exact, self._dtype, self._context.loss_scale)


def _noise(side: Side, factors: Tensor, initial: Tensor) -> Tensor:
    """Return the noise of factors [rows, r], in the unit of the initial ones.

    Left factors get none in rows of zeros: what is zero on all ranks would move. Right factors have some in all of
    their rows, so that no row of a matrix is multiplied to zero.
    """
    return initial * factors.any(1, keepdim=True) if side == "left" else initial
