# SPDX-License-Identifier: Apache-2.0
"""The parameters that nodes learn by themselves, sent as differences to the last agreed ones; an outer optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor

from commopt.aggregate.base import Action, Aggregator, Buffer, WorkKind
from commopt.compress import KernelCost
from commopt.concise_repr import ConciseRepr
from commopt.document import require_flags
from commopt.errors import ConfigurationError
from commopt.feedback import ANCHOR, MOMENTUM_BUFFER, BufferContext, Layout, Spans
from commopt.groups import Team, TeamShape


@dataclass(frozen=True, repr=False)
class Outer(ConciseRepr):
    """The outer optimizer: torch.optim.SGD, with D, the mean of the nodes' deltas, for the gradient.

        m = momentum m + D;  theta = theta - lr m, or with nesterov theta - lr (D + momentum m)

    With lr=1, no momentum and exact deltas the result is the mean of the parameters. Raises ConfigurationError.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.lr) or not 0 < self.lr < inf:
            raise ConfigurationError(f"Outer(lr={self.lr!r}) must be a number above 0; 1.0 takes the mean of the nodes")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigurationError(f"Outer(momentum={self.momentum!r}) must be at least 0 and below 1, as 0.9")
        require_flags(self, "nesterov")
        if self.nesterov and self.momentum == 0:
            raise ConfigurationError("Outer(nesterov=True) needs a momentum above 0; add for example momentum=0.9")

    def step(
        self, theta: Tensor, delta: Tensor, out: Tensor, momentum: Tensor | None = None, moved: Tensor | None = None
    ) -> None:
        """Write the next theta to `out`, and the next momentum, if any, to `moved`; `delta`, D, is overwritten."""
        if momentum is not None and moved is not None:
            torch.add(delta, momentum, alpha=self.momentum, out=moved)
            delta = delta.add_(moved, alpha=self.momentum) if self.nesterov else moved
        torch.add(theta, delta, alpha=-self.lr, out=out)


@dataclass(frozen=True, repr=False)
class Deltas(Aggregator):
    """Between nodes: replaces parameters by those that all agree on, by the mean of the nodes' deltas.

    Keeps the parameters agreed on last, and the outer momentum, in float32 where residuals are kept: once per node,
    shared out among its ranks. The step is the number of the round. Round 0 takes no average: the buffer's sum over a
    node is then the same on all nodes, and is kept as agreed.

    inner: averages the deltas.
    outer: the optimizer that takes their mean.
    """

    inner: Aggregator
    outer: Outer

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Set `buffer`, this node's parameters times its share of the mean, to the agreed parameters."""
        anchor, agreed = context.moment(ANCHOR, buffer.device)
        if context.step == 0:
            agreed.copy_(buffer)
            return
        share = scale if context.share is None else context.share * context.weight
        if context.weight == 0:  # nothing was learned here
            share = 0.0
        # Not `alpha=`, which fuses two roundings into one: the delta of what nobody has changed is to be exactly zero.
        buffer.mul_(-scale).add_(torch.mul(anchor, share, out=agreed))
        self.inner.all_reduce(buffer, team, 1.0, context)
        moments = context.moment(MOMENTUM_BUFFER, buffer.device) if self.outer.momentum else ()
        self.outer.step(anchor, buffer, agreed, *moments)
        buffer.copy_(agreed)

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return the calls of `inner`: none in round 0."""
        return () if buffer.step == 0 else self.inner.calls(buffer, team)

    @property
    def per_node(self) -> bool:
        """Always True: each node has parameters of its own."""
        return True

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """The paths of `inner`, and those of the agreed parameters and the momentum."""
        averages = (ANCHOR, MOMENTUM_BUFFER) if self.outer.momentum else (ANCHOR,)
        return (*self.inner.residual_paths, *averages)

    @property
    def start_step(self) -> int:
        """The first step after the warm-up of `inner`."""
        return self.inner.start_step

    def phase(self, step: int) -> int:
        """Return the phase of `inner`; round 0 is one by itself."""
        return min(step, max(self.inner.phase(step), 1))

    def check(self, team: TeamShape) -> None:
        """Refuse the teams that `inner` refuses."""
        self.inner.check(team)

    def divide(self, layout: Layout, dtype: torch.dtype, parts: int) -> tuple[Spans, ...] | None:
        """Return the division of `inner`."""
        return self.inner.divide(layout, dtype, parts)

    def with_dense(self, patterns: Sequence[str]) -> Deltas:
        """Return the same with more dense patterns in `inner`."""
        return replace(self, inner=self.inner.with_dense(patterns))

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return the passes of `inner`."""
        return self.inner.kernel_costs(ranks)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
