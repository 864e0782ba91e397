"""Scale before anything is added: a float16 sum would overflow where the average does not."""

from __future__ import annotations

from torch import Tensor


def apply_scale(values: Tensor, scale: float) -> Tensor:
    """Multiply in place unless that changes nothing; return `values`."""
    return values if scale == 1.0 else values.mul_(scale)
