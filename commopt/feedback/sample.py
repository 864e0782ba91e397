"""How much compression leaves out, measured on samples."""

from __future__ import annotations

import torch
from torch import Tensor

_FORGETTING = 0.75  # from one sample to the next


class SampledError:
    """Relative L2 error of recent encodings: what was left out over what should have been sent."""

    def __init__(self) -> None:
        self._squares: Tensor | None = None

    def add(self, left_out: Tensor, sent: Tensor) -> None:
        """Take one sample in; those of dropped steps, which are not finite, do not count. No host sync."""
        squares = torch.stack([left_out.square().sum(), sent.square().sum()])
        squares = squares.masked_fill(~squares.isfinite().all(), 0.0)
        if self._squares is None:
            self._squares = squares
        else:
            self._squares.mul_(_FORGETTING).add_(squares)  # where they are: a CUDA graph may repeat it

    def value(self) -> float | None:
        """Return the error, None before the first sample; waits for the device."""
        if self._squares is None or not self._squares[1]:
            return None
        return float((self._squares[0] / self._squares[1]).sqrt())
