# SPDX-License-Identifier: Apache-2.0
"""Error feedback in plain torch: the old residual is added to values, the new one written. And 16-bit rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.kernels import loader
from commopt.kernels.codec import ErrorFeedback, RngKey
from commopt.kernels.philox import sixteen_bits

_LARGEST_BFLOAT16 = torch.finfo(torch.bfloat16).max
_LOW_BITS = 0xFFFF  # of a float32: a bfloat16 lacks them
_CPU_CACHE_NUMEL = 2**17
_CACHE_NUMEL = 2**24  # elsewhere launches cost more than memory traffic
_COMMIT_THREADS, _COMMIT_NUMEL = 256, 4096


def cache_numel(device: torch.device) -> int:
    """Return how many elements to take through all passes at once: as many as stay in the cache."""
    return _CPU_CACHE_NUMEL if device.type == "cpu" else _CACHE_NUMEL


def scale_into(values: Tensor, scale: Tensor | float, p: Tensor) -> None:
    """Set p to `scale` times values, both of any floating dtype: a float32 product, rounded once.

    scale: float32, 0-d; or a number, which is rounded to float32.
    """
    if values.dtype == torch.float32:
        torch.mul(values, scale, out=p)
    elif p.dtype == torch.float32:
        p.copy_(values).mul_(scale)
    else:
        p.copy_(values.float().mul_(scale))


class ScaledResidual:
    """A residual with its two factors: of the old one, loss scale and decay; of the new one, the inverse loss scale."""

    def __init__(self, residual: ErrorFeedback) -> None:
        self._old = residual.old
        self._new = residual.new
        self._factor: Tensor | float = residual.decay
        self._inverse: Tensor | None = None
        if residual.loss_scale is not None:
            self._factor = residual.loss_scale * residual.decay
            self._inverse = residual.loss_scale.reciprocal()

    def add_old(self, begin: int, p: Tensor, work: Tensor) -> None:
        """Add the old residual from element `begin` on to p; `work`, like p, is overwritten."""
        old = self._old[begin : begin + p.numel()]
        if isinstance(self._factor, Tensor) or self._factor != 1.0:
            old = torch.mul(old, self._factor, out=work)  # not `alpha=`, which fuses the two roundings into one
        p.add_(old)

    def write_new(self, begin: int, p: Tensor, decoded: Tensor) -> None:
        """Write p - decoded into the new residual from element `begin` on."""
        new = torch.sub(p, decoded, out=self._new[begin : begin + p.numel()])
        if self._inverse is not None:
            new.mul_(self._inverse)

    def unscale_new(self) -> None:
        """Divide the new residual by the loss scale, where it is still in the units of p."""
        if self._inverse is not None:
            self._new.mul_(self._inverse)


def round_by_chance(values: Tensor, chances: Tensor, rounded: Tensor) -> None:
    """Round float32 `values` to bfloat16, up or down with probabilities that make the mean exact.

    chances: whole numbers below 2^16, evenly spread (int32, overwritten). Up means away from zero. Numbers beyond the
    largest bfloat16 are rounded to nearest: chance makes nothing infinite, and infinities and NaN stay.
    """
    chances.add_(values.view(torch.int32)).bitwise_and_(~_LOW_BITS)
    rounded.copy_(torch.where(values.abs() <= _LARGEST_BFLOAT16, chances.view(torch.float32), values))


@torch.no_grad()
def round_with_residual(
    values: Tensor,
    rounded: Tensor,
    scale: float,
    residual: ErrorFeedback | None,
    rng_key: RngKey | None = None,
    place: int = 0,
) -> None:
    """Round `scale * values` (+ the residual) to the dtype of `rounded`: all 1-D and of one length, without any check.

    rng_key: round by chance, to bfloat16; the values are the elements from `place` on of those rounded by this key.
    """
    step = min(cache_numel(values.device), values.numel())
    feedback = None if residual is None else ScaledResidual(residual)
    direct = feedback is None and rng_key is None
    memory = torch.empty(2, 0 if direct else step, dtype=torch.float32, device=values.device)
    for begin in range(0, values.numel(), max(step, 1)):
        part, target = values[begin : begin + step], rounded[begin : begin + step]
        if direct:
            scale_into(part, scale, target)
            continue
        p, work = memory[:, : part.numel()]
        scale_into(part, scale, p)
        if feedback is not None:
            feedback.add_old(begin, p, work)
        if rng_key is None:
            target.copy_(p)
        else:
            round_by_chance(p, sixteen_bits(place + begin, p.numel(), rng_key, p.device), target)
        if feedback is not None:
            feedback.write_new(begin, p, work.copy_(target))


def commit(flag: Tensor, staged: Tensor, values: Tensor) -> None:
    """Overwrite `values` with what is staged if `flag` (bool, 0-d) is true, without waiting for the device to tell.

    Both are contiguous and of one length and dtype. torch.where would read the old values too.
    """
    kernels = loader.loader_for(values.device) if values.dtype == staged.dtype == torch.float32 else None
    if kernels is None:
        torch.where(flag, staged, values, out=values)
        return
    arguments = (flag.data_ptr(), staged.data_ptr(), values.data_ptr(), values.numel())
    kernels.queue(values.device, "commit", -(-values.numel() // _COMMIT_NUMEL), _COMMIT_THREADS, arguments)
