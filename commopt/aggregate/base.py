# SPDX-License-Identifier: Apache-2.0
"""The contract of an aggregator: the only code that issues collectives on gradients. And the plainest of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from commopt.compress import Candidates, KernelCost
from commopt.concise_repr import ConciseRepr
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext, Layout, ResidualStore, Spans
from commopt.groups import Team, TeamShape, WireBytes

if TYPE_CHECKING:
    from commopt.aggregate.adam import Adam

WorkKind = Literal["encode", "decode", "recode", "factor", "refresh", "copy", "pack", "unpack"]


@dataclass(frozen=True)
class Call:
    """One collective of a level of the team. `nbytes` is what `WireModel`'s method of that name takes; so is `root`."""

    level: str
    primitive: str
    nbytes: int
    root: int | None = None

    def wire_bytes(self, team: TeamShape) -> WireBytes:
        """Return what it makes this rank of `team` send."""
        arguments = (self.nbytes,) if self.root is None else (self.nbytes, self.root)
        sent: WireBytes = getattr(team.at(self.level).wire, self.primitive)(*arguments)
        return sent


@dataclass(frozen=True)
class Work:
    """Work of one rank by itself: `nbytes` as float32 of the values that it reads, or decodes.

    encode, decode: by the compressor whose repr is `what`; recode: add up encoded rows and encode the sum; factor: all
    arithmetic that one message of low-rank factors takes; refresh: what a second message of the other factors adds;
    copy: into another order, or another dtype; pack, unpack: bfloat16 numbers in fewer bytes, whose sizes count too.
    """

    kind: WorkKind
    what: str
    nbytes: int


Step = Call | Work


@dataclass(frozen=True)
class Buffer:
    """A buffer that is to be averaged, as data: what lies in it, as which dtype, on which device, at which step.

    None means the device the team is for (the GPU where NCCL is there), and the step after all warm-up.
    """

    layout: Layout
    dtype: torch.dtype
    device: torch.device | None = None
    step: int | None = None

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.layout.numel * self.dtype.itemsize


def call(team: TeamShape, primitive: str, nbytes: int, root: int | None = None) -> tuple[Call, ...]:
    """Return a collective over `team`: none where nobody else is in it."""
    return (Call(team.level, primitive, nbytes, root),) if team.size > 1 else ()


def work(kind: WorkKind, what: object, numel: int) -> Work:
    """Return work on `numel` values by what `what` shows itself as."""
    return Work(kind, str(what), 4 * numel)


class Aggregator(ConciseRepr, ABC):
    """Replaces a buffer by its scaled sum over a team.

    Implementations are frozen dataclasses: the object is its configuration, and its repr is what ranks compare.
    All ranks (with `node_local` those of each node) end with the same bits, and a non-finite value on one of them makes
    the result non-finite on all. Two methods and a property have to be written; everything else has a default.
    """

    @abstractmethod
    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Set `buffer` (1-D, contiguous, floating or integer, equal numel on all ranks) to `scale * sum`, in place.

        Runs on the lane; every rank of `team` must call it. The scale is applied before anything is added, so that
        an average overflows only if a gradient does. Residuals are staged in `context`, whose layout is the buffer's;
        whoever runs the lane's work commits them. When the result is not finite, its first element is not.
        """

    @abstractmethod
    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Step, ...]:
        """Return, in order, what this rank does in one all_reduce of `buffer`: pure.

        Work that takes no more than a pass over the buffer in place is left out, and so is the rare move of residuals.
        """

    @property
    def lossless(self) -> bool:
        """Whether the result is the exact average up to floating-point rounding of the buffer's own dtype."""
        return False

    # --------------------------------------------------------------------------------- what it is like

    node_local: ClassVar[bool] = False
    """Whether nodes may end with results of their own, so that only a DDP model can use it, and as a whole."""

    linear: ClassVar[bool] = False
    """Whether all that it sends are sums, made by commopt.aggregate.sums, which may add them up level by level."""

    tunes: ClassVar[bool] = False
    """Whether it stands for a choice that is still to be made, on live steps."""

    @property
    def error_bound(self) -> float:
        """The largest error of an element without feedback, as a share of the largest one: 0 when lossless."""
        return 0.0 if self.lossless else 1.0

    @property
    def adam(self) -> Adam | None:
        """What makes directions of gradients before they are averaged; None where the result is their average."""
        return None

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """The levels that keep residuals, outermost first: none when it remembers nothing between steps."""
        return ()

    def residual_paths_on(self, team: TeamShape) -> tuple[str, ...]:
        """Return those of `residual_paths` that are in use on `team`."""
        return self.residual_paths

    @property
    def start_step(self) -> int:
        """The first step at which warm-up is over."""
        return 0

    def phase(self, step: int) -> int:
        """Return the earliest step whose messages are as long as those of `step`."""
        return self.start_step if step >= self.start_step else 0

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

    # ------------------------------------------------------------------------- what can be done better

    def divide(self, layout: Layout, dtype: torch.dtype, parts: int) -> tuple[Spans, ...] | None:
        """Return what of a buffer each of `parts` ranks of a node is to take across, None when equal pieces will do.

        `dtype` is what the values will be rounded to in the end. Together the spans are all elements, each once. The
        same on every rank.
        """
        return None

    def with_dense(self, patterns: Sequence[str]) -> Aggregator:
        """Return the same where parameters whose names match travel uncompressed: itself if nothing is compressed."""
        return self

    # ------------------------------------------------------------- what the tuner and the simulator ask

    @classmethod
    def candidates(cls) -> Candidates[Aggregator] | None:
        """Return the strengths a tuner may try, None for none."""
        return None

    def squared_error(self, layout: Layout, buffer: Tensor) -> float:
        """Return the squared L2 norm of what one average of `buffer` leaves out, without feedback and after warm-up.

        Measured on this rank's values, or estimated by the error bound. inf where a value becomes none.
        """
        return float((min(self.error_bound, 1.0) * torch.linalg.vector_norm(buffer, dtype=torch.float64)) ** 2)

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return what its work takes on a GPU, by kind and `what`. ranks: how many messages a server adds up."""
        return {}

    def wire_bytes(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> WireBytes:
        """Return the payload bytes this rank sends in what `calls` describes. Sums over the ranks are exact."""
        steps = self.calls(Buffer(layout, dtype, device, step), team)
        return sum((each.wire_bytes(team) for each in steps if isinstance(each, Call)), WireBytes())


@dataclass(frozen=True, repr=False)
class Flat(Aggregator):
    """A single all_reduce over all ranks, as stock DDP does: the yardstick for everything else."""

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Call all_reduce."""
        if buffer.numel():
            team.all_reduce(buffer, scale=scale)

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Step, ...]:
        """Return one all_reduce."""
        return call(team, "all_reduce", buffer.nbytes) if buffer.nbytes else ()

    @property
    def lossless(self) -> bool:
        """Always."""
        return True


def context_for(
    aggregator: Aggregator,
    layout: Layout,
    team: Team,
    store: ResidualStore,
    step: int = 0,
    number: int = 0,
    rank: int = 0,
    loss_scale: Tensor | None = None,
) -> BufferContext:
    """Return the context of a buffer that `aggregator` sends next: what others kept of it is `aggregator`'s now.

    A look-up, unless the buffer is new, what sends it is, or residuals have just been loaded or moved.
    """
    memory = store.buffers.get(layout)
    if memory is None or memory.sender is not aggregator or not memory.complete:
        paths, search = aggregator.residual_paths_on(team), step > aggregator.start_step
        memory = store.migrate(layout, aggregator, paths, search=search)
    return BufferContext(layout, step, number, rank, store, loss_scale, memory=memory, scratch=store.scratch)


def mark_non_finite(buffer: Tensor, finite: Tensor) -> None:
    """Make the first element NaN unless `finite` (bool, 0-d), without waiting for the device to tell."""
    buffer[:1].masked_fill_(~finite, float("nan"))
