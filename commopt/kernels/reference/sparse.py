"""Sparse rows in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from commopt.kernels.codec import Carry
from commopt.kernels.reference.residual import Residual, piece_numel, scale_into
from commopt.kernels.reference.top import top
from commopt.kernels.reference.velocity import add_velocity
from commopt.kernels.sparse_row import BLOCK, SparseRow


@torch.no_grad()
def select(row: SparseRow, values: Tensor, payload: Tensor, scale: float, carry: Carry | None) -> None:
    """Put the largest elements of p into each row of `payload`, without any check; see kernels.sparse."""
    p = torch.empty(values.numel(), dtype=torch.float32, device=values.device) if carry is None else carry.new
    _add_up(values, scale, p, carry)
    for begin, entries in _rows(row, payload):
        chunk = p[begin : begin + row.chunk_numel]
        chosen = top(chunk, min(row.count, chunk.numel()))
        sent = entries.write(chosen, chunk.index_select(0, chosen))
        if carry is not None:
            chunk.index_add_(0, chosen, sent, alpha=-1)
        if carry is not None and carry.velocity is not None and carry.velocity.momentum.masking:
            carry.velocity.new[begin : begin + row.chunk_numel].index_fill_(0, chosen, 0.0)
    if carry is not None:
        Residual(carry).unscale_new()


@torch.no_grad()
def scatter(row: SparseRow, payload: Tensor, values: Tensor) -> None:
    """Set `values` to what the rows of `payload` stand for, without any check."""
    values.zero_()
    for begin, entries in _rows(row, payload):
        chunk = values[begin : begin + row.chunk_numel]
        indices, sent = entries.read()
        if chunk.numel() < row.chunk_numel:
            real = indices < chunk.numel()
            indices, sent = indices[real], sent[real]
        chunk.index_copy_(0, indices, sent.to(values.dtype))


@torch.no_grad()
def accumulate(row: SparseRow, payloads: Tensor, total: Tensor) -> None:
    """Set `total` (float32 [chunk_numel]) to the sum of the rows, without any check."""
    total.zero_()
    for _, entries in _rows(row, payloads):
        indices, sent = entries.read()
        total.scatter_add_(0, indices, sent.float())


@torch.no_grad()
def finite(row: SparseRow, payload: Tensor) -> Tensor:
    """Return whether all entries of all rows are finite: bool, 0-d."""
    return payload[:, row.values_begin : row.values_end].view(row.value_dtype).isfinite().all()


def _add_up(values: Tensor, scale: float, p: Tensor, carry: Carry | None) -> None:
    """Set p to `scale * values` (+ the carry), and the new velocity."""
    factor = torch.full((), scale, dtype=torch.float32, device=values.device)
    residual = None if carry is None else Residual(carry)
    step = min(piece_numel(values.device), values.numel())
    work = torch.empty(step, dtype=torch.float32, device=values.device)
    for begin in range(0, values.numel(), max(step, 1)):
        part = p[begin : begin + step]
        scale_into(values[begin : begin + step], factor, part)
        if carry is not None and residual is not None:
            if carry.velocity is not None:
                add_velocity(begin, part, carry.velocity, carry.loss_scale)
            residual.add_old(begin, part, work[: part.numel()])


class _Entries:
    """The parts of one row."""

    def __init__(self, row: SparseRow, payload: Tensor) -> None:
        self._row = row
        self._ends = payload[: row.indices_begin].view(torch.int32)
        self._indices = payload[row.indices_begin : row.indices_begin + 2 * row.count].view(torch.int16)
        self._gap = payload[row.indices_begin + 2 * row.count : row.values_begin]
        self._values = payload[row.values_begin : row.values_end].view(row.value_dtype)
        self._padding = payload[row.values_end :]
        self._blocks = torch.arange(row.blocks, device=payload.device) * BLOCK

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        """Write the entries, and zeros behind the chunk's end if there are too few; return what the values became."""
        missing = torch.arange(indices.numel(), self._row.count, device=indices.device)
        every = torch.cat((indices, missing))
        self._ends.copy_(torch.searchsorted(every, self._blocks + BLOCK))
        self._indices.copy_(every)  # the low 16 bits
        rounded = self._values[: indices.numel()].copy_(values)
        rounded[:1].masked_fill_(~values.isfinite().all(), float("nan"))
        for rest in (self._values[indices.numel() :], self._gap, self._padding):
            rest.zero_()
        return rounded.float()

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the indices within the chunk (int64) and the values."""
        counts = self._ends.diff(prepend=self._ends.new_zeros(1))
        block = torch.repeat_interleave(self._blocks, counts, output_size=self._row.count)
        return self._indices.to(torch.int64).bitwise_and_(BLOCK - 1).add_(block), self._values


def _rows(row: SparseRow, payload: Tensor) -> Iterator[tuple[int, _Entries]]:
    """Iterate over the rows, and over where their chunks begin; there is none of an empty chunk."""
    if row.count:
        for number, part in enumerate(payload):
            yield number * row.chunk_numel, _Entries(row, part)
