"""How error feedback is done: a frozen description, part of an aggregator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commopt.brief import Brief
from commopt.errors import ConfigurationError


@dataclass(frozen=True, repr=False)
class Feedback(Brief):
    """Add to each gradient what compression left out of the last one (Karimireddy et al., arXiv 1901.09847).

    decay: the share of the old residual that is kept, in (0, 1]; below 1 some of the gradient is lost on purpose.
    dtype: how residuals are stored: torch.float32, or torch.bfloat16 with stochastic rounding for half the memory.
    """

    decay: float = 1.0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ConfigurationError(f"Feedback(decay={self.decay!r}) must be above 0 and at most 1; 1 loses nothing")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ConfigurationError(
                f"Feedback(dtype={self.dtype}) cannot hold residuals; use torch.float32 or torch.bfloat16"
            )
