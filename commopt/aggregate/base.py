"""The contract of an aggregator: the only code that issues collectives on gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from commopt.brief import Brief
from commopt.feedback import Account, Layout, Shapes, Spans
from commopt.groups import Team, WireBytes


class Aggregator(Brief, ABC):
    """Replaces a buffer by its scaled sum over a team.

    Implementations are frozen dataclasses: the object is its configuration, and its repr is what ranks compare.
    All ranks end with the same bits, and a non-finite value on one rank makes the result non-finite on all.
    """

    @abstractmethod
    def all_reduce(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        """Set `buffer` (1-D, contiguous, floating or integer, equal numel on all ranks) to `scale * sum`, in place.

        Runs on the lane; every rank of `team` must call it. The scale is applied before anything is added, so that
        an average overflows only if a gradient does. Residuals are staged in `account`, whose layout is the buffer's;
        its ledger's owner commits them. When the result is not finite, its first element is not.
        """

    @abstractmethod
    def wire_bytes(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: Team,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> WireBytes:
        """Return the payload bytes this rank sends for one all_reduce of a buffer of `layout` on `device`.

        None means the device the team is for (the GPU where NCCL is there), and the step after all warm-up. Sums over
        the ranks are exact.
        """

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether the result is the exact average up to floating-point rounding of the buffer's own dtype."""

    @property
    def error_bound(self) -> float:
        """The largest error of an element without feedback, as a share of the largest one: 0 when lossless."""
        return 0.0

    @property
    def start_step(self) -> int:
        """The first step at which warm-up is over."""
        return 0

    def phase(self, step: int) -> int:
        """Return the earliest step whose messages are as long as those of `step`."""
        return min(step, self.start_step)

    def divide(self, layout: Layout, dtype: torch.dtype, parts: int) -> tuple[Spans, ...] | None:
        """Return what of a buffer each of `parts` ranks should be given, None when equal pieces will do.

        `dtype` is what the values will be rounded to in the end. Together the spans are all elements, each once. The
        same on every rank.
        """
        return None

    def shared_factors(self, layout: Layout) -> Shapes:
        """Return which factors are alike for all parts of a parameter, so that they may follow it to other ranks."""
        return ()

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """The levels that keep residuals, outermost first: none when it remembers nothing between steps."""
        return ()

    def check(self, team: Team) -> None:
        """Raise ConfigurationError when this aggregator cannot run on `team`."""


def apply_scale(buffer: Tensor, scale: float) -> None:
    """Multiply in place unless that changes nothing."""
    if scale != 1.0:
        buffer.mul_(scale)


def mark_non_finite(buffer: Tensor, finite: Tensor) -> None:
    """Make the first element NaN unless `finite` (bool, 0-d), without waiting for the device to tell."""
    buffer[:1].masked_fill_(~finite, float("nan"))
