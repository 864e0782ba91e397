"""The contract of an aggregator: the only code that issues collectives on gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from commopt.aggregate.calls import Call, Stages, Step
from commopt.brief import Brief
from commopt.errors import ConfigurationError
from commopt.feedback import Account, Layout, Shapes, Spans
from commopt.groups import Team, TeamShape, WireBytes


class Aggregator(Brief, ABC):
    """Replaces a buffer by its scaled sum over a team.

    Implementations are frozen dataclasses: the object is its configuration, and its repr is what ranks compare.
    All ranks (with `node_local` those of each node) end with the same bits, and a non-finite value on one of them makes
    the result non-finite on all.
    """

    @abstractmethod
    def all_reduce(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        """Set `buffer` (1-D, contiguous, floating or integer, equal numel on all ranks) to `scale * sum`, in place.

        Runs on the lane; every rank of `team` must call it. The scale is applied before anything is added, so that
        an average overflows only if a gradient does. Residuals are staged in `account`, whose layout is the buffer's;
        its ledger's owner commits them. When the result is not finite, its first element is not.
        """

    @abstractmethod
    def calls(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> tuple[Step, ...]:
        """Return, in order, what this rank does in one all_reduce of a buffer of `layout` on `device`: pure.

        None means the device the team is for (the GPU where NCCL is there), and the step after all warm-up. Work that
        takes no more than a pass over the buffer in place is left out.
        """

    def stages(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> tuple[Stages, ...]:
        """Return the same as `calls`, by chunks that follow each other through the levels of the network."""
        return (Stages((), self.calls(layout, dtype, team, device, step), ()),)

    def wire_bytes(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> WireBytes:
        """Return the payload bytes this rank sends in what `calls` describes. Sums over the ranks are exact."""
        steps = self.calls(layout, dtype, team, device, step)
        return sum((each.wire_bytes(team) for each in steps if isinstance(each, Call)), WireBytes())

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether the result is the exact average up to floating-point rounding of the buffer's own dtype."""

    @property
    def node_local(self) -> bool:
        """Whether nodes may end with results of their own, so that only a DDP model can use it, and as a whole."""
        return False

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

    def check(self, team: TeamShape) -> None:
        """Raise ConfigurationError when this aggregator cannot run on `team`."""

    def check_capture(self, step: int, team: TeamShape) -> None:
        """Raise ConfigurationError when a later step on `team` would do otherwise than `step`.

        A CUDA graph repeats `step` for ever. The same on every rank.
        """
        if step <= self.start_step > 0:  # the first step after makes what later ones find
            raise ConfigurationError(
                f"{self} warms up until step {self.start_step} and a CUDA graph would repeat step {step} for ever; "
                f"capture a step from {self.start_step + 1} on, or set no warm-up"
            )


def mark_non_finite(buffer: Tensor, finite: Tensor) -> None:
    """Make the first element NaN unless `finite` (bool, 0-d), without waiting for the device to tell."""
    buffer[:1].masked_fill_(~finite, float("nan"))
