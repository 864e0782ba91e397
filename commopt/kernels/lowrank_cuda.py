"""Launch the CUDA kernels of low-rank factors."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from commopt.kernels.factor import NOISE, RIDGE
from commopt.kernels.loader import Loader

_THREADS = 256
_SLICE_ROWS = 256  # of a factor, in shared memory
_TILE_ROWS, _TILE_COLS = 64, 128  # of a product


def orthogonalize(loader: Loader, factors: Tensor, out: Tensor, initial: Tensor | None) -> None:
    """Queue what `reference.orthogonalize` does, up to roundings, on the current stream.

    There may be MAX_KERNEL_RANK columns at most. Equal input gives equal bits: the order of every sum is fixed.
    """
    count, rows, matrix_rank = factors.shape
    if factors.numel() == 0:
        return
    slices = -(-rows // _SLICE_ROWS)
    largest = torch.empty(count, slices, dtype=torch.int32, device=factors.device)
    first, second = factors.new_empty(2, count, slices, matrix_rank, matrix_rank).unbind()

    noise = (0 if initial is None else initial.data_ptr(), NOISE * sqrt(rows))
    with torch.cuda.device(factors.device):
        where = (count * slices, _THREADS, torch.cuda.current_stream().cuda_stream)
        read, written = ((each.data_ptr(), rows, matrix_rank) for each in (factors, out))
        loader.launch("factor_absmax", *where, (*read, largest.data_ptr()))
        prepared = (*read, largest.data_ptr(), slices, *noise, out.data_ptr(), first.data_ptr())
        loader.launch("factor_gram", *where, prepared)
        for grams, new_grams in ((first.data_ptr(), second.data_ptr()), (second.data_ptr(), 0)):
            solved = (*written, grams, slices, RIDGE / matrix_rank, new_grams)
            loader.launch("factor_solve", *where, solved)


def decode(loader: Loader, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Queue what `reference.decode` does on the current stream."""
    _multiply(loader, "lowrank_decode", left, right, out)


def subtract(loader: Loader, matrices: Tensor, left: Tensor, right: Tensor) -> None:
    """Queue what `reference.subtract` does on the current stream."""
    _multiply(loader, "lowrank_subtract", left, right, matrices)


def _multiply(loader: Loader, kernel: str, left: Tensor, right: Tensor, matrices: Tensor) -> None:
    count, rows, cols = matrices.shape
    if matrices.numel() == 0:
        return
    arguments = (left.data_ptr(), right.data_ptr(), rows, cols, left.shape[2], matrices.data_ptr())
    with torch.cuda.device(matrices.device):
        stream = torch.cuda.current_stream().cuda_stream
        grid = count * -(-rows // _TILE_ROWS) * -(-cols // _TILE_COLS)
        loader.launch(kernel, grid, _THREADS, stream, arguments)
