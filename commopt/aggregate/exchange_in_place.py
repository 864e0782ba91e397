# SPDX-License-Identifier: Apache-2.0
"""An exchange of low-rank factors by a CPU's kernels, with the matrices in the buffer: three passes over memory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate.exchange import Exchange
from commopt.aggregate.matrices import MatrixPlan
from commopt.aggregate.sums import Sums
from commopt.feedback import SAMPLE_EVERY_STEPS, SAMPLE_NUMEL, BufferContext, Feedback
from commopt.kernels.codec import address
from commopt.kernels.loader import cpu_kernels, cpu_threads


class InPlace(Exchange):
    """An exchange whose residual is not staged, but written after both messages.

    By then all ranks must know that the result is finite: see `suits`. Factors and results have the same bits as those
    of an Exchange.
    """

    @classmethod
    def suits(
        cls, plan: MatrixPlan, buffer: Tensor, dtype: torch.dtype, feedback: Feedback | None, context: BufferContext
    ) -> bool:
        """Return whether the buffer can hold the matrices, and its own sums tell whether the residual counts."""
        if not buffer.dtype == dtype == torch.float32 or buffer.device.type != "cpu" or cpu_kernels() is None:
            return False
        if plan.splits or not plan.groups:
            return False
        staged = context.loss_scale is not None or context.share is not None  # a step's, or a node's shards with it
        staged |= context.store is not None and context.store.transaction.per_step
        return not staged and (feedback is None or feedback.dtype == torch.float32)

    def _take_residual(self, feedback: Feedback | None) -> None:
        self._cpu: Any = cpu_kernels()
        self._residual_values: Tensor | None = None
        self._decay = 1.0
        if self._context.store is not None and feedback is not None:
            self._residual_values = self._context.residual("worker", self._plan.stacked, feedback, self._device).values
            self._decay = feedback.decay

    def _project(self, rights: Tensor, left: Tensor) -> None:
        pointers = self._buffer.data_ptr(), address(self._residual_values)
        factors = rights.data_ptr(), left.data_ptr(), self._matrix_rank, cpu_threads()
        self._cpu.lowrank_begin(*pointers, self._factor, self._decay, *self._table, *factors)

    def _refresh(self, left: Tensor, right: Tensor) -> None:
        factors = left.data_ptr(), right.data_ptr(), self._matrix_rank, cpu_threads()
        self._cpu.lowrank_back(self._buffer.data_ptr(), *self._table, *factors)
        self._sent = self._context.scratch.take("sent factors", tuple(right.shape), torch.float32, self._device)
        self._sent.copy_(right)

    def _matrices(self) -> Tensor:
        return torch.cat([self._buffer[matrix.begin : matrix.end] for matrix in self._plan.matrices])

    def _put_masked(self) -> None:
        pass  # there is no residual before `_decode`

    def _add_rounding_error(self, left: Tensor, error: Tensor) -> None:
        self._sent.sub_(error)

    def _decode(self, left: Tensor, right: Tensor, finite: Tensor, sums: Sums) -> None:
        residual = self._residual_values if finite else None
        sampled = None
        if residual is not None and self._context.step % SAMPLE_EVERY_STEPS == 0:
            matrix = self._plan.matrices[0]
            sampled = self._buffer[matrix.begin : matrix.end][:SAMPLE_NUMEL].clone()
        factors = (each.data_ptr() for each in (left, self._sent, right))
        pointers = self._buffer.data_ptr(), address(residual)
        store = self._context.store
        with nullcontext() if store is None else store.lock:
            self._cpu.lowrank_finish(*pointers, *self._table, *factors, self._matrix_rank, cpu_threads())
            if self._mask is not None and residual is not None:
                self._mask.put_into(residual)
        if self._mask is not None:
            for group in self._plan.groups:
                for matrix, first, _ in group.ranges:
                    self._mask.clear(self._buffer[matrix.begin : matrix.end], first)
        if sampled is not None and residual is not None and store is not None:
            store.error.add(residual[: len(sampled)], sampled)

    @property
    def _table(self) -> tuple[int, int]:
        return self._plan.table.data_ptr(), len(self._plan.table)
