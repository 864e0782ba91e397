# SPDX-License-Identifier: Apache-2.0
"""Whether values are finite, in few kernels: the host launches them one by one for every bucket."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor


def all_finite(values: Tensor, dtype: torch.dtype | None = None, below: float = inf) -> Tensor:
    """Return whether all elements, once rounded to `dtype`, are smaller than `below` in magnitude: bool, 0-d.

    No NaN is. Rounding is monotonic, so the largest element tells.
    """
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    largest: Tensor = torch.linalg.vector_norm(values, inf)
    return (largest if dtype is None else largest.to(dtype)) < below  # isfinite() alone would be four kernels


def all_true(flags: Sequence[Tensor]) -> Tensor:
    """Return whether all flags (bool, 0-d; at least one) are true: bool, 0-d."""
    if len(flags) == 1:
        return flags[0]
    return flags[0] & flags[1] if len(flags) == 2 else torch.stack(tuple(flags)).all()
