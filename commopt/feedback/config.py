"""How error feedback is done: a frozen description, part of an aggregator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commopt.concise_repr import ConciseRepr
from commopt.errors import ConfigurationError


def require_feedback(owner: str, feedback: object) -> None:
    """Raise ConfigurationError unless `feedback`, an option of `owner`, is a Feedback or None."""
    if not (feedback is None or isinstance(feedback, Feedback)):
        raise ConfigurationError(f"{owner}(feedback={feedback!r}) must be a Feedback(), or None for none")


def require_repeatable(owner: str, feedback: Feedback | None) -> None:
    """Raise ConfigurationError when residuals are rounded at random, by dice that a CUDA graph would repeat."""
    if feedback is not None and feedback.dtype != torch.float32:
        raise ConfigurationError(
            f"{owner} keeps residuals in {feedback.dtype}, rounded at random, and a CUDA graph would repeat the same "
            f"dice in every step; use feedback=Feedback(dtype=torch.float32)"
        )


def checked_patterns(owner: str, dense: object) -> tuple[str, ...]:
    """Return the patterns of parameter names that `owner` was given, as a tuple: a list could not be hashed.

    Raises ConfigurationError when they are none.
    """
    if not isinstance(dense, (tuple, list)) or not all(isinstance(pattern, str) for pattern in dense):
        raise ConfigurationError(f"{owner}(dense={dense!r}) must be a tuple of patterns, for example dense=('*.bias',)")
    return tuple(dense)


@dataclass(frozen=True, repr=False)
class Feedback(ConciseRepr):
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
