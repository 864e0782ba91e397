"""How a buffer is divided over the ranks of a node, so that each takes its part across the network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator
from commopt.feedback import Layout, Spans
from commopt.feedback.scratch import Scratch


@dataclass(frozen=True)
class Division:
    """What each rank is given: spans of the buffer, padded to `shard_numel` elements. `name` tells divisions apart."""

    name: str
    segments: tuple[Spans, ...]
    layouts: tuple[Layout, ...]
    shard_numel: int
    in_place: bool  # the buffer itself is its shards, one after the other

    @property
    def whole_numel(self) -> int:
        """Number of elements of all shards together."""
        return len(self.segments) * self.shard_numel

    def laid_out(self, values: Tensor, scratch: Scratch) -> Tensor:
        """Return the shards one after the other: `values` itself, or a copy."""
        if self.in_place:
            return values
        whole = scratch.take("laid out", self.whole_numel, values.dtype, values.device)
        for place, spans in enumerate(self.segments):
            done = place * self.shard_numel
            for begin, end in spans:
                whole[done : done + end - begin] = values[begin:end]
                done += end - begin
            whole[done : (place + 1) * self.shard_numel].zero_()
        return whole

    def target(self, buffer: Tensor, scratch: Scratch) -> Tensor:
        """Return memory for all shards, in the end to be given to `put_back`."""
        if self.in_place:
            return buffer
        return scratch.take("gathered shards", self.whole_numel, buffer.dtype, buffer.device)

    def put_back(self, whole: Tensor, buffer: Tensor) -> None:
        """Put the elements of all shards where they were."""
        if self.in_place:
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
    name = "shards" if segments is None else f"segments of {aggregator}"
    if segments is None:
        numel = ceil(layout.numel / parts)
        ends = [min(place * numel, layout.numel) for place in range(parts + 1)]
        segments = tuple(((begin, end),) for begin, end in pairwise(ends))
        in_place = numel * parts == layout.numel
    else:
        numel = max(sum(end - begin for begin, end in spans) for spans in segments)
        in_place = False
    return Division(name, segments, tuple(layout.select(spans) for spans in segments), numel, in_place)
