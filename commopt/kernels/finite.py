# SPDX-License-Identifier: Apache-2.0
"""Whether values are finite, in one pass over them that needs no memory."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return whether all `values` are finite, also once they are rounded to `dtype`: bool, 0-d, on their device.

    Rounding is monotonic, so the smallest and the largest tell; both are NaN where a value is.
    """
    if values.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=values.device)
    ends = torch.stack(values.aminmax())
    return ends.to(dtype or ends.dtype).isfinite().all()
