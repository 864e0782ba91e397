# SPDX-License-Identifier: Apache-2.0
"""Reduce inside the node, aggregate between nodes, spread inside the node: the slow network sees each byte once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from commopt.aggregate.adam import Adam
from commopt.aggregate.base import Action, Aggregator, Buffer, Flat, WorkKind, call, work
from commopt.aggregate.shards import division, reshard
from commopt.aggregate.sums import LinearAggregator, Sums
from commopt.compress import KernelCost
from commopt.errors import ConfigurationError, did_you_mean
from commopt.feedback import BufferContext, Layout
from commopt.groups import Team, TeamShape, apply_scale
from commopt.kernels.finite import all_finite

if TYPE_CHECKING:
    from commopt.aggregate.rows import ShardedBuffer

Form = Literal["reduce_scatter", "leader"]

_SHARD_FROM_NBYTES = 64 * 1024
_NO_OTHER_NODE: Any = TeamShape.of((1,))
"""The level between nodes where there is one node: a team of this rank alone, which sends nothing."""


@dataclass(frozen=True, repr=False)
class Hierarchical(Aggregator):
    """Two-level all_reduce with `inter` between the nodes; inside them sums are exact.

    Forms: "reduce_scatter" (reduce_scatter in the node, `inter` on this rank's shard, all_gather in the node),
    "leader" (reduce to one rank, `inter` on everything there, broadcast). None lets `choose_form` decide, which knows
    a third for PowerSGD: compress first, then add up by level. On one node it is Flat(), and with one rank per node
    `inter`.
    """

    inter: Aggregator = field(default_factory=Flat)
    form: Form | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inter, Aggregator):
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) needs an aggregator, for example "
                f"inter=Compressed(Cast(torch.bfloat16))"
            )
        if self.inter.node_local:
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}): {type(self.inter).__name__} cannot be the step between nodes; "
                f"attach {self.inter!r} itself, with gradients=Hierarchical(...)"
            )
        if isinstance(self.inter, Hierarchical):
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) nests two levels, and between nodes there is one; pass the inner "
                f"aggregator's own inter"
            )
        if self.form not in (None, *get_args(Form)):
            meant = did_you_mean(self.form, get_args(Form)) or ";"
            raise ConfigurationError(
                f"form {self.form!r} is unknown{meant} use None or one of {', '.join(get_args(Form))}"
            )

    def check(self, team: TeamShape) -> None:
        """Refuse shards on nodes of unequal length, and whatever `inter` refuses."""
        if self.form == "reduce_scatter" and not team.uniform:
            counts = "+".join(map(str, team.ranks_per_node))
            raise ConfigurationError(
                f"form {self.form!r} needs equally many ranks on every node, and nodes hold {counts} ranks; use "
                f"form='leader' or None"
            )
        inter = team if team.intra is None else team.inter
        if inter is not None:
            self.inter.check(inter)

    # --------------------------------------------------------------------------------- all_reduce

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Run the form for this buffer, or the only level there is."""
        if buffer.numel() == 0:
            return
        intra, inter = (team.intra, team.inter) if team.intra is not None else _levels(self.inter, team)
        if intra is None:
            across = context.within("inter", context.layout, context.result_dtype)
            _alone(self.inter, team).all_reduce(buffer, team, scale, across)
            return
        form = self._form(team, buffer.nbytes, team.backend(buffer.device))
        if form == "compress_first":
            self._compress_first(buffer, team, scale, context)
            return
        through = self._through_leader if form == "leader" else self._through_shards
        seen = through(buffer, intra, inter, intra.size / team.size, scale, context)
        if self.inter.residual_paths:  # all ranks commit, or none does
            context.report(all_finite(seen))

    def _through_leader(
        self, buffer: Tensor, intra: Team, inter: Team | None, share: float, scale: float, context: BufferContext
    ) -> Tensor:
        """Reduce to one rank, which alone talks to those of other nodes, then broadcast.

        Returns, as `_through_shards` does, elements of the result that are not finite if any is not.
        """
        leads = intra.rank == 0 and inter is not None  # an uneven node has one leader alone that has an inter level
        if self.inter.residual_paths and not context.memory.complete:
            reshard(self.inter, "leader", context.layout if leads else None, intra, context, buffer.device)
        values = self._scaled(buffer, scale)
        intra.reduce(values, dst=0)
        if leads:
            assert inter is not None
            self.inter.all_reduce(values, inter, 1.0, context.within("inter", context.layout, buffer.dtype, share))
        if values is not buffer and intra.rank == 0:
            buffer.copy_(values)
        intra.broadcast(buffer, src=0)
        return buffer[:1]

    def _through_shards(
        self, buffer: Tensor, intra: Team, inter: Team | None, share: float, scale: float, context: BufferContext
    ) -> Tensor:
        """Reduce inside the node and keep one shard per rank, which talks to those at its place, then gather."""
        assert inter is not None  # check() refused unequal nodes
        divided = division(self.inter, context.layout, buffer.dtype, intra.size)
        mine = divided.layouts[intra.rank]  # the last ranks of a node may have nothing but padding, on every node
        if self.inter.residual_paths and not context.memory.complete:
            reshard(self.inter, divided.name, mine, intra, context, buffer.device)
        values = self._scaled(buffer, scale)
        shard = context.scratch.take("shard", divided.shard_numel, values.dtype, values.device)
        with context.scratch.frame():
            # The bucket cannot be padded; where it does not divide, a padded copy goes round instead.
            intra.reduce_scatter(shard, values if divided.in_place else divided.laid_out(values, context.scratch))
        del values
        if mine.numel:
            with context.scratch.frame():
                across = context.within("inter", mine, buffer.dtype, share)
                self.inter.all_reduce(shard[: mine.numel], inter, 1.0, across)
        whole = buffer
        if not divided.in_place:
            whole = context.scratch.take("gathered shards", divided.whole_numel, buffer.dtype, buffer.device)
        intra.all_gather(whole, shard.to(buffer.dtype))
        if not divided.in_place:
            divided.put_back(whole, buffer)
        return whole[:: divided.shard_numel]

    def _compress_first(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Let every rank compress its own gradient; the sums of factors, which are small, go through the leaders."""
        assert team.intra is not None
        assert isinstance(self.inter, LinearAggregator)
        if not context.memory.complete:  # other forms left residuals on any rank of the node: the first sends them
            mine = context.layout if team.intra.rank == 0 else None
            reshard(self.inter, "whole", mine, team.intra, context, buffer.device)
        across = context.within("inter", context.layout, context.result_dtype)
        self.inter.sum_up(buffer, Sums(team, by_leaders=True), scale, across)

    def _scaled(self, buffer: Tensor, scale: float) -> Tensor:
        """Return `scale * buffer`: in place, or in float32 where residuals take every rounding error."""
        if self.inter.residual_paths and buffer.dtype.itemsize < torch.float32.itemsize:
            return buffer.float().mul_(scale)
        return apply_scale(buffer, scale)

    # ------------------------------------------------------------------------------ reduce_scatter

    def check_reduce_scatter(self, team: TeamShape) -> None:
        """Refuse leaders, nodes of unequal length, and whatever `inter` refuses."""
        if self.form == "leader":
            raise ConfigurationError(
                f"{self}: on a 1-D FSDP2 mesh every rank keeps a shard of the sum, so form='leader' has no meaning; "
                f"use form=None"
            )
        _alone(self.inter, team).check_reduce_scatter(team.inter or team)
        if not team.uniform:
            raise ConfigurationError(
                f"{self} needs equally many ranks on every node to scatter gradients over an FSDP2 mesh, and nodes "
                f"hold {', '.join(map(str, team.ranks_per_node))}; use commopt.Flat() or commopt.Compressed(...)"
            )

    def reduce_scatter(
        self, output: Tensor, source: Tensor, buffer: ShardedBuffer, team: Team, scale: float, context: BufferContext
    ) -> None:
        """Add up in the node the shards of the ranks at this rank's place on all nodes; `inter` takes these across."""
        intra, inter, average = team.intra, team.inter, _alone(self.inter, team)
        if average.residual_paths:
            context = context.within("inter", context.layout)
        if intra is None or inter is None:
            average.reduce_scatter(output, source, buffer, team, scale, context)
            return
        dtype = source.dtype if average.lossless else torch.promote_types(source.dtype, torch.float32)
        shape, device = (intra.size, inter.size, output.numel()), source.device
        mine = context.scratch.take("shard", shape[1:], dtype, device).view(-1)
        with context.scratch.frame():
            whole = context.scratch.take("laid out for the node", shape, dtype, device)
            whole.copy_(source.view(inter.size, intra.size, -1).transpose(0, 1))
            intra.reduce_scatter(mine, apply_scale(whole, scale).view(-1))
        average.reduce_scatter(output, mine, buffer.across(intra), inter, 1.0, context)

    def reduce_scatter_calls(self, buffer: ShardedBuffer, team: TeamShape) -> tuple[Action, ...]:
        """Return a reduce_scatter inside the node, and the calls of `inter` between nodes."""
        intra, inter, average = team.intra, team.inter, _alone(self.inter, team)
        if intra is None or inter is None:
            return average.reduce_scatter_calls(buffer, team)
        dtype = buffer.dtype if average.lossless else torch.promote_types(buffer.dtype, torch.float32)
        copied, summed = work("copy", "", buffer.numel), call(intra, "reduce_scatter", buffer.numel * dtype.itemsize)
        return (copied, *summed, *average.reduce_scatter_calls(buffer.across(intra), inter))

    def residual_owners(self, team: TeamShape) -> tuple[int, ...]:
        """Return, of the ranks at this rank's place on every node, those for whose shards `inter` keeps residuals."""
        intra, inter, average = team.intra, team.inter, _alone(self.inter, team)
        if intra is None or inter is None:
            return average.residual_owners(team)
        return tuple(intra.rank + intra.size * node for node in average.residual_owners(inter))

    # --------------------------------------------------------------------------------------- facts

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return the calls of the node, those between nodes, and those of the node again."""
        layout, dtype = buffer.layout, buffer.dtype
        intra, inter = _levels(self.inter, team)
        if layout.numel == 0:
            return ()
        if intra is None:
            return _alone(self.inter, team).calls(buffer, team)
        # Feedback makes the way to the slow network float32.
        summed = torch.promote_types(dtype, torch.float32) if self.inter.residual_paths else dtype
        backend = team.backend(buffer.device or team.default_device)
        form = self._form(team, buffer.nbytes, backend)
        if form == "compress_first":
            assert isinstance(self.inter, LinearAggregator)
            return self.inter.sum_calls(buffer, Sums(team, by_leaders=True))
        if form == "leader":
            leads = intra.rank == 0 and inter is not None
            across = self.inter.calls(buffer, inter) if leads and inter else ()
            reduced = call(intra, "reduce", layout.numel * summed.itemsize, 0)
            return (*reduced, *across, *call(intra, "broadcast", buffer.nbytes, 0))
        assert inter is not None  # as above
        divided = division(self.inter, layout, dtype, intra.size)
        moved = () if divided.in_place else (work("copy", "", layout.numel),)
        reduced = call(intra, "reduce_scatter", divided.whole_numel * summed.itemsize)
        across = self.inter.calls(replace(buffer, layout=divided.layouts[intra.rank]), inter)
        return (*moved, *reduced, *across, *call(intra, "all_gather", divided.shard_numel * dtype.itemsize), *moved)

    @cached_property
    def lossless(self) -> bool:
        """Whether `inter` is lossless."""
        return self.inter.lossless

    @property
    def error_bound(self) -> float:
        """The bound of `inter`: sums inside a node are exact."""
        return self.inter.error_bound

    @property
    def start_step(self) -> int:
        """The first step after the warm-up of `inter`."""
        return self.inter.start_step

    def phase(self, step: int) -> int:
        """Return the phase of `inter`."""
        return self.inter.phase(step)

    def check_capture(self, step: int, team: TeamShape) -> None:
        """Refuse the steps that the aggregator between the nodes refuses."""
        if _levels(self.inter, team)[0] is None:
            _alone(self.inter, team).check_capture(step, team)
        else:  # also where only other ranks of the node talk across
            self.inter.check_capture(step, team.inter or team)

    @cached_property
    def adam(self) -> Adam | None:
        """The Adam of `inter`, which a node's gradient passes through."""
        return self.inter.adam

    @cached_property
    def residual_paths(self) -> tuple[str, ...]:
        """The paths of `inter`, below the level "inter"."""
        return _paths(self.inter)

    def residual_paths_on(self, team: TeamShape) -> tuple[str, ...]:
        """Return the paths of the aggregator in use on `team`."""
        return self.residual_paths if _levels(self.inter, team)[0] is not None else _paths(_alone(self.inter, team))

    def with_dense(self, patterns: Sequence[str]) -> Aggregator:
        """Return the same with more dense patterns in `inter`."""
        return replace(self, inter=self.inter.with_dense(patterns))

    def squared_error(self, layout: Layout, buffer: Tensor) -> float:
        """Return the squared error of `inter`."""
        return self.inter.squared_error(layout, buffer)

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return the passes of `inter`."""
        return self.inter.kernel_costs(ranks)

    def _form(self, team: TeamShape, nbytes: int, backend: str) -> str:
        inter, linear = self.inter, isinstance(self.inter, LinearAggregator)
        return self.form or choose_form(backend, nbytes, uniform=team.uniform, lossless=inter.lossless, linear=linear)


@lru_cache(maxsize=1024)
def choose_form(backend: str, nbytes: int, *, uniform: bool, lossless: bool = True, linear: bool = False) -> str:
    """Return the form for a buffer of `nbytes`: the rule behind Hierarchical(form=None).

    Gloo, where `inter` sends sums only: "compress_first". Every rank compresses its own gradient, and leaders add up:
    to move a gradient between processes takes a machine's processors longer than to compress it. Unequal nodes:
    "leader". Compression between the nodes: "reduce_scatter", so that the ranks of a node share its work and its
    residuals. Gloo: "leader", where one flow fills a slow link as well as several and the ranks of a node share its
    processors anyway. NCCL: "reduce_scatter" from 64 KiB, where every rank drives the NIC with its own shard; "leader"
    below, where one small message across beats several.
    """
    if linear and backend == "gloo":
        return "compress_first"
    if not uniform:
        return "leader"
    sharded = not lossless or (backend != "gloo" and nbytes >= _SHARD_FROM_NBYTES)
    return "reduce_scatter" if sharded else "leader"


def _levels(inter: Aggregator, team: TeamShape) -> tuple[Any, Any]:
    """Return the two levels of a team, None and None where there is one; Adam wants exact sums on one node too."""
    if inter.adam is not None and team.node_count == 1 < team.size:
        return team, _NO_OTHER_NODE
    return team.intra, team.inter


def _alone(inter: Aggregator, team: TeamShape) -> Aggregator:
    """Return the aggregator for a team of one level: over nodes of one rank, or over one node."""
    return inter if team.node_count > 1 or inter.adam is not None else Flat()


def _paths(inter: Aggregator) -> tuple[str, ...]:
    return tuple(f"inter.{path}".rstrip(".") for path in inter.residual_paths)
