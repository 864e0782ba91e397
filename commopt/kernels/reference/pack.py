"""pack and unpack in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def pack(tensors: Sequence[Tensor], flat: Tensor, scale: float = 1.0) -> None:
    """Write `scale` times the tensors, one after the other, into `flat`, without any check."""
    _transfer(tensors, _views(flat, tensors), scale)


@torch.no_grad()
def unpack(flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
    """Write `scale` times the consecutive pieces of `flat` into the tensors, without any check."""
    _transfer(_views(flat, tensors), tensors, scale)


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _transfer(sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float) -> None:
    if not sources:
        return
    if scale == 1.0:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for source, target in zip(sources, targets, strict=True):
        _scale(source, target, scale)


def _scale(source: Tensor, target: Tensor, scale: float) -> None:
    """Multiply in float32 (float64 when either side is) and round once, in as few passes as can be."""
    wide = torch.promote_types(torch.promote_types(source.dtype, target.dtype), torch.float32)
    if source.dtype in (target.dtype, wide):  # torch multiplies 16-bit floats by a number in float32
        torch.mul(source, scale, out=target)
    elif target.dtype == wide:
        target.copy_(source).mul_(scale)
    else:
        target.copy_(source.to(wide).mul_(scale))
