"""Momentum of gradients on their way into an encoding."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.kernels.codec import Velocity
from commopt.kernels.reference.residual import scale_into


def add_velocity(begin: int, p: Tensor, velocity: Velocity, loss_scale: Tensor | None) -> None:
    """Turn p from the gradient into the velocity (Nesterov's: their sum) from element `begin` on, and leave the new.

    p is float32 and multiplied by `loss_scale`, the velocities are not. One rounding per operation, as kernels.sparse
    says.
    """
    momentum = velocity.momentum
    old, new = velocity.old[begin : begin + p.numel()], velocity.new[begin : begin + p.numel()]
    if momentum.nesterov:
        unit = 1.0 if loss_scale is None else loss_scale
        torch.mul(old, unit, out=new).add_(p).mul_(momentum.factor)
        p.add_(new)
    else:
        factor = momentum.factor if loss_scale is None else loss_scale * momentum.factor
        p.copy_(torch.mul(old, factor, out=new).add_(p))
    if loss_scale is not None:
        new.mul_(loss_scale.reciprocal())


@torch.no_grad()
def advance(values: Tensor, scale: float, velocity: Velocity, loss_scale: Tensor | None, moved: Tensor) -> None:
    """Set `moved` (float32) to what momentum makes of `scale * values`, for elements that are all sent."""
    factor = torch.full((), scale, dtype=torch.float32, device=values.device)
    scale_into(values, factor, moved)
    add_velocity(0, moved, velocity, loss_scale)
