# SPDX-License-Identifier: Apache-2.0
"""One step of PowerSGD in plain torch: read this first. Exchange and InPlace are tested against it, and much faster.

PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization (Vogels et al., arXiv 1905.13727),
algorithms 1 (compression) and 2 (error feedback), without the momentum. Everything here is on one machine: lists have
one entry for each of K ranks, and a sum over a list is an all_reduce. Where commopt differs, or the paper is silent:

- A rank's residual is its own matrix less the product with its own factor, P Q_k^T.
- Gradients are divided by K before anything is added: sums take the place of means, and residuals are in units of the
  average.
- Orthonormal columns may come from any method: here from QR, in the paper from Gram-Schmidt. They span the same space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class MatrixState:
    """The memory of one matrix from step to step.

    residuals: e_k, [rows, cols] for each rank k, unscaled. They begin as zeros.
    right: Q, [cols, r], equal on all ranks. It begins at random.
    """

    residuals: list[Tensor]
    right: Tensor


def average(gradients: Sequence[Tensor], state: MatrixState, decay: float = 1.0, loss_scale: float = 1.0) -> Tensor:
    """Return the approximate average of the ranks' gradients [rows, cols], and update `state` for the next step.

    decay: the share of the old residuals that is added.
    loss_scale: the factor that gradients were multiplied by, and the average is.
    """
    ranks = len(gradients)

    # Algorithm 2: incorporate error feedback.  M_k = g_k / K + e_k
    matrices = [
        gradient / (ranks * loss_scale) + decay * residual
        for gradient, residual in zip(gradients, state.residuals, strict=True)
    ]

    # Algorithm 1: one step of a power iteration, which starts from the factor of the last step.
    left = orthonormal(sum_over_ranks([matrix @ state.right for matrix in matrices]))  # P = orth(sum_k M_k Q)
    rights = [matrix.T @ left for matrix in matrices]  # Q_k = M_k^T P
    right = sum_over_ranks(rights)  # Q = sum_k Q_k

    # Algorithm 2: memorize local errors.  e_k <- M_k - P Q_k^T
    state.residuals = [matrix - left @ own.T for matrix, own in zip(matrices, rights, strict=True)]
    state.right = right
    return left @ right.T * loss_scale


def sum_over_ranks(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum that an all_reduce gives every rank: r (rows + cols) numbers in a step, instead of rows cols."""
    return torch.stack(list(parts)).sum(0)


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns that span the same space."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis
