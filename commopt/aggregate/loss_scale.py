# SPDX-License-Identifier: Apache-2.0
"""Values times a GradScaler's loss scale, and without it: residuals are kept unscaled, buffers are not.

A loss scale is a 0-d float32 tensor on the device of the values, or None for 1.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T", float, Tensor)


def scaled(value: T, loss_scale: Tensor | None) -> T | Tensor:
    """Return `value` times the loss scale."""
    return value if loss_scale is None else value * loss_scale


def unscaled(value: T, loss_scale: Tensor | None) -> T | Tensor:
    """Return `value` divided by the loss scale."""
    return value if loss_scale is None else value / loss_scale


def add_rounding_error(residual: Tensor, exact: Tensor, dtype: torch.dtype, loss_scale: Tensor | None) -> None:
    """Add the error of rounding float32 `exact` to a 16-bit `dtype` to a part of the new residual.

    One rank does so for each element.
    """
    residual.add_(unscaled(exact - exact.to(dtype), loss_scale))
