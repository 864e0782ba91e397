# SPDX-License-Identifier: Apache-2.0
"""Error feedback in plain torch: the old residual added to values, the new one left."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.kernels.codec import ErrorFeedback

_CPU_PIECE_NUMEL = 2**17
_PIECE_NUMEL = 2**24  # elsewhere launches cost more than memory traffic


def piece_numel(device: torch.device) -> int:
    """Return how many elements to take through all passes at once: as many as stay in the cache."""
    return _CPU_PIECE_NUMEL if device.type == "cpu" else _PIECE_NUMEL


def scale_into(values: Tensor, scale: Tensor, p: Tensor) -> None:
    """Set p to `scale` (float32, 0-d) times values, both of any floating dtype: a float32 product, rounded once."""
    if values.dtype == torch.float32:
        torch.mul(values, scale, out=p)
    elif p.dtype == torch.float32:
        p.copy_(values).mul_(scale)
    else:
        p.copy_(values.float().mul_(scale))


class Residual:
    """A carry, with what its two factors come to."""

    def __init__(self, carry: ErrorFeedback) -> None:
        self._old, self._new = carry.old, carry.new
        self._factor: Tensor | float = carry.decay
        self._inverse: Tensor | None = None
        if carry.loss_scale is not None:
            self._factor = carry.loss_scale * carry.decay
            self._inverse = carry.loss_scale.reciprocal()

    def add_old(self, begin: int, p: Tensor, work: Tensor) -> None:
        """Add the old residual from element `begin` on to p; `work`, like p, is overwritten."""
        old = self._old[begin : begin + p.numel()]
        if isinstance(self._factor, Tensor) or self._factor != 1.0:
            old = torch.mul(old, self._factor, out=work)  # not `alpha=`, which fuses the two roundings into one
        p.add_(old)

    def write_new(self, begin: int, p: Tensor, decoded: Tensor) -> None:
        """Leave p - decoded from element `begin` on."""
        new = torch.sub(p, decoded, out=self._new[begin : begin + p.numel()])
        if self._inverse is not None:
            new.mul_(self._inverse)

    def unscale_new(self) -> None:
        """Take the loss scale out of all that was left, where p itself was left."""
        if self._inverse is not None:
            self._new.mul_(self._inverse)


@torch.no_grad()
def round_with_carry(values: Tensor, rounded: Tensor, scale: float, carry: ErrorFeedback | None) -> None:
    """Round `scale * values` (+ the carry) to the dtype of `rounded`: all 1-D and of one length, without any check."""
    step = min(piece_numel(values.device), values.numel())
    factor = torch.full((), scale, dtype=torch.float32, device=values.device)  # written there: no host waits
    residual = None if carry is None else Residual(carry)
    memory = torch.empty(2, step if residual else 0, dtype=torch.float32, device=values.device)
    for begin in range(0, values.numel(), max(step, 1)):
        part, target = values[begin : begin + step], rounded[begin : begin + step]
        if residual is None:
            scale_into(part, factor, target)
            continue
        p, work = memory[:, : part.numel()]
        scale_into(part, factor, p)
        residual.add_old(begin, p, work)
        target.copy_(p)
        residual.write_new(begin, p, work.copy_(target))
