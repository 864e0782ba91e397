# SPDX-License-Identifier: Apache-2.0
"""Residuals of encodings and of roundings. They are unscaled; buffers are multiplied by a GradScaler's loss scale.

A loss scale is a 0-d float32 tensor on the device of the values, or None for 1.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from commopt.compress import Compressor, ErrorFeedback
from commopt.feedback import BufferContext, Feedback, Layout, ResidualKind

T = TypeVar("T", float, Tensor)


def encoding_residual(
    compressor: Compressor,
    feedback: Feedback | None,
    kind: ResidualKind,
    layout: Layout,
    context: BufferContext,
    device: torch.device,
    whole: Layout | None = None,
) -> ErrorFeedback | None:
    """Return the residual of an encoding of `layout`, None for none.

    An exact encoding has one only where an earlier one was inexact, and then once.
    whole: as BufferContext.error_feedback has it.
    """
    if not compressor.exact:
        return context.error_feedback(kind, layout, feedback, device, whole)
    if kind == "server" or feedback is None or context.memory.complete:
        return None
    return context.flush(layout, device)


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
