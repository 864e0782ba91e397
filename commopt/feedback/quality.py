# SPDX-License-Identifier: Apache-2.0
"""How good compressed averages are, measured on samples: cosine with the exact ones, and what encodings leave out."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.groups import Team

EVERY_STEPS = 8
MAX_SAMPLE_NUMEL = 2048
_FORGETTING = 0.75  # from one sample to the next


class GradientCosine:
    """The cosine of sampled averages and the exact ones: of one lossy buffer in every eighth step, in turn.

    Counts from `first_step` on: a plan that begins there is judged by its own samples alone.
    """

    def __init__(self, first_step: int = 0) -> None:
        self.first_step = first_step
        self._step = -1
        self._seen = self._last_seen = 0  # lossy buffers of this step, and of the last one
        self._sums: Tensor | None = None

    def takes(self, step: int) -> bool:
        """Return whether to sample the next lossy buffer of `step`; asked once for each, in their order.

        Alike on all ranks, as it depends on nothing else.
        """
        if step != self._step:
            self._step, self._seen, self._last_seen = step, 0, self._seen
        number = self._seen
        self._seen += 1
        turns, rest = divmod(step + 1 - self.first_step, EVERY_STEPS)
        return rest == 0 < turns and number == turns % max(self._last_seen, 1)

    def exact(self, buffer: Tensor, team: Team, scale: float) -> Tensor:
        """Return `scale * sum` over the team of some elements of `buffer`, as float32; collective."""
        sample = _sampled(buffer).to(torch.float32, copy=True)
        team.all_reduce(sample, scale=scale)
        return sample

    def add(self, exact: Tensor, result: Tensor) -> None:
        """Compare what `exact` returned with the buffer as it is now; what is not finite does not count. No host sync.

        Replicas are alike in both, so every rank finds the same.
        """
        a, b = exact.double(), _sampled(result).double()
        sums = torch.stack([a.dot(b), a.dot(a), b.dot(b)])
        sums = sums.masked_fill(~sums.isfinite().all(), 0.0)
        self._sums = sums if self._sums is None else self._sums * _FORGETTING + sums

    def cosine(self) -> float | None:
        """Return the cosine of recent samples: None before there is one that is not zero; waits for the device."""
        if self._sums is None:
            return None
        both, exact, result = self._sums.tolist()
        return both / (exact * result) ** 0.5 if exact * result else None


def sample_numel(numel: int) -> int:
    """Return how many of `numel` elements a sample has."""
    return len(range(0, numel, _stride(numel)))


def _sampled(buffer: Tensor) -> Tensor:
    return buffer[:: _stride(buffer.numel())]


def _stride(numel: int) -> int:
    # Odd: widths of layers mostly are not, and one column of a matrix would speak for all.
    return -(-numel // MAX_SAMPLE_NUMEL) | 1


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
