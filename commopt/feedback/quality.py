# SPDX-License-Identifier: Apache-2.0
"""How good compressed averages are, measured on samples: how far behind exact ones, and the error of encodings."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.feedback.layout import Layout
from commopt.groups import Team

EVERY_STEPS = 8
MAX_SAMPLE_NUMEL = 2048
MOST_STEPS_BEHIND = 10.0
_FORGETTING = 0.75  # from one sample to the next


class ExactSample:
    """How many steps a model is behind one whose gradients are averaged exactly: its missing updates, in gradients.

    Of one lossy buffer in every `every`-th step, in turn, some elements are averaged exactly as well, and with them
    their residuals: summed over the ranks, these are the updates that exact averages would have made and lossy ones
    have not made yet. Without error feedback the error of a sample counts for every step since the last one.
    Counts from `first_step` on: a plan that begins there is compared by its own samples alone.
    """

    def __init__(self, every: int = EVERY_STEPS, first_step: int = 0) -> None:
        self.first_step = first_step
        self._every = every
        self._step = -1
        self._seen = self._last_seen = 0  # lossy buffers of this step, and of the last one
        self._missing: dict[Layout, tuple[int, Tensor]] = {}  # of each buffer: up to which step, and the sum of errors
        self._sums: Tensor | None = None

    def takes(self, step: int) -> bool:
        """Return whether to sample the next lossy buffer of `step`; asked once for each, in their order.

        Alike on all ranks, as it depends on nothing else.
        """
        if step != self._step:
            self._step, self._seen, self._last_seen = step, 0, self._seen
        number = self._seen
        self._seen += 1
        turns, rest = divmod(step + 1 - self.first_step, self._every)
        return rest == 0 < turns and number == turns % max(self._last_seen, 1)

    def exact(self, buffer: Tensor, residual: Tensor | None, team: Team, scale: float) -> Tensor:
        """Return `scale * sum` over the team of some elements of `buffer`, and a second row: the sum of `residual`.

        float32 [1 or 2, sample]; collective. residual: of the same elements, None without error feedback.
        """
        rows = [_sampled(buffer).float(), *([] if residual is None else [residual / scale])]
        sample = torch.stack(rows)
        team.all_reduce(sample.view(-1), scale=scale)
        return sample

    def add(self, exact: Tensor, result: Tensor, step: int, layout: Layout, loss_scale: Tensor | None = None) -> None:
        """Compare the result of `exact` with the buffer as it is now; non-finite samples do not count. No host sync.

        Replicas are alike in both, so every rank finds the same.
        """
        if loss_scale is not None:
            exact, result = exact / loss_scale, result / loss_scale
        dense = exact[0].double()
        if len(exact) == 2:
            missing = exact[1].double()
        else:
            until, missing = self._missing.get(layout, (self.first_step - 1, torch.zeros_like(dense)))
            error = dense - _sampled(result).double()
            missing = missing + error.masked_fill(~error.isfinite().all(), 0.0) * (step - until)
            self._missing[layout] = step, missing
        sums = torch.stack([missing.dot(missing), dense.dot(dense)])
        sums = sums.masked_fill(~sums.isfinite().all(), 0.0)
        self._sums = sums if self._sums is None else self._sums * _FORGETTING + sums

    def steps_behind(self) -> float | None:
        """Return the L2 norm of the missing updates over that of a gradient, in recent samples.

        None before there is one that is not zero. Waits for the device.
        """
        if self._sums is None or not self._sums[1]:
            return None
        return float((self._sums[0] / self._sums[1]).sqrt())


def falls_behind(steps_behind: float | None) -> str:
    """Say that compression withholds too much, or nothing.

    On the GPT of docs/evidence/convergence.md strategies that learn well stay below 6 (tests/test_guard.py).
    """
    if steps_behind is None or steps_behind <= MOST_STEPS_BEHIND:
        return ""
    return f"the model is {steps_behind:.0f} steps behind exact averages, more than {MOST_STEPS_BEHIND:.0f}"


def sample_numel(numel: int) -> int:
    """Return how many of `numel` elements a sample has."""
    return len(range(0, numel, sample_stride(numel)))


def _sampled(buffer: Tensor) -> Tensor:
    return buffer[:: sample_stride(buffer.numel())]


def sample_stride(numel: int) -> int:
    """Return which elements of `numel` a sample has: the first of every so many."""
    # Odd: widths of layers mostly are not, and one column of a matrix would speak for all.
    return -(-numel // MAX_SAMPLE_NUMEL) | 1


class SampledError:
    """Relative L2 error of recent encodings: the norm of the new residuals over that of the encoded values.

    squares: of both, float64 or float32 [2], None before the first sample.
    """

    def __init__(self) -> None:
        self.squares: Tensor | None = None

    def add(self, residual: Tensor, sent: Tensor) -> None:
        """Take one sample in; those of dropped steps, which are not finite, do not count. No host sync."""
        squares = torch.stack([residual.dot(residual), sent.dot(sent)]).nan_to_num_(0.0, 0.0, 0.0)
        if self.squares is None:
            self.squares = squares
        else:
            self.squares.mul_(_FORGETTING).add_(squares)  # where they are: a CUDA graph may repeat it

    def value(self) -> float | None:
        """Return the error, None before the first sample; waits for the device."""
        if self.squares is None or not self.squares[1]:
            return None
        return float((self.squares[0] / self.squares[1]).sqrt())
