# SPDX-License-Identifier: Apache-2.0
"""Low-rank factors in plain torch: orthogonalized with the same bits everywhere, and their products."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from commopt.kernels.lowrank import NOISE, RIDGE
from commopt.kernels.residual import piece_numel

_PIECE_NUMEL = 2**18  # products of columns to hold at once: as many as stay in the cache


def orthogonalize_each(work: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Orthogonalize stacks; `work` is the stacks, none of them empty, where to write them, and their initial factors.

    Only elementwise multiplications, additions and divisions, which every processor rounds alike, and sums in a fixed
    tree: neither the number of threads nor the width of a vector unit can change a bit.
    """
    stacks = [_rescaled(factors, initial) for factors, _, initial in work]
    counts = [stack.shape[0] for stack in stacks]
    matrix_rank = stacks[0].shape[1]
    pairs = torch.tril_indices(matrix_rank, matrix_rank, device=stacks[0].device)
    for _ in range(2):
        grams = stacks[0].new_zeros(sum(counts), matrix_rank, matrix_rank)
        grams[:, pairs[0], pairs[1]] = torch.cat([_products(columns, pairs) for columns in stacks])
        _cholesky(grams)  # of all at once: for so small matrices a call costs more than its arithmetic
        for columns, triangles in zip(stacks, grams.split(counts), strict=True):
            _divide(columns, triangles)
    for columns, (_, out, _) in zip(stacks, work, strict=True):
        out.copy_(columns.transpose(1, 2))


def project(matrices: Tensor, factors: Tensor, out: Tensor, *, transposed: bool) -> None:
    """Set `out` to M F, or M^T F, of each matrix and factor."""
    # The few columns of a factor are long rows of its transpose, which a CPU multiplies several times as fast.
    one, other = factors.transpose(1, 2), matrices if transposed else matrices.transpose(1, 2)
    found = torch.bmm(one.double(), other.double()) if _may_use_tf32(out.device) else torch.bmm(one, other)
    out.copy_(found.transpose(1, 2))


def decode(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Set `out` to left right^T."""
    _, rows, cols = out.shape
    # A few rows at a time are written to memory in one go; the bits are the same.
    step = max(piece_numel(out.device) // (2 * cols), 1) if len(out) == 1 else rows
    for begin in range(0, rows, step):
        part, target = left[:, begin : begin + step], out[:, begin : begin + step]
        if _may_use_tf32(out.device):
            target.copy_(torch.bmm(part.double(), right.transpose(1, 2).double()))
        else:
            torch.bmm(part, right.transpose(1, 2), out=target)


def subtract(matrices: Tensor, left: Tensor, right: Tensor) -> None:
    """Subtract left right^T from `matrices`."""
    if _may_use_tf32(matrices.device):
        matrices.copy_(torch.baddbmm(matrices.double(), left.double(), right.transpose(1, 2).double(), alpha=-1))
    else:
        matrices.baddbmm_(left, right.transpose(1, 2), alpha=-1)


def _may_use_tf32(device: torch.device) -> bool:
    """Return whether torch may multiply float32 as TF32: here it is float64 then, which costs little for few columns.

    The setting is the whole process's, and other threads multiply meanwhile: it cannot be changed for one product.
    """
    if device.type != "cuda":
        return False
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # since torch 2.9
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def _rescaled(factors: Tensor, initial: Tensor | None) -> Tensor:
    """Return the columns [count, matrix_rank, rows] of factors divided by their largest magnitude, with noise."""
    largest = factors.abs().amax((1, 2), keepdim=True)
    zero = largest == 0
    columns = (factors / largest.masked_fill(zero, 1.0)).transpose(1, 2).contiguous()
    if initial is not None:
        noise = initial * sqrt(factors.shape[1])
        columns += torch.where(zero, noise, noise * NOISE).transpose(1, 2)
    return columns


def _products(columns: Tensor, pairs: Tensor) -> Tensor:
    """Return the inner product of each pair of columns; `columns` is [count, matrix_rank, rows]."""
    count, _, rows = columns.shape
    at_once = max(_PIECE_NUMEL // (count * rows), 1)
    sums = []
    for chosen in pairs.split(at_once, dim=1):
        sums.append(_sum(columns[:, chosen[0]] * columns[:, chosen[1]]))
    return torch.cat(sums, dim=1)


def _sum(values: Tensor) -> Tensor:
    """Return the sums along the last dimension: its second half is added to the first until one is left."""
    numel = values.shape[-1]
    while numel > 1:
        half = (numel + 1) // 2
        values[..., : numel - half] += values[..., half:numel]
        numel = half
    return values[..., 0]


def _cholesky(grams: Tensor) -> None:
    """Turn the lower triangles of `grams` [count, r, r], with a ridge, into Cholesky factors.

    A root of zero becomes a one: a matrix that is all zero stays what it is when it is divided by it.
    """
    matrix_rank = grams.shape[1]
    diagonal = grams.diagonal(dim1=1, dim2=2)
    trace = diagonal[:, 0].clone()
    for place in range(1, matrix_rank):
        trace += diagonal[:, place]
    ridge = trace * (RIDGE / matrix_rank)
    diagonal += ridge[:, None]
    for place in range(matrix_rank):
        column = grams[:, place:, place]
        # Roundings could make a pivot smaller than the ridge, which exact arithmetic cannot.
        root = torch.maximum(column[:, 0], ridge).double().sqrt().float()
        root.masked_fill_(root == 0, 1.0)
        column /= root[:, None]
        column[:, 0] = root
        below = column[:, 1:]
        grams[:, place + 1 :, place + 1 :] -= below[:, :, None] * below[:, None, :]


def _divide(columns: Tensor, triangles: Tensor) -> None:
    """Replace X, whose columns are given as [count, r, rows], by X L^-T with the lower triangle L."""
    for place in range(columns.shape[1]):
        column = columns[:, place, None]
        column /= triangles[:, place, place, None, None]
        columns[:, place + 1 :] -= triangles[:, place + 1 :, place, None] * column
