# SPDX-License-Identifier: Apache-2.0
"""Sparse rows: the largest elements of each chunk to a payload row, and back, and the sum of rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from commopt.kernels import loader
from commopt.kernels.codec import (
    DTYPES,
    ROW_ALIGNMENT,
    ErrorFeedback,
    address,
    check_residual,
    check_rows,
    check_total,
    check_values,
    residual_arguments,
)
from commopt.kernels.cpu import sparse_kernels
from commopt.kernels.finite import all_finite
from commopt.kernels.loader import Arguments, Loader

_THREADS = 256
_TILE_NUMEL = 4096
_SUM_NUMEL = 8192  # in shared memory at a time when rows are decoded
_GROUP_TILES = 8  # one for each warp of a CUDA block
_CANDIDATES_WORDS = 386  # of a tile: 256 values, 256 indices of 16 bits, how many there are, and from which key on
_BINS = 2048
_LEVELS = 3  # of a key's bits: 11, 11 and 9
_THRESHOLD_WORDS = 4
_COUNT_WORDS = 2

BLOCK = 65536
"""Elements whose index within their block fits into 16 bits."""


@dataclass(frozen=True)
class SparseRow:
    """A row of payload with the `count` largest of `chunk_numel` elements.

    Elements count as larger by the bits of |x| as an integer, which puts NaN above inf above all numbers; among equals
    the one of the lowest index comes first. Elements past the end of the values are zeros at the highest indices.

    Bytes: `ends`, int32 [blocks], the number of entries in blocks 0..b of 65536 elements; the entries' indices within
    their block, uint16 [count], ascending by element; their values, `value_dtype` [count]; zeros. Each part begins at
    a multiple of 4 bytes, and a row is a multiple of 16 long. When any of the chosen elements is not finite, the first
    entry's value is NaN.
    """

    chunk_numel: int
    count: int
    value_dtype: torch.dtype

    @classmethod
    def of(cls, chunk_numel: int, density: float, value_dtype: torch.dtype, least: int = 1) -> SparseRow:
        """Return the row that holds the share `density` of its chunk, rounded up, or `least` elements, or all."""
        return cls(chunk_numel, min(chunk_numel, max(least, ceil(density * chunk_numel))), value_dtype)

    @property
    def blocks(self) -> int:
        """Number of blocks of the chunk."""
        return -(-self.chunk_numel // BLOCK)

    @property
    def indices_begin(self) -> int:
        """Byte at which the indices begin."""
        return 4 * self.blocks

    @property
    def values_begin(self) -> int:
        """Byte at which the values begin."""
        return self.indices_begin + -(-2 * self.count // 4) * 4

    @property
    def values_end(self) -> int:
        """Byte behind the last value."""
        return self.values_begin + self.count * self.value_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return -(-self.values_end // ROW_ALIGNMENT) * ROW_ALIGNMENT


def select(row: SparseRow, values: Tensor, payload: Tensor, scale: float, residual: ErrorFeedback | None) -> None:
    """Put the `row.count` largest elements of p into each row of `payload`, exactly as SparseRow says.

    values: 1-D, floating; chunk i of `row.chunk_numel` elements goes into row i. payload: uint8 [rows, row.nbytes].
    Every operation below is one float32 operation, rounded by itself (no fused multiply-add); products of the scalars
    come first. S is the loss scale (1 without one), v the residual, decay its factor:

        g = float32(values) * float32(scale)
        without a residual                      p = g
        with a residual                         p = g + (S decay) v_old

    Of the chosen elements value_dtype(p) is sent. The new residual:

        v_new = (p - sent) (1/S)                sent = 0 where p is not among the chosen

    No CUDA implementation waits for the device. Raises ConfigurationError (shapes, strides, devices) and
    UnsupportedTensorError (dtypes).
    """
    check_rows(payload, row.chunk_numel, row.nbytes)
    check_values(values, payload, row.chunk_numel)
    check_residual(residual, values.numel(), payload)
    if cpu := sparse_kernels(payload.device, values.dtype, row.value_dtype):
        source = (values.data_ptr(), DTYPES[values.dtype], values.numel(), float(scale))
        cpu.sparse_select(*source, *_rows(row, payload), *residual_arguments(residual), loader.cpu_threads())
        return
    kernels = loader.loader_for(payload.device, values.dtype)
    if kernels is None:
        from commopt.kernels import sparse_reference as reference

        reference.select(row, values, payload, scale, residual)
    elif payload.shape[0] * row.chunk_numel:
        _select(kernels, row, values, payload, scale, residual)


def scatter(row: SparseRow, payload: Tensor, values: Tensor) -> None:
    """Decode the rows of `payload` into `values` (1-D, any floating dtype, at most rows * chunk_numel).

    Entries past the end of `values` are zeros, and dropped.
    """
    check_rows(payload, row.chunk_numel, row.nbytes)
    check_values(values, payload, row.chunk_numel)
    if cpu := sparse_kernels(payload.device, values.dtype, row.value_dtype):
        cpu.sparse_scatter(*_rows(row, payload), values.data_ptr(), DTYPES[values.dtype], values.numel())
        return
    kernels = loader.loader_for(payload.device, values.dtype)
    if kernels is None:
        from commopt.kernels import sparse_reference as reference

        return reference.scatter(row, payload, values)
    _decode(kernels, row, payload, -(-values.numel() // max(row.chunk_numel, 1)), 1, values)


def accumulate(row: SparseRow, payloads: Tensor, total: Tensor) -> None:
    """Set `total` (float32 [chunk_numel]) to the sum of the rows: zeros, to which they are added one after the other.

    No index occurs twice in a row, so every bit is determined.
    """
    check_rows(payloads, row.chunk_numel, row.nbytes)
    check_values(total, payloads, row.chunk_numel)
    check_total(total)
    if cpu := sparse_kernels(payloads.device, row.value_dtype):
        cpu.sparse_sum(*_rows(row, payloads), total.data_ptr())
        return
    kernels = loader.loader_for(payloads.device, total.dtype)
    if kernels is None:
        from commopt.kernels import sparse_reference as reference

        return reference.accumulate(row, payloads, total)
    _decode(kernels, row, payloads, min(total.numel(), 1), payloads.shape[0], total)


def finite(row: SparseRow, payload: Tensor) -> Tensor:
    """Return whether all entries of all rows are finite: bool, 0-d."""
    check_rows(payload, row.chunk_numel, row.nbytes)
    return all_finite(payload[:, row.values_begin : row.values_end].view(row.value_dtype))


def _rows(row: SparseRow, payload: Tensor) -> tuple[int, ...]:
    """Return the description of rows that the CPU's kernels take."""
    shape = (payload.shape[0], row.chunk_numel, row.count)
    return payload.data_ptr(), payload.stride(0), *shape, DTYPES[row.value_dtype]


def _select(
    kernels: Loader, row: SparseRow, values: Tensor, payload: Tensor, scale: float, residual: ErrorFeedback | None
) -> None:
    """Queue the kernels of a selection on the current stream."""
    rows = payload.shape[0]
    tiles = -(-row.chunk_numel // _TILE_NUMEL)
    p = torch.empty(values.numel(), dtype=torch.float32, device=values.device) if residual is None else residual.new
    bins = torch.zeros(_LEVELS, rows, _BINS, dtype=torch.int32, device=values.device)
    thresholds = torch.empty(rows, _THRESHOLD_WORDS, dtype=torch.int32, device=values.device)
    candidates = torch.empty(rows, tiles, _CANDIDATES_WORDS, dtype=torch.int32, device=values.device)
    counts = torch.empty(rows, tiles, _COUNT_WORDS, dtype=torch.int32, device=values.device)

    found = thresholds.data_ptr()
    seen = (p.data_ptr(), values.numel(), row.chunk_numel, found, candidates.data_ptr())
    target = (payload.data_ptr(), payload.stride(0), row.count, DTYPES[row.value_dtype])
    groups = rows * -(-tiles // _GROUP_TILES)
    kept = (p.data_ptr(), bins[0].data_ptr(), candidates.data_ptr())
    accumulated = (*_accumulated(values, scale, row, residual), *kept)
    for kernel, grid, arguments in (
        ("sparse_accumulate", rows * tiles, accumulated),
        ("sparse_threshold", rows, (bins[0].data_ptr(), 0, row.count, found)),
        ("sparse_collect", groups, (*seen, bins[1].data_ptr())),
        ("sparse_threshold", rows, (bins[1].data_ptr(), 1, row.count, found)),
        ("sparse_histogram", groups, (*seen, bins[2].data_ptr())),
        ("sparse_threshold", rows, (bins[2].data_ptr(), 2, row.count, found)),
        ("sparse_count", groups, (*seen, counts.data_ptr())),
        ("sparse_offsets", rows, (counts.data_ptr(), row.chunk_numel, found, *target)),
        ("sparse_write", groups, (*seen, counts.data_ptr(), *target, *_new_residual(residual))),
    ):
        kernels.queue(values.device, kernel, grid, _THREADS, arguments)


def _decode(kernels: Loader, row: SparseRow, payload: Tensor, rows: int, peers: int, values: Tensor) -> None:
    arguments = (
        payload.data_ptr(),
        payload.stride(0),
        row.chunk_numel,
        row.count,
        DTYPES[row.value_dtype],
        peers,
        values.data_ptr(),
        DTYPES[values.dtype],
        values.numel(),
    )
    kernels.queue(values.device, "sparse_decode", rows * -(-row.chunk_numel // _SUM_NUMEL), _THREADS, arguments)


def _accumulated(values: Tensor, scale: float, row: SparseRow, residual: ErrorFeedback | None) -> Arguments:
    """Return the arguments of the kernel that adds p up."""
    source = (values.data_ptr(), DTYPES[values.dtype], values.numel(), float(scale), row.chunk_numel)
    if residual is None:
        return (*source, 0, 1.0, 0)
    return (*source, residual.old.data_ptr(), float(residual.decay), address(residual.loss_scale))


def _new_residual(residual: ErrorFeedback | None) -> Arguments:
    """Return whether p becomes the new residual, and the loss scale to divide it by."""
    return (0, 0) if residual is None else (1, address(residual.loss_scale))
