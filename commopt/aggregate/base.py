# SPDX-License-Identifier: Apache-2.0
"""The contract of an aggregator, the only code that issues collectives on gradients; and Flat, the plainest."""

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
from commopt.feedback import BufferContext, Layout, ResidualStore, Spans, scale_and_add
from commopt.groups import Team, TeamShape, WireBytes, apply_scale
from commopt.kernels.finite import all_finite

if TYPE_CHECKING:
    from commopt.aggregate.adam import Adam
    from commopt.aggregate.rows import ShardedBuffer

HSDP = "use a 2-D mesh (HSDP), where it averages over the replicas"
"""The advice of errors about aggregators that cannot reduce-scatter."""

WorkKind = Literal["encode", "decode", "recode", "factor", "refresh", "copy", "pack", "unpack"]


@dataclass(frozen=True)
class Call:
    """One collective of a level of the team.

    level: "world", "intra" or "inter"; with sites also "inter.intra", "inter.inter" and so on.
    primitive: its name, as a method of Team.
    nbytes: the argument of `WireModel`'s method of the same name.
    root: the second argument of that method, None where it takes one.
    """

    level: str
    primitive: str
    nbytes: int
    root: int | None = None

    def wire_bytes(self, team: TeamShape) -> WireBytes:
        """Return the bytes that this rank of `team` sends."""
        arguments = (self.nbytes,) if self.root is None else (self.nbytes, self.root)
        sent: WireBytes = getattr(team.at(self.level).wire, self.primitive)(*arguments)
        return sent


@dataclass(frozen=True)
class LocalWork:
    """Work of one rank by itself: `nbytes` as float32 of the values that it reads, or decodes.

    Kinds:

    encode, decode: by the compressor whose repr is `what`.
    recode: adding up encoded rows and encoding the sum.
    factor: all arithmetic for one message of low-rank factors.
    refresh: the arithmetic that a second message of the other factors adds.
    copy: into another order, or another dtype.
    pack, unpack: bfloat16 numbers in fewer bytes, whose sizes count too.
    """

    kind: WorkKind
    what: str
    nbytes: int


Action = Call | LocalWork
"""A rank's action for a buffer: a collective, or work by itself."""


@dataclass(frozen=True)
class Buffer:
    """A buffer that is to be averaged, as data.

    layout: the pieces in it.
    dtype: of its values.
    device: None for the one the team is for: the GPU where NCCL is there.
    step: None for the step after all warm-up.
    """

    layout: Layout
    dtype: torch.dtype
    device: torch.device | None = None
    step: int | None = None

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.layout.numel * self.dtype.itemsize


def call(team: TeamShape, primitive: str, nbytes: int, root: int | None = None) -> tuple[Call, ...]:
    """Return a collective over `team`: none where nobody else is in it."""
    return (Call(team.level, primitive, nbytes, root),) if team.size > 1 else ()


def work(kind: WorkKind, what: object, numel: int) -> LocalWork:
    """Return work on `numel` values; `what` is the text of the compressor, or of another object that does it."""
    return LocalWork(kind, str(what), 4 * numel)


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
    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return, in order, the actions of this rank in one all_reduce of `buffer`: pure.

        Work that takes no more than a pass over the buffer in place is left out, and so is the rare move of residuals.
        """

    @property
    def lossless(self) -> bool:
        """Whether the result is the exact average up to floating-point rounding of the buffer's own dtype."""
        return False

    # -------------------------------------------------------------- each rank keeps a shard of the sum

    def check_reduce_scatter(self, team: TeamShape) -> None:
        """Raise ConfigurationError, alike on every rank, when `reduce_scatter` cannot run on `team`.

        By default it cannot.
        """
        raise self._no_reduce_scatter()

    def reduce_scatter(
        self, output: Tensor, source: Tensor, buffer: ShardedBuffer, team: Team, scale: float, context: BufferContext
    ) -> None:
        """Set `output` [n] to this rank's row of `scale` times the sum of all ranks' `source` [team.size * n].

        `source` holds the shards of `buffer` one after the other, and is overwritten. Runs on the lane; every rank of
        `team` must call it. New residuals are staged in `context`, whose layout is that of the shards of
        `residual_owners`; it is told whether everything this rank saw was finite.
        """
        raise self._no_reduce_scatter()

    def reduce_scatter_calls(self, buffer: ShardedBuffer, team: TeamShape) -> tuple[Action, ...]:
        """Return, in order, the actions of this rank in one reduce_scatter of `buffer`, as `calls`."""
        raise self._no_reduce_scatter()

    def residual_owners(self, team: TeamShape) -> tuple[int, ...]:
        """Return the ranks of `team` for whose shards this rank may keep residuals: itself where sums are exact."""
        return (team.rank,)

    def _no_reduce_scatter(self) -> ConfigurationError:
        if self.tunes or self.node_local:
            return ConfigurationError(
                f"{self} is for DDP models only; attach another to a model of fully_shard, for example "
                f"'hierarchical_quantized'"
            )
        return ConfigurationError(
            f"{self} cannot average the gradients of a model on a 1-D FSDP2 mesh, where each rank keeps a shard of "
            f"the sum; use commopt.Hierarchical(commopt.Compressed(commopt.Quantize(bits=8))), or {HSDP}"
        )

    # ------------------------------------------------------------------------------------ properties

    def reach(self, team: Team, step: int | None) -> Team | None:
        """Return the ranks of `team` whose gradients are averaged with this one's in `step`, None where nobody's are.

        step: None for after all warm-up.
        """
        return team

    def sums_of(self, team: Team) -> Team | None:
        """Return the team whose own all_reduce is all that `all_reduce` does over `team`, None where it does more."""
        return None

    node_local: ClassVar[bool] = False
    """Whether nodes may end with results of their own, so that only a DDP model can use it, and as a whole."""

    tunes: ClassVar[bool] = False
    """Whether it stands for a choice that is still to be made, on live steps."""

    @property
    def error_bound(self) -> float:
        """The largest error of an element without feedback, as a share of the largest one: 0 when lossless."""
        return 0.0 if self.lossless else 1.0

    @property
    def adam(self) -> Adam | None:
        """The Adam whose directions are summed in place of gradients; None where the result is an average."""
        return None

    @property
    def per_node(self) -> bool:
        """Whether it averages what each node made of its own gradients: sums of several nodes are none of its input."""
        return self.adam is not None

    @property
    def residual_paths(self) -> tuple[str, ...]:
        """The levels that keep residuals, outermost first: none when it remembers nothing between steps."""
        return ()

    def residual_paths_on(self, team: TeamShape) -> tuple[str, ...]:
        """Return the paths of `residual_paths` that are in use on `team`."""
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

    # -------------------------------------------------------------------------- division and exceptions

    def divide(self, layout: Layout, dtype: torch.dtype, parts: int) -> tuple[Spans, ...] | None:
        """Return the spans of a buffer that each of `parts` ranks of a node takes across, None for equal shards.

        Together the spans are all elements, each once. The same on every rank.

        dtype: the dtype to which the values will be rounded in the end.
        """
        return None

    def with_dense(self, patterns: Sequence[str]) -> Aggregator:
        """Return the same with more patterns of names of parameters that travel uncompressed: itself, by default."""
        return self

    # ------------------------------------------------------------------- for the tuner and the simulator

    @classmethod
    def candidates(cls) -> Candidates[Aggregator] | None:
        """Return the settings that a tuner may try, None for none."""
        return None

    def squared_error(self, layout: Layout, buffer: Tensor) -> float:
        """Return the squared L2 norm of the error of one average of `buffer`, without feedback and after warm-up.

        Measured on this rank's values, or estimated by the error bound. inf where a value is no number any more.
        """
        return float((min(self.error_bound, 1.0) * torch.linalg.vector_norm(buffer, dtype=torch.float64)) ** 2)

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return the passes over memory of its work on a GPU, by kind and `what`. ranks: rows that are added up."""
        return {}

    def wire_bytes(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> WireBytes:
        """Return the payload bytes this rank sends in the collectives of `calls`. Sums over the ranks are exact."""
        actions = self.calls(Buffer(layout, dtype, device, step), team)
        return sum((each.wire_bytes(team) for each in actions if isinstance(each, Call)), WireBytes())


@dataclass(frozen=True, repr=False)
class Flat(Aggregator):
    """A single all_reduce over all ranks, as stock DDP does: the yardstick for everything else."""

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Call all_reduce."""
        if buffer.numel():
            team.all_reduce(buffer, scale=scale)

    def sums_of(self, team: Team) -> Team | None:
        """Return `team`."""
        return team

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return one all_reduce."""
        return call(team, "all_reduce", buffer.nbytes) if buffer.nbytes else ()

    def check_reduce_scatter(self, team: TeamShape) -> None:
        """Refuse a subclass that is for DDP models only."""
        if self.tunes or self.node_local:
            raise self._no_reduce_scatter()

    def reduce_scatter(
        self, output: Tensor, source: Tensor, buffer: ShardedBuffer, team: Team, scale: float, context: BufferContext
    ) -> None:
        """Call reduce_scatter, and add the residual of an earlier compression to this rank's shard: once."""
        team.reduce_scatter(output, apply_scale(source, scale))
        own = buffer.shards[team.rank]
        residual = context.flush(own.layout, output.device)
        if residual is not None:
            parts = [output[begin:end] for begin, end in own.spans]
            values = torch.cat(parts)
            scale_and_add(values, values, 1.0, residual)
            context.report(all_finite(values))
            torch._foreach_copy_(parts, list(values.split([len(part) for part in parts])))

    def reduce_scatter_calls(self, buffer: ShardedBuffer, team: TeamShape) -> tuple[Action, ...]:
        """Return one reduce_scatter."""
        return call(team, "reduce_scatter", buffer.numel * buffer.dtype.itemsize)

    @property
    def lossless(self) -> bool:
        """Always True."""
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
    """Return the context of a buffer that `aggregator` sends next, and move the residuals of others to it.

    A look-up, unless the buffer or the aggregator is new, or residuals have just been loaded or moved.
    """
    memory = store.buffers.get(layout)
    if memory is None or memory.sender is not aggregator or not memory.complete:
        paths, search = aggregator.residual_paths_on(team), step > aggregator.start_step
        memory = store.migrate(layout, aggregator, paths, search=search)
    return BufferContext(layout, step, number, rank, store, loss_scale, memory=memory, scratch=store.scratch)


def mark_non_finite(buffer: Tensor, finite: Tensor) -> None:
    """Make the first element NaN unless `finite` (bool, 0-d), without waiting for the device to tell."""
    buffer[:1].masked_fill_(~finite, float("nan"))
