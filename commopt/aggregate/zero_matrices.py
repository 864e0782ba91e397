# SPDX-License-Identifier: Apache-2.0
"""Elements of PowerSGD's matrices that were exactly zero on all ranks so far stay exactly zero.

A product of factors is zero in whole rows and columns only, and factors keep those zero by themselves. Single elements
are masked, as in zeros; they have no sign bit, so ranks exchange them anew once some are touched. With error feedback
the values may wait for that in residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate.matrices import MatrixPlan
from commopt.aggregate.sums import Sums
from commopt.feedback import BufferContext

LOOK_EVERY_STEPS = 8
"""On a GPU ranks with residuals look only so often for newly touched elements, since the host waits for the answer."""

_MOST_PATIENCE = 64  # steps from one exchange of the touched elements to the next


@dataclass(eq=False)
class _MatrixMask:
    """The masked elements of the stacked matrices, and when ranks may exchange them again.

    indices: of elements, int32 where that suffices, ascending.
    patience: the steps to wait after the next exchange.
    next_step: the first one of the next exchange.
    asks_host: whether that waits for none of them, and the host looks in every step: no residual keeps what is touched.
    """

    indices: Tensor
    plan: MatrixPlan
    patience: int = 1
    next_step: int = 0
    asks_host: bool = False

    def state(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return what a checkpoint keeps of it: not when ranks exchange next, in which they must be alike."""
        return {"elements": copy(self.indices)}

    def keep(self, still: Tensor) -> None:
        """Leave out the others. still: bool [indices]."""
        self.indices = self.indices[still]
        self.__dict__.pop("by_matrix", None)

    @cached_property
    def by_matrix(self) -> dict[int, slice]:
        """Which of the indices are of each matrix, by its first element."""
        ranges = [(first, last) for group in self.plan.groups for _, first, last in group.ranges]
        bounds = torch.tensor(ranges, dtype=self.indices.dtype, device=self.indices.device)
        found = torch.searchsorted(self.indices, bounds).tolist()
        return {first: slice(*each) for (first, _), each in zip(ranges, found, strict=True)}

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensor, which is another one after an exchange."""
        return (self.indices,)

    @property
    def empty(self) -> bool:
        """Whether there are none."""
        return not len(self.indices)

    @property
    def nbytes(self) -> int:
        """Bytes of the indices."""
        return self.indices.nbytes


class MaskedMatrices:
    """The masked elements of a buffer's matrices in one step.

    The number of newly touched elements travels beside the first message; when it arrives, or in a later step, ranks
    exchange which they are.

    matrices: all of them, stacked, with their residuals; as they are until `arrived`.
    """

    def __init__(self, mask: _MatrixMask, plan: MatrixPlan, matrices: Tensor) -> None:
        self._mask = mask
        self._plan = plan
        self._matrices: Tensor | None = matrices
        self._indices = mask.indices.long()
        self._values = matrices[self._indices]

    @classmethod
    def of(
        cls, plan: MatrixPlan, matrices: Callable[[], Tensor], sums: Sums, context: BufferContext, *, keeps: bool
    ) -> MaskedMatrices | None:
        """Return the masked elements; None for none, and without a store. Collective the first time.

        keeps: whether their values stay in a residual.
        """
        store = context.store
        if store is None or not plan.groups:
            return None
        mask = store.untouched.get((context.path, plan.stacked))
        if mask is not None:
            return None if mask.empty else cls(mask, plan, matrices())
        stacked, known = matrices(), store.touched_before.pop((context.path, plan.stacked), None)
        known = None if known is None else known.to(stacked.device, stacked.dtype)
        masked = _masked_elements(plan, stacked if known is None else known, sums, context)
        dtype = torch.int32 if len(masked) < 2**31 else torch.int64
        mask = _MatrixMask(masked.nonzero().view(-1).to(dtype), plan, asks_host=not keeps)
        store.untouched[context.path, plan.stacked] = mask
        return None if mask.empty else cls(mask, plan, stacked)

    def touched(self) -> Tensor:
        """Return how many are touched here for the first time, for the first message: float32 [1]."""
        return self._values.ne(0).sum(dtype=torch.float32).view(1)

    def arrived(self, touched: Tensor, sums: Sums, context: BufferContext) -> None:
        """Exchange the touched elements if there are any, on any rank; not in every step. Collective, alike on all."""
        mask, matrices = self._mask, self._matrices
        assert matrices is not None  # called once
        self._matrices = None
        if context.step < mask.next_step and not mask.asks_host:
            return
        waits = context.step % LOOK_EVERY_STEPS > 0 and not mask.asks_host
        if touched.is_cuda and (waits or torch.cuda.is_current_stream_capturing()):
            return  # the host waits for the answer
        if float(touched):
            still = _masked_elements(self._plan, matrices, sums, context)[self._indices]
            self._indices, self._values = self._indices[still], self._values[still]
            mask.keep(still)
            mask.next_step = context.step + mask.patience
            mask.patience = min(2 * mask.patience, _MOST_PATIENCE)

    def put_into(self, residual: Tensor) -> None:
        """Put this rank's values of the masked elements into `residual`, of the stacked matrices."""
        residual[self._indices] = self._values

    def clear(self, values: Tensor, first: int) -> None:
        """Set the masked elements among `values`, which begin at element `first` of the stacked matrices, to zero."""
        values.index_fill_(0, self._indices[self._mask.by_matrix[first]] - first, 0.0)


def _masked_elements(plan: MatrixPlan, matrices: Tensor, sums: Sums, context: BufferContext) -> Tensor:
    """Return which elements are zero on all ranks in rows and columns that are not. Collective."""
    touched = torch.ne(matrices, 0, out=torch.empty_like(matrices))
    if context.store is not None:
        context.store.beside += sums.wire_bytes(0, touched.nbytes)
    sums.add_up(touched, 0, context.scratch)
    masked = touched == 0
    for group in plan.groups:
        stack = group.stack(masked)
        stack &= ~stack.all(1, keepdim=True) & ~stack.all(2, keepdim=True)
    return masked


def count_beside(factors: int, others: int, sums: Sums, context: BufferContext) -> None:
    """Count the bytes of the number beside a first message of so many elements of factors, and of others."""
    if context.store is not None:
        with_it, without = (sums.wire_bytes(factors, 4 * (others + more)) for more in (1, 0))
        context.store.beside += with_it - without
