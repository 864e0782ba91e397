# SPDX-License-Identifier: Apache-2.0
"""How a buffer is divided into a shard for each rank of a node, which takes it across; residuals follow their shard."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator
from commopt.feedback import BufferContext, Layout, ResidualStore, Scratch, Spans, is_average
from commopt.groups import Team


@dataclass(frozen=True)
class Division:
    """The shards of a buffer, one for each rank of a node.

    name: tells divisions apart.
    segments: the spans of the buffer in each shard.
    layouts: the pieces in each shard.
    shard_numel: the elements of a shard, with padding.
    in_place: whether the buffer itself is its shards, one after the other.
    """

    name: str
    segments: tuple[Spans, ...]
    layouts: tuple[Layout, ...]
    shard_numel: int
    in_place: bool

    @property
    def whole_numel(self) -> int:
        """Number of elements of all shards together."""
        return len(self.segments) * self.shard_numel

    def laid_out(self, values: Tensor, scratch: Scratch) -> Tensor:
        """Return a copy with the shards one after the other."""
        whole = scratch.take("laid out", self.whole_numel, values.dtype, values.device)
        for place, spans in enumerate(self.segments):
            done = place * self.shard_numel
            for begin, end in spans:
                whole[done : done + end - begin] = values[begin:end]
                done += end - begin
            whole[done : (place + 1) * self.shard_numel].zero_()
        return whole

    def result(self, buffer: Tensor, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        """Return memory for all shards of the result, as `dtype`: the buffer itself where that fits."""
        if self.in_place and buffer.dtype == dtype:
            return buffer
        return scratch.take("gathered shards", self.whole_numel, dtype, buffer.device)

    def put_back(self, whole: Tensor, buffer: Tensor) -> None:
        """Put the elements of all shards where they were; nothing is to be done if `whole` is the buffer."""
        if self.in_place:
            if whole is not buffer:
                buffer.copy_(whole)
            return
        for place, spans in enumerate(self.segments):
            done = place * self.shard_numel
            for begin, end in spans:
                buffer[begin:end] = whole[done : done + end - begin]
                done += end - begin


@lru_cache(maxsize=1024)
def division(aggregator: Aggregator, layout: Layout, dtype: torch.dtype, parts: int) -> Division:
    """Divide a buffer, whose values end as `dtype`, as `aggregator` wants it: by default in equal pieces."""
    segments = aggregator.divide(layout, dtype, parts)
    if segments is None:
        numel = ceil(layout.numel / parts)
        ends = [min(place * numel, layout.numel) for place in range(parts + 1)]
        segments = tuple(((begin, end),) for begin, end in pairwise(ends))
        name, in_place = "shards", numel * parts == layout.numel
    else:
        numel = max(sum(end - begin for begin, end in spans) for spans in segments)
        name, in_place = f"segments of {aggregator}", False
    return Division(name, segments, tuple(layout.select(spans) for spans in segments), numel, in_place)


def undivided(layout: Layout) -> Division:
    """Return the buffer as the only shard, that of a leader."""
    return Division("leader", (((0, layout.numel),),), (layout,), layout.numel, True)


def shard_memory(numel: int, like: Tensor, context: BufferContext) -> Tensor:
    """Return memory for this rank's shard, which the levels around this one do not use."""
    return context.scratch.take(f"{context.path} shard".strip(), numel, like.dtype, like.device)


def reshard(
    inter: Aggregator,
    division_name: str,
    mine: Layout | None,
    intra: Team,
    context: BufferContext,
    device: torch.device,
) -> None:
    """Move the residuals of the level between nodes (or sites) to the rank of the node that sends their elements.

    When a buffer is new, or divided anew. Each rank adds its residuals of the buffer's parameters to zeros, so that
    adding up moves them exactly. Where several ranks hold an average of the same elements, as after a load, the mean is
    taken. Where every rank had "whole" buffers of its own and still has, nothing moves.

    mine: the pieces that this rank sends, None for none.
    """
    store, path = context.store, context.within("inter", context.layout).path
    if store is None:
        return
    before = {how for other, how in store.divisions.get(path, {}).items() if other.shares_names(context.layout)}
    if not store.divides_anew(path, context.layout, division_name) or before == {division_name} == {"whole"}:
        return
    paths = [f"{path}.{part}".rstrip(".") for part in inter.residual_paths]
    factors_of = frozenset() if mine is None else mine.names
    if division_name == "whole":  # where all ranks of the node need the same
        factors_of = frozenset() if before else context.layout.names
    store.factors.forget(path, context.layout.names - factors_of)
    for each in paths:
        store.release(each, context.layout)
    # Sums of equal values are exact in float64, and so are their means: all nodes must come to the same.
    dtype = torch.float64 if any(map(is_average, paths)) else torch.float32
    for each in paths:  # one after the other, as each takes memory
        _move(each, mine, intra, dtype, context, store, device)


def _move(
    path: str,
    mine: Layout | None,
    intra: Team,
    dtype: torch.dtype,
    context: BufferContext,
    store: ResidualStore,
    device: torch.device,
) -> None:
    """Add up, as `dtype`, what ranks of a node have waiting at `path`, or take the mean of averages; keep `mine`."""
    moving = store.pop(path, context.layout, device)
    holders = (moving != 0).float() if is_average(path) else None
    moving = moving.to(dtype)
    intra.all_reduce(moving)
    if holders is not None:
        intra.all_reduce(holders)
        moving /= holders.clamp_(min=1.0)
    if mine is not None:
        parts = [moving[first:last] for first, last in context.layout.spans_of(mine)]
        store.add(path, mine, (torch.cat(parts) if parts else moving[:0]).float())
