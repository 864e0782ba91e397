# SPDX-License-Identifier: Apache-2.0
"""Post-local SGD (Lin et al., arXiv 1808.07217): nodes learn by themselves and average parameters now and then."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar

from torch import Tensor

from commopt.aggregate.base import Aggregator, Buffer, Step
from commopt.aggregate.hierarchical import Hierarchical
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext
from commopt.groups import Team, TeamShape, apply_scale

_log = logging.getLogger("commopt")


@dataclass(frozen=True, repr=False)
class LocalSGD(Aggregator):
    """Average gradients inside the node in every step, parameters over all ranks every `period` steps.

    For DDP models only: `commopt.attach(ddp, LocalSGD(...))` averages the parameters too. Between two averages
    nodes hold different parameters. On one node gradients are averaged over all ranks in every step.

    period: optimizer steps between two averages of the parameters.
    start_step: the steps before it average gradients over all ranks.
    gradients: by what, over all ranks at first and over a node's ranks later. It may keep no residuals, which would
        have no way to the other nodes.
    buffers: average floating buffers (BatchNorm's statistics) with the parameters; for DDP(broadcast_buffers=False).
    """

    period: int = 8
    start_step: int = 0
    gradients: Aggregator = field(default_factory=Hierarchical)
    buffers: bool = False

    node_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("period", 1), ("start_step", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"LocalSGD({name}={value!r}) must be a whole number, {least} or more")
        if not isinstance(self.gradients, Aggregator) or self.gradients.node_local:
            raise ConfigurationError(
                f"LocalSGD(gradients={self.gradients!r}) needs what averages gradients over all ranks, for "
                f"example gradients=Hierarchical()"
            )
        if self.gradients.residual_paths:
            raise ConfigurationError(
                f"LocalSGD(gradients={self.gradients!r}) would never send its residuals once gradients stay "
                f"inside the nodes; use Hierarchical(), Flat(), or a compression with feedback=None"
            )
        if not isinstance(self.buffers, bool):
            raise ConfigurationError(f"LocalSGD(buffers={self.buffers!r}) must be True or False")

    def check(self, team: TeamShape) -> None:
        """Ask `gradients`, for the world and for a node."""
        self.gradients.check(team)
        if team.intra is not None:
            self.gradients.check(team.intra)
        if team.node_count == 1 and team.rank == 0:
            _log.warning(
                "%s: all ranks are on one node, so gradients are averaged over all of them in every step", self
            )

    @property
    def parameters(self) -> Aggregator:
        """What averages the parameters: `gradients` where that is exact, since rounded weights would stay rounded."""
        return self.gradients if self.gradients.lossless else Hierarchical()

    def averages_after(self, steps: int) -> bool:
        """Return whether the parameters are to be averaged when `steps` optimizer steps have been made."""
        return steps > self.start_step and (steps - self.start_step) % self.period == 0

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Sum over all ranks; from `start_step` on over the node, in units of the sum over all ranks."""
        if not self._stays_inside(team, context.step):
            self.gradients.all_reduce(buffer, team, scale, context)
        elif team.intra is not None:
            self.gradients.all_reduce(buffer, team.intra, scale * team.size / team.intra.size, context)
        else:
            apply_scale(buffer, scale * team.size)

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Step, ...]:
        """Return those of a buffer of gradients. What parameters cost is in HookState.stats()."""
        reach = team.intra if self._stays_inside(team, buffer.step) else team
        return () if reach is None else self.gradients.calls(buffer, reach)

    def phase(self, step: int) -> int:
        """Return the earliest step that reaches as far and sends as much."""
        earliest = self.gradients.phase(step)
        return earliest if step < self.start_step else max(earliest, self.start_step)

    def check_capture(self, step: int, team: TeamShape) -> None:
        """Refuse where there are several nodes."""
        if team.node_count == 1:
            self.gradients.check_capture(step, team)
            return
        raise ConfigurationError(
            f"{self} averages parameters every {self.period} steps and a CUDA graph would repeat step {step} for "
            f"ever; use Hierarchical(), or capture nothing"
        )

    @property
    def lossless(self) -> bool:
        """Never."""
        return False

    @property
    def error_bound(self) -> float:
        """Unlimited: the node's mean tells nothing about the others'."""
        return inf

    def _stays_inside(self, team: TeamShape, step: int | None) -> bool:
        return team.node_count > 1 and (step is None or step >= self.start_step)
