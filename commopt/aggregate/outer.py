# SPDX-License-Identifier: Apache-2.0
"""What nodes learn by themselves, taken across as differences to what they agreed on last; an optimizer behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator, Buffer, Step, WorkKind
from commopt.compress import KernelCost
from commopt.concise_repr import ConciseRepr
from commopt.errors import ConfigurationError
from commopt.feedback import ANCHOR, MOMENTUM_BUFFER, BufferContext, Layout, Spans
from commopt.groups import Team, TeamShape


@dataclass(frozen=True, repr=False)
class Outer(ConciseRepr):
    """What is done with D, the mean of the nodes' deltas: that of torch.optim.SGD with D for the gradient.

        m = momentum m + D;  theta = theta - lr m, or with nesterov theta - lr (D + momentum m)

    With D of the parameters as they are, lr=1 and no momentum this is their mean. Raises ConfigurationError.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.lr) or not 0 < self.lr < inf:
            raise ConfigurationError(f"Outer(lr={self.lr!r}) must be a number above 0; 1.0 takes the mean of the nodes")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigurationError(f"Outer(momentum={self.momentum!r}) must be at least 0 and below 1, as 0.9")
        if not isinstance(self.nesterov, bool):
            raise ConfigurationError(f"Outer(nesterov={self.nesterov!r}) must be True or False")
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
    """Between nodes: replaces parameters by those that all agree on, by the mean of how far each node has come.

    Keeps what was agreed on last, and the outer momentum, in float32 where residuals are kept: once per node, shared
    out among its ranks. The step is the number of the round, and 0 takes no average: then the buffer's sum over a node
    is what all nodes have, and is kept as that.

    inner: averages the deltas. outer: what is done with their mean.
    """

    inner: Aggregator
    outer: Outer

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Set `buffer`, this node's parameters times its share of the mean, to the agreed parameters."""
        anchor, agreed = context.moment(ANCHOR, buffer.device)
        if context.step == 0:
            agreed.copy_(buffer)
            return
        share = scale if context.share is None else context.share
        buffer.mul_(-scale).add_(anchor, alpha=share)
        self.inner.all_reduce(buffer, team, 1.0, context)
        moments = context.moment(MOMENTUM_BUFFER, buffer.device) if self.outer.momentum else ()
        self.outer.step(anchor, buffer, agreed, *moments)
        buffer.copy_(agreed)

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Step, ...]:
        """Return those of `inner`: none in round 0."""
        return () if buffer.step == 0 else self.inner.calls(buffer, team)

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """Those of `inner`, and what was agreed on."""
        kept = (ANCHOR, MOMENTUM_BUFFER) if self.outer.momentum else (ANCHOR,)
        return (*self.inner.residual_paths, *kept)

    @property
    def start_step(self) -> int:
        """That of `inner`."""
        return self.inner.start_step

    def phase(self, step: int) -> int:
        """Return that of `inner`, and 0 by itself."""
        return min(step, max(self.inner.phase(step), 1))

    def check(self, team: TeamShape) -> None:
        """Ask `inner`."""
        self.inner.check(team)

    def divide(self, layout: Layout, dtype: torch.dtype, parts: int) -> tuple[Spans, ...] | None:
        """Return what `inner` wants."""
        return self.inner.divide(layout, dtype, parts)

    def with_dense(self, patterns: Sequence[str]) -> Deltas:
        """Tell `inner`."""
        return replace(self, inner=self.inner.with_dense(patterns))

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return those of `inner`."""
        return self.inner.kernel_costs(ranks)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
