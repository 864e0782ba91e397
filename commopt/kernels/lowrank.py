# SPDX-License-Identifier: Apache-2.0
"""Low-rank factors of stacked matrices: orthogonalize them, multiply them into and out of the matrices.

Everything is float32 and contiguous. A stack of matrices is [count, rows, cols]; a factor is [count, rows, r] (left)
or [count, cols, r] (right): the P or Q of PowerSGD (arXiv 1905.13727), with r columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.kernels import loader
from commopt.kernels.codec import address
from commopt.kernels.loader import Loader

RIDGE = 100 * torch.finfo(torch.float32).eps
"""Added to the diagonal of a Gram matrix, as a share of the mean there; roundings can take away no more."""

NOISE = 1e-6
"""Standard deviation of the noise added to a factor whose largest element is 1: no direction may ever vanish."""

MAX_KERNEL_RANK = 32
"""The most columns that a CUDA kernel takes; the reference takes any number."""

_THREADS = 256
_SLICE_ROWS = 256  # of a factor, in shared memory
_TILE_ROWS, _TILE_COLS = 64, 128  # of a product
_FEW_COLUMNS = 4  # of a factor that a matrix is multiplied with by a kernel; BLAS is as fast with more
_PROJECT_THREADS, _PROJECT_ROWS = 128, 8


def orthogonalize(factors: Tensor, out: Tensor | None = None, initial: Tensor | None = None) -> Tensor:
    """Return factors [count, rows, r] with (nearly) orthonormal columns that span the same space.

    By Cholesky-QR: on a CPU once, in float64 with exact sums; on a GPU twice, in float32 with a ridge. No singular
    value of the result exceeds 1 + 1e-5, whatever the scale; directions far smaller than the others end below 1;
    all-zero gives zero. Equal input gives equal bits, whatever the number of threads and, between CPUs, the machine:
    replicas that do it for themselves stay alike. A NaN or an infinity gives NaN in that matrix. Nothing waits for the
    device.

    initial: orthonormal factors of the same shape that save a direction from vanishing: times NOISE * sqrt(rows)
        they are added to the divided matrices, and where a matrix is all zero they replace it.
    out: where to write, which may be `factors` itself; None allocates.
    """
    out = torch.empty_like(factors) if out is None else out
    orthogonalize_each([factors], [out], None if initial is None else [initial])
    return out


def orthogonalize_each(factors: Sequence[Tensor], outs: Sequence[Tensor], initial: Sequence[Tensor] | None) -> None:
    """Orthogonalize several stacks, each of another height, of one r and on one device."""
    work = []
    for stack, out, begin in zip(factors, outs, [None] * len(factors) if initial is None else initial, strict=True):
        known = stack if begin is None else begin
        _check(factors=stack, out=out, initial=known)
        _check_shape("out", out, tuple(stack.shape))
        _check_shape("initial", known, tuple(stack.shape))
        if stack.numel():
            work.append((stack, out, begin))
    if not work:
        return
    device, matrix_rank = work[0][0].device, work[0][0].shape[2]
    kernels = kernels_for(device, matrix_rank)
    cpu = _cpu(device)
    if kernels is None and cpu is None:
        from commopt.kernels import lowrank_reference as reference

        return reference.orthogonalize_each(work)
    for stack, out, begin in work:
        if kernels is not None:
            _orthogonalize(kernels, stack, out, begin)
        else:
            count, rows, _ = stack.shape
            orthogonalize_rows(cpu, stack, begin, out, _heights((rows,) * count))


def kernels_for(device: torch.device, matrix_rank: int) -> Loader | None:
    """Return what launches kernels that orthogonalize factors of so many columns, None where something else does."""
    return loader.loader_for(device) if matrix_rank <= MAX_KERNEL_RANK else None


def orthogonalize_rows(cpu: Any, factors: Tensor, initial: Tensor | None, out: Tensor, heights: Tensor) -> None:
    """Let the CPU's kernel do it with factors of `heights` (int64) rows each, one after the other: [rows of all, r]."""
    pointers = factors.data_ptr(), address(initial), out.data_ptr(), heights.data_ptr()
    cpu.orthogonalize(*pointers, len(heights), factors.shape[-1], loader.cpu_threads())


@lru_cache(maxsize=1024)
def _heights(heights: tuple[int, ...]) -> Tensor:
    return torch.tensor(heights, dtype=torch.int64, device="cpu")


def project(matrices: Tensor, right: Tensor, left: Tensor) -> None:
    """Set `left` [count, rows, r] to M right for each matrix M [rows, cols] and its `right` [cols, r].

    Anything not finite in M makes an element of its product not finite, whatever `right` (finite) holds.
    """
    from commopt.kernels import lowrank_reference as reference

    _check_product(left, right, matrices)
    count, rows, cols = matrices.shape
    kernels = loader.loader_for(matrices.device) if right.shape[2] <= _FEW_COLUMNS else None
    cpu = _cpu(matrices.device)
    if kernels is not None:
        arguments = (matrices.data_ptr(), right.data_ptr(), rows, cols, right.shape[2], left.data_ptr())
        grid = count * -(-rows // _PROJECT_ROWS) if right.shape[2] else 0
        kernels.queue(matrices.device, "lowrank_project", grid, _PROJECT_THREADS, arguments)
    elif cpu is None:
        reference.project(matrices, right, left)
    else:
        pointers = matrices.data_ptr(), right.data_ptr(), left.data_ptr()
        cpu.lowrank_project(*pointers, *matrices.shape, left.shape[2], loader.cpu_threads())


def refresh(matrices: Tensor, left: Tensor, right: Tensor, *, subtracts: bool = True) -> None:
    """Set `right` [count, cols, r] to M^T left for each matrix M [rows, cols], then subtract left right^T from M.

    subtracts: False where the caller does, by `multiply_all`.
    """
    from commopt.kernels import lowrank_reference as reference

    _check_product(left, right, matrices)
    cpu = _cpu(matrices.device) if subtracts else None
    if cpu is None:
        reference.project(matrices.transpose(1, 2), left, right)
        if subtracts:
            subtract(matrices, left, right)
    else:
        pointers = matrices.data_ptr(), left.data_ptr(), right.data_ptr()
        cpu.lowrank_refresh(*pointers, *matrices.shape, left.shape[2], loader.cpu_threads())


def decode(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Set `out` [count, rows, cols] to left right^T, in float32 arithmetic and with k = 0 .. r-1 in this order.

    Equal input gives equal bits, whatever the number of threads and, between CPUs, the machine: replicas decode for
    themselves.
    """
    _multiply("decode", left, right, out)


def subtract(matrices: Tensor, left: Tensor, right: Tensor) -> None:
    """Subtract left right^T from `matrices` [count, rows, cols], in place, in float32 arithmetic."""
    _multiply("subtract", left, right, matrices)


@dataclass(frozen=True)
class MatrixTable:
    """Matrices of any shapes, for the kernels of a GPU that take all of them at once.

    rows: int64 [matrices, 8], see csrc/lowrank.cuh. tiles, row_blocks: how many CUDA blocks have tiles, or rows.
    """

    rows: Tensor
    tiles: int
    row_blocks: int

    @classmethod
    def of(cls, rows: Tensor, device: torch.device) -> MatrixTable:
        """Return the one on a device. rows: int64 [matrices, 6], see csrc/cpu/kernels.hpp."""
        height, width = rows[:, 2], rows[:, 3]
        tiles = -(-height // _TILE_ROWS) * -(-width // _TILE_COLS)
        row_blocks = -(-height // _PROJECT_ROWS)
        firsts = [each.cumsum(0) - each for each in (tiles, row_blocks)]
        table = torch.cat((rows, torch.stack(firsts, 1)), 1).to(device)
        return cls(table, int(tiles.sum()), int(row_blocks.sum()))


def begin_all(
    table: MatrixTable,
    buffer: Tensor,
    old: Tensor | None,
    factor: Tensor | float,
    right: Tensor,
    left: Tensor,
    stacked: Tensor,
) -> bool:
    """Make M = factor * gradient + old of all matrices, stacked, and set `left` to M right for each, in one pass.

    Factors are [rows of all, r]; everything else is float32, 1-D. Returns False where there is no kernel for it.
    """
    rank = right.shape[1]
    kernels = loader.loader_for(buffer.device) if rank <= _FEW_COLUMNS else None
    if kernels is None or buffer.dtype != torch.float32:
        return False
    scale = (factor.data_ptr(), 0.0) if isinstance(factor, Tensor) else (0, float(factor))
    rest = (right.data_ptr(), rank, left.data_ptr(), stacked.data_ptr())
    arguments = (table.rows.data_ptr(), len(table.rows), buffer.data_ptr(), address(old), *scale, *rest)
    kernels.queue(buffer.device, "lowrank_begin", table.row_blocks, _PROJECT_THREADS, arguments)
    return True


def multiply_all(
    name: Literal["decode", "subtract"], table: MatrixTable, left: Tensor, right: Tensor, out: Tensor
) -> bool:
    """Do to all matrices what `decode` does to a buffer, or `subtract` to stacked ones; all as for `begin_all`."""
    kernels = loader.loader_for(out.device)
    if kernels is None or out.dtype != torch.float32:
        return False
    factors = (left.data_ptr(), right.data_ptr(), left.shape[1])
    arguments = (table.rows.data_ptr(), len(table.rows), *factors, out.data_ptr())
    kernels.queue(out.device, f"lowrank_{name}_all", table.tiles if left.shape[1] else 0, _THREADS, arguments)
    return True


def _orthogonalize(kernels: Loader, factors: Tensor, out: Tensor, initial: Tensor | None) -> None:
    """Queue what the reference does, up to roundings, on the current stream; MAX_KERNEL_RANK columns at most.

    Equal input gives equal bits: the order of every sum is fixed.
    """
    count, rows, matrix_rank = factors.shape
    slices = -(-rows // _SLICE_ROWS)
    largest = torch.empty(count, slices, dtype=torch.int32, device=factors.device)
    first, second = factors.new_empty(2, count, slices, matrix_rank, matrix_rank).unbind()

    noise = (0 if initial is None else initial.data_ptr(), NOISE * sqrt(rows))
    launch = partial(kernels.queue, factors.device, grid=count * slices, block=_THREADS)
    read, written = ((each.data_ptr(), rows, matrix_rank) for each in (factors, out))
    launch("factor_absmax", arguments=(*read, largest.data_ptr()))
    prepared = (*read, largest.data_ptr(), slices, *noise, out.data_ptr(), first.data_ptr())
    launch("factor_gram", arguments=prepared)
    for grams, new_grams in ((first.data_ptr(), second.data_ptr()), (second.data_ptr(), 0)):
        launch("factor_solve", arguments=(*written, grams, slices, RIDGE / matrix_rank, new_grams))


def _multiply(name: Literal["decode", "subtract"], left: Tensor, right: Tensor, matrices: Tensor) -> None:
    _check_product(left, right, matrices)
    count, rows, matrix_rank = left.shape
    cols = right.shape[1]
    kernels = loader.loader_for(matrices.device)
    cpu = _cpu(matrices.device) if name == "decode" else None
    if kernels is None and cpu is not None:
        pointers = left.data_ptr(), right.data_ptr(), matrices.data_ptr()
        cpu.lowrank_decode(*pointers, *matrices.shape, matrix_rank, loader.cpu_threads())
        return None
    if kernels is None:
        from commopt.kernels import lowrank_reference as reference

        return (
            reference.decode(left, right, matrices) if name == "decode" else reference.subtract(matrices, left, right)
        )
    arguments = (left.data_ptr(), right.data_ptr(), rows, cols, matrix_rank, matrices.data_ptr())
    grid = count * -(-rows // _TILE_ROWS) * -(-cols // _TILE_COLS)
    kernels.queue(matrices.device, f"lowrank_{name}", grid, _THREADS, arguments)


def _cpu(device: torch.device) -> Any | None:
    return loader.cpu_kernels() if device.type == "cpu" else None


def _check_product(left: Tensor, right: Tensor, matrices: Tensor) -> None:
    given = (left, right, matrices)
    if all([each.dtype == torch.float32 and each.dim() == 3 and each.is_contiguous() for each in given]):
        (count, rows, matrix_rank), device = left.shape, left.device
        cols = right.shape[1]
        fits = right.shape == (count, cols, matrix_rank) and matrices.shape == (count, rows, cols)
        if fits and right.device == device and matrices.device == device:
            return  # as ever: what follows finds the words for what is wrong
    _check(left=left, right=right, matrices=matrices)
    count, rows, matrix_rank = left.shape
    cols = right.shape[1]
    _check_shape("right", right, (count, cols, matrix_rank))
    _check_shape("matrices", matrices, (count, rows, cols))


def _check(**tensors: Tensor) -> None:
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise UnsupportedTensorError(f"{name} is {tensor.dtype}; factors and matrices are float32: convert it")
        if tensor.dim() != 3 or not tensor.is_contiguous():
            raise ConfigurationError(
                f"{name} has shape {tuple(tensor.shape)} and stride {tensor.stride()}; it must be a contiguous stack "
                f"[count, rows, cols]: pass a view of that shape"
            )
        if tensor.device != first.device:
            raise ConfigurationError(f"{name} is on {tensor.device}, not on {first.device}; move one of them")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ConfigurationError(f"{name} has shape {tuple(tensor.shape)}; here it must be {shape}")
