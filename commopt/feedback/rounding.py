"""Rounding that is right on average, so that a 16-bit residual loses nothing over many steps."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_BITS = 0xFFFF  # of a float32, which bfloat16 does not have


def round_stochastically(values: Tensor, seed: int) -> Tensor:
    """Return float32 `values` as bfloat16, up or down with probabilities that make the mean exact.

    Equal seeds round alike on equal devices.
    """
    generator = torch.Generator(values.device)
    generator.manual_seed(seed)
    noise = torch.randint(_LOW_BITS + 1, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    noise.add_(values.view(torch.int32)).bitwise_and_(~_LOW_BITS)
    return noise.view(torch.float32).to(torch.bfloat16)
