"""How much of a matrix lies beyond its first singular directions, without a full decomposition."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

_OVERSAMPLING = 8
_COLUMNS_AT_ONCE = 16  # products with odd numbers of columns take several times as long


@torch.no_grad()
def beyond_rank(matrix: Tensor, largest_rank: int) -> list[float]:
    """Return the squared error of the best approximation of a matrix [rows, cols] by rank 1, 2, .. largest_rank.

    Shorter where the matrix has no such rank. Randomized subspace iteration (Halko, Martinsson, Tropp, "Finding
    structure with randomness", SIAM Review 2011, arXiv 0909.4061, algorithm 4.4), two passes there and back. The
    singular values are those within the subspace, hence never too large; the error is too small by rounding only.
    """
    largest = float(matrix.abs().amax()) or 1.0
    values = matrix.float() / largest  # squares neither overflow nor vanish
    columns = ceil((largest_rank + _OVERSAMPLING) / _COLUMNS_AT_ONCE) * _COLUMNS_AT_ONCE
    draws = torch.Generator(values.device).manual_seed(0)
    start = torch.randn(
        values.shape[1], min(columns, *values.shape), generator=draws, dtype=torch.float32, device=values.device
    )
    basis = torch.linalg.qr(values.mT @ torch.linalg.qr(values @ start).Q).Q
    inside = values.mT @ torch.linalg.qr(values @ basis).Q
    squares = torch.linalg.eigvalsh((inside.mT @ inside).double()).flip(0)[:largest_rank]
    whole = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    errors: list[float] = (whole - squares.cumsum(0)).clamp_(min=0.0).mul_(largest**2).tolist()
    return errors
