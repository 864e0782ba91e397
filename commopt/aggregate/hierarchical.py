# SPDX-License-Identifier: Apache-2.0
"""Reduce inside the node, aggregate between nodes, spread inside the node: the slow network sees each byte once.

Where sites are known, the same is done inside each site, and the aggregator runs between sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch
from torch import Tensor

from commopt.aggregate.adam import Adam
from commopt.aggregate.base import Action, Aggregator, Buffer, Flat, WorkKind, call, mark_non_finite, work
from commopt.aggregate.compressed import Compressed
from commopt.aggregate.forms import Form, Levels, alone, choose_form, levels_of
from commopt.aggregate.inside import Rows, check_inside, through_rows, usual_inside
from commopt.aggregate.shards import Division, division, reshard, shard_memory, undivided
from commopt.aggregate.sums import LinearAggregator, Sums
from commopt.compress import KernelCost
from commopt.document import require_flags
from commopt.errors import ConfigurationError, did_you_mean
from commopt.feedback import BufferContext, Layout, Spans
from commopt.groups import Team, TeamShape, apply_scale
from commopt.kernels.finite import all_finite

if TYPE_CHECKING:
    from commopt.aggregate.rows import ShardedBuffer


class _Way(NamedTuple):
    """How the messages of a buffer go.

    aggregator: that sends them.
    form: as `choose_form` says; "alone" where there is one level, whose team `levels.intra` then is.
    divided: the shards that go across.
    """

    aggregator: Hierarchical
    form: str
    levels: Levels
    divided: Division


@dataclass(frozen=True, repr=False)
class Hierarchical(Aggregator):
    """All_reduce by level, with `inter` on the slowest: between nodes, or between sites; below, sums are exact.

    Forms: "reduce_scatter" (reduce_scatter in the node, `inter` on this rank's shard, all_gather in the node),
    "leader" (reduce to one rank, `inter` on everything there, broadcast). None lets `choose_form` decide, which knows
    a third for PowerSGD: compress first, then add up by level. On one node it is Flat(), and with one rank per node
    `inter`.

    Where sites are known, `Hierarchical(inter=x)` does the same in each site: it is then
    `Hierarchical(inter=Hierarchical(inter=x))`, with another Hierarchical for each further level, and inside sites with
    8 bits where `x` compresses (`usual_inside`). Unless `x` averages what single nodes made (`per_node`): then it runs
    between all nodes.

    intra: how sums inside the node, or the site, are compressed; None: they are exact.
    sites: False: sites make no levels; `inter` runs between all nodes, as where nobody knows them.
    """

    inter: Aggregator = field(default_factory=Flat)
    form: Form | None = None
    intra: Compressed | None = None
    sites: bool = True

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
        if isinstance(self.inter, Hierarchical) and self.inter.per_node:
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}) would add up nodes before an aggregator that needs what each node "
                f"made of its own; pass the inner aggregator's own inter"
            )
        require_flags(self, "sites")
        if self.intra is not None:
            check_inside(self.intra, self.inter)
            if self.form is not None:
                raise ConfigurationError(
                    f"Hierarchical(form={self.form!r}, intra={self.intra!r}): compression inside has one form of its "
                    f"own; leave form"
                )
        if not self.sites and isinstance(self.inter, Hierarchical):
            raise ConfigurationError(
                f"Hierarchical(inter={self.inter!r}, sites=False): the Hierarchical between the nodes is a level of "
                f"sites; leave one of the two"
            )
        if self.form not in (None, *get_args(Form)):
            meant = did_you_mean(self.form, get_args(Form)) or ";"
            raise ConfigurationError(
                f"form {self.form!r} is unknown{meant} use None or one of {', '.join(get_args(Form))}"
            )

    def check(self, team: TeamShape) -> None:
        """Refuse shards on nodes of unequal length, and whatever `inter` refuses."""
        if self.form == "reduce_scatter" and not team.uniform:
            counts, unit = "+".join(map(str, team.members)), "node" if team.level == "world" else "site"
            raise ConfigurationError(
                f"form {self.form!r} needs equally many ranks on every {unit}, and {unit}s hold {counts} ranks; use "
                f"form='leader' or None"
            )
        inter = team.inter or (team if team.intra is None else None)
        if inter is not None:
            self._across(team).check(inter)
        if self.intra is not None:
            self.intra.check(team)

    # --------------------------------------------------------------------------------- all_reduce

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Run the form for this buffer, or the only level there is."""
        if buffer.numel() == 0:
            return
        key = context.path, team, buffer.dtype, context.result_dtype
        way = context.memory.ways.get(key)
        if way is None or way.aggregator is not self:
            way = context.memory.ways[key] = self._way(buffer, team, context)
        _, form, levels, divided = way
        if form == "alone":
            across = context.within("inter", context.layout, context.result_dtype)
            levels.average.all_reduce(buffer, levels.intra, scale, across)
            return
        if form == "compress_first":
            self._compress_first(buffer, team, scale, context)
            return
        seen = buffer[:0]
        finite: Tensor | None = None
        if self.intra is not None:
            finite = through_rows(self.intra, buffer, levels, team.leaders, scale, context)
        elif form == "reduce_scatter":
            seen = self._through_shards(buffer, levels, divided, scale, context)
        else:
            seen = self._through_leaders(buffer, levels, divided, scale, context)
        if self.residual_paths:  # all ranks commit, or none does
            finite = all_finite(seen) if finite is None else finite
            context.report(finite)
            if context.path:  # the level that this one is part of looks at first elements only
                mark_non_finite(buffer, finite)

    def _way(self, buffer: Tensor, team: Team, context: BufferContext) -> _Way:
        """Return how a buffer goes; kept with its residuals, since it is the same in every step."""
        intra, inter = (team.intra, team.inter) if team.intra is not None else levels_of(self.inter, team)
        average, whole = self._across(team), undivided(context.layout)
        if intra is None:
            return _Way(self, "alone", Levels(team.inter or team, None, alone(average, team), 1.0), whole)
        form = self._form(team, buffer.nbytes, team.backend(buffer.device))
        parts = _shards_in(form, team, intra)
        dtype = context.result_dtype or buffer.dtype
        divided = whole if parts == 1 else division(average, context.layout, dtype, parts)
        return _Way(self, form, Levels(intra, inter, average, intra.size / team.size), divided)

    def sums_of(self, team: Team) -> Team | None:
        """Return that of `inter` where there is one level, None otherwise."""
        if levels_of(self.inter, team)[0] is not None:
            return None
        return alone(self._across(team), team).sums_of(team.inter or team)

    def _through_leaders(
        self, buffer: Tensor, levels: Levels, divided: Division, scale: float, context: BufferContext
    ) -> Tensor:
        """Reduce to the first ranks, who alone talk to those of other nodes, then broadcast.

        One leader takes everything, several take a shard each. Returns, as `_through_shards` does, elements of the
        result that are not finite if any is not.
        """
        intra, inter, average, share = levels
        dtype, scratch, leaders = context.result_dtype or buffer.dtype, context.scratch, len(divided.layouts)
        leads = intra.rank < leaders and inter is not None  # an uneven node has one leader alone with an inter level
        mine = divided.layouts[intra.rank] if leads else None
        if average.residual_paths and not context.memory.complete:
            reshard(average, divided.name, mine, intra, context, buffer.device)
        values = self._scaled(buffer, scale)
        blocks = (values if divided.in_place else divided.laid_out(values, scratch)).view(leaders, -1)
        for place, block in enumerate(blocks):
            intra.reduce(block, dst=place)
        if mine is not None:
            assert inter is not None
            shard = blocks[intra.rank]
            if not divided.in_place:  # the level above lays out too
                shard = shard_memory(shard.numel(), shard, context).copy_(shard)
            if mine.numel:
                across = context.within("inter", mine, dtype, share)
                average.all_reduce(shard[: mine.numel], inter, 1.0, across)
        result = divided.result(buffer, dtype, context.scratch)
        results = result.view(leaders, -1)
        if mine is not None and results[intra.rank].data_ptr() != shard.data_ptr():
            results[intra.rank].copy_(shard)
        for place, block in enumerate(results):
            intra.broadcast(block, src=place)
        divided.put_back(result, buffer)
        return result[:: divided.shard_numel]

    def _through_shards(
        self, buffer: Tensor, levels: Levels, divided: Division, scale: float, context: BufferContext
    ) -> Tensor:
        """Reduce inside the node and keep one shard per rank, which talks to those at its place, then gather."""
        intra, inter, average, share = levels
        assert inter is not None  # check() refused unequal nodes
        dtype = context.result_dtype or buffer.dtype
        mine = divided.layouts[intra.rank]  # the last ranks of a node may have nothing but padding, on every node
        if average.residual_paths and not context.memory.complete:
            reshard(average, divided.name, mine, intra, context, buffer.device)
        values = self._scaled(buffer, scale)
        shard = shard_memory(divided.shard_numel, values, context)
        with context.scratch.frame():
            # The bucket cannot be padded; where it does not divide, a padded copy goes round instead.
            intra.reduce_scatter(shard, values if divided.in_place else divided.laid_out(values, context.scratch))
        del values
        if mine.numel:
            with context.scratch.frame():
                across = context.within("inter", mine, dtype, share)
                average.all_reduce(shard[: mine.numel], inter, 1.0, across)
        result = divided.result(buffer, dtype, context.scratch)
        intra.all_gather(result, shard.to(dtype))
        divided.put_back(result, buffer)
        return result[:: divided.shard_numel]

    def _compress_first(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Let every rank compress its own gradient; the sums of factors, which are small, go through the leaders.

        The sums are made level by level. Residuals are found at the same path as in every other form.
        """
        assert team.intra is not None
        assert isinstance(self.inter, LinearAggregator)
        if not context.memory.complete:  # other forms left residuals on any rank of the node: the first sends them
            mine = context.layout if team.intra.rank == 0 else None
            reshard(self._across(team), "whole", mine, team.intra, context, buffer.device)
        across = context
        for _ in range(1 + team.sites_above * self.sites):
            across = across.within("inter", context.layout, context.result_dtype)
        self.inter.sum_up(buffer, Sums(team, by_leaders=True), scale, across)

    def _scaled(self, buffer: Tensor, scale: float) -> Tensor:
        """Return `scale * buffer`: in place, or in float32 where residuals take every rounding error."""
        if self.residual_paths and buffer.dtype.itemsize < torch.float32.itemsize:
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
        alone(self._across(team), team).check_reduce_scatter(team.inter or team)
        if not team.uniform:
            unit = "node" if team.level == "world" else "site"
            raise ConfigurationError(
                f"{self} needs equally many ranks on every {unit} to scatter gradients over an FSDP2 mesh, and {unit}s "
                f"hold {', '.join(map(str, team.members))}; use commopt.Flat() or commopt.Compressed(...)"
            )

    def reduce_scatter(
        self, output: Tensor, source: Tensor, buffer: ShardedBuffer, team: Team, scale: float, context: BufferContext
    ) -> None:
        """Add up in the node the shards of the ranks at this rank's place on all nodes; `inter` takes these across."""
        intra, inter, average = team.intra, team.inter, alone(self._across(team), team)
        if average.residual_paths:
            context = context.within("inter", context.layout)
        if intra is None or inter is None:
            average.reduce_scatter(output, source, buffer, inter or team, scale, context)
            return
        dtype = source.dtype if average.lossless else torch.promote_types(source.dtype, torch.float32)
        shape, device = (intra.size, inter.size, output.numel()), source.device
        mine = context.scratch.take(f"{context.path} shard of the mesh", shape[1:], dtype, device).view(-1)
        with context.scratch.frame():
            whole = context.scratch.take("laid out for the node", shape, dtype, device)
            whole.copy_(source.view(inter.size, intra.size, -1).transpose(0, 1))
            intra.reduce_scatter(mine, apply_scale(whole, scale).view(-1))
        average.reduce_scatter(output, mine, buffer.across(intra), inter, 1.0, context)

    def reduce_scatter_calls(self, buffer: ShardedBuffer, team: TeamShape) -> tuple[Action, ...]:
        """Return a reduce_scatter inside the node, and the calls of `inter` between nodes."""
        intra, inter, average = team.intra, team.inter, alone(self._across(team), team)
        if intra is None or inter is None:
            return average.reduce_scatter_calls(buffer, inter or team)
        dtype = buffer.dtype if average.lossless else torch.promote_types(buffer.dtype, torch.float32)
        copied, summed = work("copy", "", buffer.numel), call(intra, "reduce_scatter", buffer.numel * dtype.itemsize)
        return (copied, *summed, *average.reduce_scatter_calls(buffer.across(intra), inter))

    def residual_owners(self, team: TeamShape) -> tuple[int, ...]:
        """Return, of the ranks at this rank's place on every node, those for whose shards `inter` keeps residuals."""
        intra, inter, average = team.intra, team.inter, alone(self._across(team), team)
        if intra is None or inter is None:
            return average.residual_owners(inter or team)
        return tuple(intra.rank + intra.size * node for node in average.residual_owners(inter))

    # --------------------------------------------------------------------------------------- facts

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return the calls of the node, those between nodes, and those of the node again."""
        layout, dtype = buffer.layout, buffer.dtype
        intra, inter = levels_of(self.inter, team)
        if layout.numel == 0:
            return ()
        average = self._across(team)
        if intra is None:
            return alone(average, team).calls(buffer, team.inter or team)
        # Feedback makes the way to the slow network float32.
        summed = torch.promote_types(dtype, torch.float32) if self.residual_paths else dtype
        backend = team.backend(buffer.device or team.default_device)
        form = self._form(team, buffer.nbytes, backend)
        if form == "compress_first":
            assert isinstance(self.inter, LinearAggregator)
            return self.inter.sum_calls(buffer, Sums(team, by_leaders=True))
        if self.intra is not None:
            divided = division(average, layout, dtype, team.leaders)
            mine: Layout | None = divided.layouts[intra.rank] if intra.rank < team.leaders and inter else None
            rows = Rows(self.intra, layout, divided, intra.size, dtype, buffer.step)
            up, down = rows.calls_up(intra), rows.calls_down(intra)
            buffer = replace(buffer, dtype=torch.promote_types(dtype, torch.float32))
        elif form == "reduce_scatter":
            assert inter is not None  # as above
            divided = division(average, layout, dtype, _shards_in(form, team, intra))
            mine = divided.layouts[intra.rank]
            up = call(intra, "reduce_scatter", divided.whole_numel * summed.itemsize)
            down = call(intra, "all_gather", divided.shard_numel * dtype.itemsize)
        else:
            leaders = _shards_in(form, team, intra)
            divided = undivided(layout) if leaders == 1 else division(average, layout, dtype, leaders)
            mine = divided.layouts[intra.rank] if intra.rank < leaders and inter is not None else None
            numel = divided.shard_numel
            up = tuple(chain(*(call(intra, "reduce", numel * summed.itemsize, place) for place in range(leaders))))
            down = tuple(chain(*(call(intra, "broadcast", numel * dtype.itemsize, place) for place in range(leaders))))
        # Rows are encoded from where their elements are, and decoded to there.
        moved = () if divided.in_place or self.intra is not None else (work("copy", "", layout.numel),)
        across = () if mine is None or inter is None else average.calls(replace(buffer, layout=mine), inter)
        return (*moved, *up, *across, *down, *moved)

    @cached_property
    def lossless(self) -> bool:
        """Whether `inter` is lossless, and sums inside are exact."""
        return self.inter.lossless and self.intra is None

    @property
    def error_bound(self) -> float:
        """The bound of `inter`, and those of the two encodings inside, if there are any."""
        inside = 0.0 if self.intra is None else self.intra.error_bound
        return (1 + self.inter.error_bound) * (1 + inside) - 1

    @property
    def start_step(self) -> int:
        """The first step after the warm-up of `inter`, and of `intra`."""
        return max(each.start_step for each in self._levels_of_compression)

    def phase(self, step: int) -> int:
        """Return the later phase of `inter` and `intra`."""
        return max(each.phase(step) for each in self._levels_of_compression)

    def check_capture(self, step: int, team: TeamShape) -> None:
        """Refuse the steps that the aggregator between the nodes refuses."""
        average = self._across(team)
        if levels_of(self.inter, team)[0] is None:
            alone(average, team).check_capture(step, team.inter or team)
        else:  # also where only other ranks of the node talk across
            average.check_capture(step, team.inter or team)
            if self.intra is not None:
                self.intra.check_capture(step, team)

    @cached_property
    def adam(self) -> Adam | None:
        """The Adam of `inter`, which a node's gradient passes through."""
        return self.inter.adam

    @cached_property
    def residual_paths(self) -> tuple[str, ...]:
        """The paths of `intra` and of `inter`, below the levels "intra" and "inter"."""
        return self._paths(self.inter)

    def residual_paths_on(self, team: TeamShape) -> tuple[str, ...]:
        """Return the paths of the aggregator in use on `team`: one level deeper for each level of sites."""
        average = self._across(team)
        if levels_of(self.inter, team)[0] is None:
            return _below("inter", alone(average, team))
        return self._paths(average)

    def divide(self, layout: Layout, dtype: torch.dtype, parts: int) -> tuple[Spans, ...] | None:
        """Return the division of `inter`."""
        return self.inter.divide(layout, dtype, parts)

    @property
    def per_node(self) -> bool:
        """Whether `inter` is so."""
        return self.inter.per_node

    def with_dense(self, patterns: Sequence[str]) -> Aggregator:
        """Return the same with more dense patterns in `inter`."""
        intra = None if self.intra is None else self.intra.with_dense(patterns)
        return replace(self, inter=self.inter.with_dense(patterns), intra=intra)

    def squared_error(self, layout: Layout, buffer: Tensor) -> float:
        """Return the squared errors of `inter` and `intra`."""
        return sum(each.squared_error(layout, buffer) for each in self._levels_of_compression)

    def kernel_costs(self, ranks: int) -> dict[tuple[WorkKind, str], KernelCost]:
        """Return the passes of `inter`, and of what it compresses with inside."""
        inside = {} if self.intra is None else self.intra.kernel_costs(ranks)
        return self.inter.kernel_costs(ranks) | inside

    @property
    def _levels_of_compression(self) -> tuple[Aggregator, ...]:
        return (self.inter,) if self.intra is None else (self.inter, self.intra)

    def _paths(self, average: Aggregator) -> tuple[str, ...]:
        """Return the paths with `average` between; the last is where residuals of other strategies go."""
        inside = () if self.intra is None else _below("intra", self.intra)
        return (*inside, *_below("inter", average))

    def _across(self, team: TeamShape) -> Aggregator:
        """Return the aggregator between the nodes, or the sites, of `team`: `inter`, level by level."""
        return _nested(self.inter, team.sites_above) if self.sites else self.inter

    def _form(self, team: TeamShape, nbytes: int, backend: str) -> str:
        inter, linear, sites = self.inter, isinstance(self.inter, LinearAggregator), team.level != "world"
        return self.form or choose_form(
            backend, nbytes, uniform=team.uniform, lossless=inter.lossless, linear=linear, sites=sites
        )


def _shards_in(form: str, team: TeamShape, intra: TeamShape) -> int:
    """Return how many ranks of a node take a part of a buffer across."""
    return {"reduce_scatter": intra.size, "leaders": team.leaders}.get(form, 1)


@lru_cache(maxsize=1024)
def _nested(inter: Aggregator, levels: int) -> Aggregator:
    """Return `inter` with sums inside on so many levels of sites below it."""
    if levels == 0 or inter.per_node:
        return inter
    if isinstance(inter, Hierarchical):  # its own level is the first of them
        if not inter.sites:
            return inter
        return replace(inter, inter=_nested(inter.inter, levels - 1))
    return Hierarchical(inter=_nested(inter, levels - 1), intra=usual_inside(inter))


def _below(level: str, aggregator: Aggregator) -> tuple[str, ...]:
    return tuple(f"{level}.{path}".rstrip(".") for path in aggregator.residual_paths)
