# SPDX-License-Identifier: Apache-2.0
"""Quantization with error feedback in plain torch: read this first. Compressed(Quantize(...)) has the same bits.

Error Feedback Fixes SignSGD (Karimireddy et al., arXiv 1901.09847), algorithm 2: the error of an encoding is added to
the next gradient. DoubleSqueeze (Tang et al., arXiv 1905.05957), algorithm 1: so is the error of encoding the sum.
Everything here is on one machine: lists have one entry for each of K ranks. Compressed divides the buffer into chunks
of whole blocks, and each rank is the server of one chunk: here one server has them all.

Bits are the same for levels="uniform", float32 gradients, and loss scales that are powers of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class FeedbackState:
    """The memory from step to step. All residuals begin as zeros.

    residuals: e_k, [n] for each rank k, unscaled.
    server_residual: e_server, [n], unscaled.
    """

    residuals: list[Tensor]
    server_residual: Tensor


def average(
    gradients: Sequence[Tensor],
    state: FeedbackState,
    bits: int,
    block: int,
    decay: float = 1.0,
    loss_scale: float = 1.0,
) -> Tensor:
    """Return the approximate average of the ranks' gradients [n], and update `state` for the next step.

    decay: the share of the ranks' old residuals that is added.
    loss_scale: the factor that gradients were multiplied by, and the average is.
    """
    ranks = len(gradients)
    total = torch.zeros_like(state.server_residual)
    for rank, gradient in enumerate(gradients):
        p = gradient * (1 / ranks) + state.residuals[rank] * (decay * loss_scale)  # p_k = g_k / K + e_k
        sent = quantize(p, bits, block)
        state.residuals[rank] = (p - sent) / loss_scale  # e_k <- p_k - D(C(p_k))
        total = total + sent  # in the order of the ranks
    if ranks == 2:  # the two exchange their payloads, and need no server
        return total
    p = total + state.server_residual * loss_scale  # s = sum_k D(C(p_k)) + e_server
    sent = quantize(p, bits, block)
    state.server_residual = (p - sent) / loss_scale  # e_server <- s - D(C(s))
    return sent


def quantize(p: Tensor, bits: int, block: int) -> Tensor:
    """Return `p` after encoding and decoding: whole multiples of absmax / (2^(bits-1) - 1) in each block."""
    largest = torch.full((), 2.0 ** (bits - 1) - 1, dtype=torch.float32, device=p.device)
    blocks = torch.nn.functional.pad(p, (0, -len(p) % block)).view(-1, block)
    absmax = blocks.abs().amax(1, keepdim=True)
    codes = torch.round(blocks * (largest / absmax)).nan_to_num()  # a block of zeros has no scale
    return (codes * (absmax / largest)).view(-1)[: len(p)]
