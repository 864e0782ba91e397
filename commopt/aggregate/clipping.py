"""Limit the norm of what one rank adds to an average."""

from __future__ import annotations

import torch
from torch import Tensor


def clip(buffer: Tensor, norm_limit: float, scale: float, loss_scale: Tensor | None, ranks: int) -> None:
    """Scale `buffer` down, in place, so that this rank's part of the average has at most its share of the norm.

    That is norm_limit / sqrt(ranks), L2: parts that are independent then add up to norm_limit (arXiv 1712.01887,
    section 3.2). `scale * buffer` is the part, times `loss_scale`. What is not finite stays so; no host waits for a
    device.
    """
    norm = torch.linalg.vector_norm(buffer, dtype=torch.float64) * scale  # float32 would overflow where values do not
    if loss_scale is not None:
        norm = norm / loss_scale
    factor = (norm_limit * ranks**-0.5 / norm).clamp(max=1.0)  # of a norm of 0, too
    if buffer.dtype.itemsize < torch.float32.itemsize:
        buffer.copy_(buffer.float().mul_(factor))
    else:
        buffer.mul_(factor)
