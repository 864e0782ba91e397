# SPDX-License-Identifier: Apache-2.0
"""Sparse rows in plain torch: the contents of a row, and the largest elements without sorting them all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from commopt.kernels.codec import ErrorFeedback
from commopt.kernels.residual import ScaledResidual, cache_numel, scale_into
from commopt.kernels.sparse import BLOCK, SparseRow


@torch.no_grad()
def select(row: SparseRow, values: Tensor, payload: Tensor, scale: float, residual: ErrorFeedback | None) -> None:
    """Put the largest elements of p into each row of `payload`, without any check; see kernels.sparse."""
    p = torch.empty(values.numel(), dtype=torch.float32, device=values.device) if residual is None else residual.new
    _add_up(values, scale, p, residual)
    for begin, entries in _entries_of_rows(row, payload):
        chunk = p[begin : begin + row.chunk_numel]
        chosen = top(chunk, min(row.count, chunk.numel()))
        sent = entries.write(chosen, chunk.index_select(0, chosen))
        if residual is not None:
            chunk.index_add_(0, chosen, sent, alpha=-1)
    if residual is not None:
        ScaledResidual(residual).unscale_new()


@torch.no_grad()
def scatter(row: SparseRow, payload: Tensor, values: Tensor) -> None:
    """Decode the rows of `payload` into `values`, without any check."""
    values.zero_()
    for begin, entries in _entries_of_rows(row, payload):
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
    for _, entries in _entries_of_rows(row, payloads):
        indices, sent = entries.read()
        total.scatter_add_(0, indices, sent.float())


def _add_up(values: Tensor, scale: float, p: Tensor, residual: ErrorFeedback | None) -> None:
    """Set p to `scale * values` (+ the residual)."""
    factor = torch.full((), scale, dtype=torch.float32, device=values.device)
    feedback = None if residual is None else ScaledResidual(residual)
    step = min(cache_numel(values.device), values.numel())
    work = torch.empty(step, dtype=torch.float32, device=values.device)
    for begin in range(0, values.numel(), max(step, 1)):
        part = p[begin : begin + step]
        scale_into(values[begin : begin + step], factor, part)
        if feedback is not None:
            feedback.add_old(begin, part, work[: part.numel()])


class _SparseEntries:
    """The indices and values in one row of payload."""

    def __init__(self, row: SparseRow, payload: Tensor) -> None:
        self._row = row
        self._ends = payload[: row.indices_begin].view(torch.int32)
        self._indices = payload[row.indices_begin : row.indices_begin + 2 * row.count].view(torch.int16)
        self._gap = payload[row.indices_begin + 2 * row.count : row.values_begin]
        self._values = payload[row.values_begin : row.values_end].view(row.value_dtype)
        self._padding = payload[row.values_end :]
        self._blocks = torch.arange(row.blocks, device=payload.device) * BLOCK

    def write(self, indices: Tensor, values: Tensor) -> Tensor:
        """Write the entries, and zeros behind the chunk's end if there are too few; return the values as rounded."""
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


def _entries_of_rows(row: SparseRow, payload: Tensor) -> Iterator[tuple[int, _SparseEntries]]:
    """Iterate over the rows, and over where their chunks begin; there is none of an empty chunk."""
    if row.count:
        for number, part in enumerate(payload):
            yield number * row.chunk_numel, _SparseEntries(row, part)


_SMALLEST_SAMPLE = 4096
_SAMPLED_ONE_IN = 101  # prime, so that no width of a matrix divides it
_MAGNITUDE_MASK = 0x7FFFFFFF  # a float32 without its sign: as an integer it grows with |x|; inf and then NaN on top


def top(p: Tensor, count: int) -> Tensor:
    """Return the indices, ascending int64, of the `count` largest |p| (float32, 1-D, at least as many).

    Equal ones come first where their index is lower. A sample tells above which threshold there are probably a few more
    than `count` elements; the choice among those is exact.
    """
    if count == p.numel():
        return torch.arange(count, device=p.device)
    candidates = p.new_empty(0, dtype=torch.int64)
    for threshold in _thresholds(p, count):
        candidates = _at_least(p, threshold)
        if candidates.numel() >= count:
            return _top_of(p, candidates, count)
    # There are not as many other than zero. The zeros still needed lie among the first `count` elements.
    zeros = (p[:count] == 0).nonzero().view(-1)[: count - candidates.numel()]
    return torch.cat((candidates, zeros)).sort().values


def _magnitudes(p: Tensor) -> Tensor:
    return p.view(torch.int32).bitwise_and(_MAGNITUDE_MASK)


def _thresholds(p: Tensor, count: int) -> Iterator[int]:
    """Yield ever lower thresholds, the last of which is that of the smallest number other than zero."""
    stride = min(max(p.numel() // _SMALLEST_SAMPLE, 1), _SAMPLED_ONE_IN)
    sample = _magnitudes(p[::stride].contiguous())
    expected = -(-count // stride)
    rank = expected if stride == 1 else expected + int(3 * expected**0.5) + 8  # three deviations of a random sample's
    while rank <= sample.numel():
        threshold = int(torch.topk(sample, rank, sorted=False).values.min())
        if threshold <= 1:
            break
        yield threshold
        rank *= 2
    yield 1


def _at_least(p: Tensor, threshold: int) -> Tensor:
    """Return where magnitudes are `threshold` or more, ascending."""
    step = min(cache_numel(p.device), p.numel())
    magnitudes = torch.empty(step, dtype=torch.int32, device=p.device)
    large = torch.empty(step, dtype=torch.bool, device=p.device)
    bits = p.view(torch.int32)
    found = []
    for begin in range(0, p.numel(), step):
        part = bits[begin : begin + step]
        torch.bitwise_and(part, _MAGNITUDE_MASK, out=magnitudes[: part.numel()])
        torch.ge(magnitudes[: part.numel()], threshold, out=large[: part.numel()])
        found.append(large[: part.numel()].nonzero().view(-1).add_(begin))
    return torch.cat(found)


def _top_of(p: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Return those of the ascending indices `candidates` where |p| is among the `count` largest of all of them."""
    magnitudes = _magnitudes(p.index_select(0, candidates))
    smallest = torch.topk(magnitudes, count, sorted=False).values.min()
    above, equal = magnitudes > smallest, magnitudes == smallest
    return candidates[above | (equal & (equal.cumsum(0) <= count - above.sum()))]
