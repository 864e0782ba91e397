# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding to bfloat16. To nearest torch rounds as fast as any kernel."""

from __future__ import annotations

from torch import Tensor

from commopt.kernels import loader
from commopt.kernels.codec import DTYPES, ErrorFeedback, RngKey, carry_arguments, rng_arguments
from commopt.kernels.residual import round_with_carry

_THREADS = 256
_PER_THREAD = 8


def round_stochastically(
    values: Tensor, rounded: Tensor, scale: float, carry: ErrorFeedback | None, rng: RngKey, place: int
) -> None:
    """Round `scale * values` (+ the carry), the elements from `place` on; see residual.round_with_carry.

    rounded: bfloat16, from a multiple of 16 bytes on. place: a multiple of 8.
    """
    kernels = loader.loader_for(values.device, values.dtype)
    if kernels is None:
        return round_with_carry(values, rounded, scale, carry, rng, place)
    arguments = (
        *(values.data_ptr(), DTYPES[values.dtype], values.numel(), float(scale), rounded.data_ptr()),
        *carry_arguments(carry),
        *rng_arguments(rng),
        place,
    )
    grid = -(-values.numel() // (_THREADS * _PER_THREAD))
    kernels.queue(values.device, "cast_stochastic", grid, _THREADS, arguments)
