# SPDX-License-Identifier: Apache-2.0
"""Low-rank factors in plain torch: orthogonalized with the same bits everywhere, and their products."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from commopt.kernels.lowrank import NOISE
from commopt.kernels.residual import cache_numel

_EXACT = 53  # bits of a whole number in float64
_GRID = 20  # bits of an element beside the largest of its column
_WORD = 24  # bits of half a coefficient: with those of an element and of the sum of 2^9 columns, still exact
_FLOOR = 2.0**-34  # of a pivot, as a share of its column's square: below, roundings of the elimination would count


def orthogonalize_each(work: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> None:
    """Orthogonalize stacks; `work` is the stacks, none of them empty, where to write them, and their initial factors.

    Cholesky-QR in float64, once. Every product of matrices is exact: whole numbers, whose sums stay below 2^53 (as in
    Ozaki et al., "Error-free transformations of matrix multiplication", Numerical Algorithms 2012). So neither the
    order in which a BLAS adds nor its threads can change a bit; all else is elementwise.
    """
    grids = [_on_a_grid(factors, initial) for factors, _, initial in work]
    counts = [len(grid) for grid in grids]
    inverses, scales = _inverse_roots(torch.cat([_gram(grid) for grid in grids]))
    for grid, inverse, scale, (_, out, _) in zip(
        grids, inverses.split(counts), scales.split(counts), work, strict=True
    ):
        upper, lower = torch.bmm(inverse, grid).chunk(2, dim=1)
        out.copy_(upper.add_(lower, alpha=2.0**-_WORD).mul_(scale).transpose(1, 2))


def project(matrices: Tensor, factors: Tensor, out: Tensor) -> None:
    """Set `out` to M F of each matrix and factor."""
    # The few columns of a factor are long rows of its transpose, which a CPU multiplies several times as fast.
    one, other = factors.transpose(1, 2), matrices.transpose(1, 2)
    if out.device.type == "cuda" and not _may_use_tf32(out.device):
        torch.bmm(one, other, out=out.transpose(1, 2))  # in no memory between
        return
    found = torch.bmm(one.double(), other.double()) if _may_use_tf32(out.device) else torch.bmm(one, other)
    out.copy_(found.transpose(1, 2))


def decode(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Set `out` to left right^T."""
    _, rows, cols = out.shape
    if _may_use_tf32(out.device):
        out.copy_(torch.bmm(left.double(), right.transpose(1, 2).double()))
        return
    # Products are rounded, then added: the bits are those of the kernel for CPUs, and no BLAS has a say in them.
    columns = right.transpose(1, 2).contiguous()
    step = max(cache_numel(out.device) // (2 * cols * len(out)), 1)
    for begin in range(0, rows, step):
        part, target = left[:, begin : begin + step], out[:, begin : begin + step]
        torch.mul(part[:, :, :1], columns[:, :1], out=target)
        for k in range(1, left.shape[2]):
            target.add_(part[:, :, k : k + 1] * columns[:, k : k + 1])


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


def _on_a_grid(factors: Tensor, initial: Tensor | None) -> Tensor:
    """Return the columns of factors, with noise, as whole numbers: float64 [count, r, rows], at most 2^_GRID large."""
    if initial is not None:
        largest = factors.abs().amax((1, 2), keepdim=True)
        noise = torch.where(largest == 0, 1.0, largest * NOISE) * sqrt(factors.shape[1])
        factors = factors + initial * noise  # not addcmul, which may fuse the two roundings into one
    largest = factors.abs().amax(1).double()
    columns = factors.transpose(1, 2)
    grid = torch.empty(columns.shape, dtype=torch.float64, device=columns.device)
    return torch.mul(columns, (2.0**_GRID / largest.masked_fill_(largest == 0, 1.0)).unsqueeze(2), out=grid).round_()


def _gram(grid: Tensor) -> Tensor:
    """Return the inner products of columns [count, r, r]: exact for so many rows, those sums added in order."""
    first, *others = grid.split(2 ** (_EXACT - 2 * _GRID), dim=2)
    gram = torch.bmm(first, first.transpose(1, 2))
    for part in others:
        gram += torch.bmm(part, part.transpose(1, 2))
    return gram


def _root(values: Tensor) -> Tensor:
    """Return the roots, rounded as IEEE 754 says: on the CPU torch asks MKL, whose may be a bit off."""
    return torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else values.sqrt()


def _inverse_roots(grams: Tensor) -> tuple[Tensor, Tensor]:
    """Return L^-1 of Gram matrices L L^T, as two words of whole numbers [count, 2 r, r] and their units [count, r, 1].

    Elimination in the rows of [G | 1]. Pivots have a floor: roundings could make them negative. A root of zero becomes
    a one: a column that is all zero stays what it is.
    """
    count, matrix_rank, _ = grams.shape
    rows = grams.new_zeros(matrix_rank, 2 * matrix_rank, count)  # matrices beside each other: long rows, few calls
    rows[:, :matrix_rank] = grams.permute(1, 2, 0)
    floors = rows.diagonal().mul(_FLOOR).T.contiguous()
    rows.diagonal(matrix_rank).fill_(1.0)
    for place in range(matrix_rank):
        row = rows[place, place:]
        root = _root(torch.maximum(row[0], floors[place]))
        row /= root.masked_fill_(root == 0, 1.0)
        rows[place + 1 :, place:] -= rows[place, place + 1 : matrix_rank, None] * row
    inverse = rows[:, matrix_rank:].permute(2, 0, 1)
    exponents = torch.frexp(inverse.abs().amax(2, keepdim=True)).exponent
    units = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents - _WORD)
    words = grams.new_empty(count, 2 * matrix_rank, matrix_rank)
    upper, lower = words.chunk(2, dim=1)
    scaled = inverse / units
    lower.copy_(scaled - torch.round(scaled, out=upper)).mul_(2.0**_WORD).round_()
    return words, units
