# SPDX-License-Identifier: Apache-2.0
"""Compressed sums inside a site (or a node), around an aggregator between them: rows on the way up, and down again.

Up, each rank encodes a row for the shard of each leader, as in a reduce-scatter over FSDP2 shards. Down, the leader of
a shard encodes its average once more, for all ranks of its site. All sites encode the same values in the same way, so
that all ranks have the same result. The residual of that is the same in every site too: each keeps its share of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from commopt.aggregate.base import Action, Aggregator, call
from commopt.aggregate.compressed import Compressed
from commopt.aggregate.forms import Levels
from commopt.aggregate.reduce_scatter import exchange_rows
from commopt.aggregate.residuals import add_rounding_error
from commopt.aggregate.rows import Region, Shard, ShardedBuffer
from commopt.aggregate.shards import Division, division, reshard, shard_memory
from commopt.aggregate.sums import LinearAggregator
from commopt.compress import Cast, Encoding, ErrorFeedback, Quantize
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext, Layout
from commopt.groups import Team, TeamShape
from commopt.kernels.finite import all_finite, all_true

_STRONG = 0.5
"""The largest error of an encoding that may be made twice on the way down: a sum's residual would feed on itself."""


def check_inside(intra: object, inter: Aggregator) -> None:
    """Raise ConfigurationError unless `intra` can be the compression inside the nodes, or sites, around `inter`."""
    if not isinstance(intra, Compressed) or intra.adam is not None or intra.packed:
        raise ConfigurationError(
            f"Hierarchical(intra={intra!r}) must be a Compressed(...) without adam and packed, or None for exact sums, "
            f"for example intra=Compressed(Quantize(bits=8))"
        )
    compressor = intra.compressor
    if compressor.sparse or compressor.codec_without_zero is not None or compressor.error_bound > _STRONG:
        raise ConfigurationError(
            f"Hierarchical(intra={intra!r}): {compressor} is too weak to encode twice, or does not keep zeros; use "
            f"Quantize(bits=8) or Cast(torch.bfloat16)"
        )
    if inter.per_node or isinstance(innermost(inter), LinearAggregator):
        raise ConfigurationError(
            f"Hierarchical(intra={intra!r}, inter={inter!r}): {type(innermost(inter)).__name__} needs exact sums "
            f"inside nodes, and chooses its own shards; leave intra"
        )


def innermost(aggregator: Aggregator) -> Aggregator:
    """Return the aggregator of the slowest level."""
    while (inter := getattr(aggregator, "inter", None)) is not None:
        aggregator = inter
    return aggregator


def usual_inside(inter: Aggregator) -> Compressed | None:
    """Return the compression inside a site, where `inter` compresses between sites and nothing else was asked for.

    The links of a site are those of its nodes: often so slow that float32 would take longer there than compressed rows
    between sites. 16 bits stay 16 bits, and what is shorter travels as 8 bits: at no rate that was priced do 16 bits or
    exact sums cost less (docs/performance.md). Exact sums stay exact, and factors are short as they are.
    """
    if not isinstance(inter, Compressed) or inter.adam is not None:
        return None
    if isinstance(inter.compressor, Cast):
        return replace(inter, packed=False)
    return Compressed(Quantize(bits=8, start_step=inter.start_step), inter.feedback, inter.dense)


class Rows:
    """The rows of one buffer inside a team of ranks, of which the first have a shard each."""

    def __init__(
        self, intra: Compressed, layout: Layout, divided: Division, ranks: int, dtype: torch.dtype, step: int | None
    ) -> None:
        """layout: of the buffer. dtype: of the result. step: None for the step after all warm-up."""
        empty = Layout(())
        layouts = [*divided.layouts, *(empty for _ in range(ranks - len(divided.layouts)))]
        shards = (Shard(each, each.offsets, _names(each), divided.shard_numel) for each in layouts)
        self.intra = intra
        self.divided = divided
        self.buffer = ShardedBuffer(tuple(shards), dtype, step)
        self.rows = intra.shard_rows(self.buffer, layout)

    def add_up(self, buffer: Tensor, shard: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Set `shard` [n] to the sum of its rows; the ranks without a shard get zeros. Collective over `team`."""
        inside = context.within("intra", context.layout, self.buffer.dtype)
        exchange_rows(self.rows, self.intra.feedback, buffer, shard, team, scale, inside)

    def spread(self, shard: Tensor, buffer: Tensor, team: Team, sites: int, context: BufferContext) -> Tensor:
        """Set `buffer` to the decoded shards of all leaders; return whether all are finite. Collective over `team`.

        sites: how many do so with the same shards.
        """
        rows, scratch, dtype = self.rows, context.scratch, self.buffer.dtype
        # Not as this rank: all sites round alike, values and residuals.
        inside = replace(context.within("intra", context.layout), rank=team.rank)
        sent = rows.take(1, "sent", scratch, shard.device).zero_()
        residuals = []
        for region in rows.formats[team.rank].regions:
            residual = self._residual(region, shard, sites, inside)
            residuals.append((region, residual))
            encoding = Encoding(region.chunk_numel, 1.0, residual, inside.rng_key("server"))
            region.encode(shard, sent, encoding, scratch)
        received = rows.take(team.size, "received", scratch, shard.device)
        team.all_gather(received.view(-1), sent.view(-1))
        for region, residual in residuals:
            if residual is not None and dtype.itemsize < torch.float32.itemsize:
                exact = scratch.take("decoded", region.numel, torch.float32, shard.device)
                region.compressor.decompress(region.payload(sent), exact, region.chunk_numel)
                add_rounding_error(residual.new, exact, dtype, residual.loss_scale)
        for row, each in enumerate(rows.buffer_formats):
            for region in each.regions:
                region.decode(received[row : row + 1], buffer, dtype, scratch)
        finite = [regions.finite(received) for regions in rows.regions]
        if dtype.itemsize < torch.float32.itemsize:  # the cast may overflow what was finite
            finite.append(all_finite(buffer, dtype))
        return all_true(finite)

    def _residual(self, region: Region, shard: Tensor, sites: int, context: BufferContext) -> ErrorFeedback | None:
        """Return this site's share of the residual of an encoding that all sites make, as one of the whole encoding."""
        if region.compressor.exact:
            return None
        own = context.error_feedback("server", region.layout, self.intra.feedback, shard.device, region.layout)
        if own is None:
            return None
        scale = torch.full((), float(sites), dtype=torch.float32, device=shard.device)
        return replace(own, loss_scale=scale if own.loss_scale is None else own.loss_scale * scale)

    def calls_up(self, team: TeamShape) -> tuple[Action, ...]:
        """Return the actions of `add_up`."""
        return self.intra.reduce_scatter_calls(self.buffer, team)

    def calls_down(self, team: TeamShape) -> tuple[Action, ...]:
        """Return the actions of `spread`."""
        return (*call(team, "all_gather", self.rows.nbytes), *self.rows.work("decode"))


def through_rows(
    intra: Compressed, buffer: Tensor, levels: Levels, leaders: int, scale: float, context: BufferContext
) -> Tensor:
    """Send compressed shards to the first ranks, who talk to those at their place, and compressed averages back.

    Returns whether the result is finite.
    """
    team, inter, average, share = levels
    dtype = context.result_dtype or buffer.dtype
    divided = division(average, context.layout, dtype, leaders)
    mine = divided.layouts[team.rank] if team.rank < leaders and inter is not None else None
    if average.residual_paths and not context.memory.complete:
        reshard(average, divided.name, mine, team, context, buffer.device)
    rows = Rows(intra, context.layout, divided, team.size, dtype, context.step)
    wide = torch.promote_types(dtype, torch.float32)
    shard = shard_memory(divided.shard_numel, buffer.new_empty(0, dtype=wide), context)
    rows.add_up(buffer, shard, team, scale, context)
    if mine is not None and inter is not None and mine.numel:
        average.all_reduce(shard[: mine.numel], inter, 1.0, context.within("inter", mine, wide, share))
    return rows.spread(shard, buffer, team, 1 if inter is None else inter.size, context)


def _names(layout: Layout) -> tuple[str, ...]:
    return tuple(piece.name for piece in layout.pieces)
