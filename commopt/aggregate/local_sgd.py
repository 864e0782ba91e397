# SPDX-License-Identifier: Apache-2.0
"""Local SGD (Lin et al., arXiv 1808.07217) and DiLoCo (arXiv 2311.08105): nodes learn by themselves, and meet."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import ClassVar

from torch import Tensor

from commopt.aggregate.base import Action, Aggregator, Buffer, Flat, WorkKind
from commopt.aggregate.compressed import Compressed
from commopt.aggregate.hierarchical import Hierarchical
from commopt.aggregate.outer import Deltas, Outer
from commopt.aggregate.powersgd import PowerSGD
from commopt.compress import Compressor, KernelCost
from commopt.document import require_flags
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext, Feedback
from commopt.groups import Team, TeamShape, apply_scale

_log = logging.getLogger("commopt")


@dataclass(frozen=True, repr=False)
class LocalSGD(Aggregator):
    """Average gradients inside the node in every step; between nodes, every `period` steps, parameters.

    For models of DDP, and of FSDP2 with replicas, one on each node: `commopt.attach(model, LocalSGD(...))` averages the
    parameters too. Between two rounds nodes hold different ones. On one node gradients are averaged over all ranks in
    every step. The optimizer is the user's own; each node has its own state of it.

    With theta the parameters agreed on last, theta_k those of node k of K, C the compressor and D its decoding, a
    round is

        a_k = decay e_k + theta - theta_k;  e_k = a_k - D(C(a_k));  theta = outer(theta, mean_k D(C(a_k)))
        theta_k = merge theta + (1 - merge) theta_k

    By default that is the mean of the parameters, and neither theta nor e_k is kept. A parameter that is frozen later
    still travels: outer momentum and e_k go on in it until they are used up (docs/periodic.md).

    period: optimizer steps between two rounds.
    start_step: the steps before it average gradients over all ranks.
    gradients: the aggregator of gradients, over all ranks at first and over a node's ranks later. It may keep no
        residuals: they would have no way to the other nodes.
    buffers: average floating buffers (BatchNorm's statistics) with the parameters; for DDP(broadcast_buffers=False).
    outer: the optimizer of theta.
    compressor: of the deltas between nodes, or a PowerSGD; the residual e_k travels in the next round. None: deltas
        travel as float32.
    decay: the share of e_k that is kept, in (0, 1] (SparseLoCo, arXiv 2508.15706, keeps 0.95).
    fragments: the number of parts of about equal bytes into which the parameters are cut, in their order, and between
        blocks where there are enough; fragment p has its rounds p / fragments of a period after the first (Streaming
        DiLoCo, arXiv 2501.18512).
    delay: the steps that are made while deltas travel, below `period`. Their updates stay: the round's change is added.
    merge: the share of the round's result in a node's parameters, in (0, 1].
    offload: keep theta, its momentum and e_k in host memory, pinned for a GPU, which has a copy of one message's while
        that is under way. On n elements, with m in the largest message of parameters (25 MiB, or one parameter), the
        device then holds beside DDP's memory 4 n / fragments bytes of parameters on their way (with `delay` twice that)
        and at most 32 m; without it up to 12 n / L more on a node of L ranks, and 4 n / P of P ranks. The same bits.
    """

    period: int = 8
    start_step: int = 0
    gradients: Aggregator = field(default_factory=Hierarchical)
    buffers: bool = False
    outer: Outer = field(default_factory=Outer)
    compressor: Compressor | PowerSGD | None = None
    decay: float = 1.0
    fragments: int = 1
    delay: int = 0
    merge: float = 1.0
    offload: bool = False

    node_local: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, least in (("period", 1), ("start_step", 0), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"LocalSGD({name}={value!r}) must be a whole number, {least} or more")
        if self.delay >= self.period:
            raise ConfigurationError(
                f"LocalSGD(delay={self.delay}, period={self.period}) would begin a round before the last one is over; "
                f"use a delay below the period"
            )
        for name in ("decay", "merge"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
                raise ConfigurationError(f"LocalSGD({name}={value!r}) must be above 0 and at most 1")
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
        require_flags(self, "buffers", "offload")
        if self.offload and self.compressor is None and self.outer == Outer():
            raise ConfigurationError(
                "LocalSGD(offload=True) keeps nothing between rounds that could be offloaded; leave offload, or add an "
                "outer optimizer or a compressor"
            )
        if not isinstance(self.outer, Outer):
            raise ConfigurationError(f"LocalSGD(outer={self.outer!r}) must be a commopt.Outer, as Outer(lr=0.7)")
        if self.compressor is None:
            if self.decay != 1:
                raise ConfigurationError(
                    f"LocalSGD(decay={self.decay}) is of what a compressor leaves out, and there is none; leave decay, "
                    f"or add for example compressor=OneBit()"
                )
        elif not isinstance(self.compressor, (Compressor, PowerSGD)):
            raise ConfigurationError(
                f"LocalSGD(compressor={self.compressor!r}) must be a compressor, for example OneBit(), a PowerSGD, or "
                f"None"
            )

    def check(self, team: TeamShape) -> None:
        """Check `gradients`, for the world and for a node, and the aggregator of parameters."""
        self.gradients.check(team)
        if team.intra is not None:
            self.gradients.check(team.intra)
        self.parameters.check(team)
        if team.node_count == 1 and team.rank == 0:
            _log.warning(
                "%s: all ranks are on one node, so gradients are averaged over all of them in every step", self
            )

    # ------------------------------------------------------------------------------------- parameters

    @cached_property
    def exact(self) -> Aggregator:
        """The aggregator of exact means: `gradients` if it is lossless, since rounded weights would stay rounded."""
        return self.gradients if self.gradients.lossless else Hierarchical()

    @cached_property
    def parameters(self) -> Aggregator:
        """The aggregator of a round: of parameters themselves, or of deltas, which keeps the agreed parameters."""
        if self.compressor is None:
            return self.exact if self.outer == Outer() else Hierarchical(inter=Deltas(Flat(), self.outer))
        feedback = Feedback(self.decay)
        if isinstance(self.compressor, PowerSGD):
            return Hierarchical(inter=Deltas(replace(self.compressor, feedback=feedback), self.outer))
        return Hierarchical(inter=Deltas(Compressed(self.compressor, feedback), self.outer))

    def due(self, steps: int) -> tuple[int, ...]:
        """Return the fragments a round of which begins when `steps` optimizer steps have been made."""
        since = steps - self.start_step
        if since <= 0:
            return ()
        place = since % self.period
        return tuple(each for each in range(self.fragments) if each * self.period // self.fragments == place)

    def round_after(self, steps: int) -> int:
        """Return which round, from 1 on, begins after `steps` steps; each fragment's only grow."""
        return -(-(steps - self.start_step) // self.period)

    # ------------------------------------------------------------------------------------- gradients

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Sum over all ranks; from `start_step` on over the node, in units of the sum over all ranks."""
        if not self._stays_inside(team, context.step):
            self.gradients.all_reduce(buffer, team, scale, context)
        elif team.intra is not None:
            self.gradients.all_reduce(buffer, team.intra, scale * team.size / team.intra.size, context)
        else:
            apply_scale(buffer, scale * team.size)

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return the calls for a buffer of gradients. Those for parameters are in HookState.stats()."""
        reach = team.intra if self._stays_inside(team, buffer.step) else team
        return () if reach is None else self.gradients.calls(buffer, reach)

    def reach(self, team: Team, step: int | None) -> Team | None:
        """Return the node from `start_step` on, None for a node of one rank."""
        return team.intra if self._stays_inside(team, step) else team

    def phase(self, step: int) -> int:
        """Return the earliest step that reaches as far and sends as much."""
        earliest = self.gradients.phase(step)
        return earliest if step < self.start_step else max(earliest, self.start_step)

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return the passes of gradients and of parameters."""
        return self.gradients.kernel_costs(ranks) | self.parameters.kernel_costs(ranks)

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
    def error_bound(self) -> float:
        """No bound: the mean of a node tells nothing about other nodes."""
        return inf

    def _stays_inside(self, team: TeamShape, step: int | None) -> bool:
        return team.node_count > 1 and (step is None or step >= self.start_step)
