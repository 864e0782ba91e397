# SPDX-License-Identifier: Apache-2.0
"""The shards of an FSDP2 parameter group, as every rank can tell them, and as rows of payload: no padding travels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from glob import escape

import torch
from torch import Tensor

from commopt.aggregate.rows import row_format
from commopt.compress import Compressor
from commopt.feedback import Layout, Piece, Scratch, Spans, joined_spans, matches
from commopt.sharded.layouts import Part

Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Shard:
    """What one rank owns of a group: the pieces of `layout` begin at `places` of its `numel` elements."""

    layout: Layout
    places: tuple[int, ...]
    numel: int

    def spans_of(self, part: Layout) -> Spans:
        """Return where the pieces of `part`, each the whole of one of these, are; neighbours are joined."""
        places = {piece.name: place for piece, place in zip(self.layout.pieces, self.places, strict=True)}
        return joined_spans((places[piece.name], places[piece.name] + piece.numel) for piece in part.pieces)


@lru_cache(maxsize=4096)
def shard_of(parts: Parts, rank: int, count: int) -> Shard:
    """Return what shard `rank` of `count` has of the parameters of a group, in FSDP's order."""
    pieces, places, numel = [], [], 0
    for part in parts:
        piece = part.of(rank, count).piece(rank, count)
        if piece.numel:
            pieces.append(piece)
            places.append(numel)
        numel += part.padded
    return Shard(Layout(tuple(pieces)), tuple(places), numel)


@dataclass(frozen=True)
class Chunk:
    """Elements of the shard of row `row`, at `spans`, that one compressor encodes as one chunk.

    In the row they take the bytes from `first` to `last`; among all that is encoded alike they are those from `begin`
    to `end`.
    """

    row: int
    spans: Spans
    chunk_numel: int
    first: int
    last: int
    begin: int
    end: int

    def payload(self, rows: Tensor) -> Tensor:
        """Return its columns of `rows`."""
        return rows[:, self.first : self.last]

    def read(self, shard: Tensor, scratch: Scratch, tag: str = "chunk") -> Tensor:
        """Return its elements of `shard` in one piece: themselves, or in the memory of `tag` where they are not."""
        if len(self.spans) == 1:
            begin, end = self.spans[0]
            return shard[begin:end]
        joined = scratch.take(tag, self.end - self.begin, shard.dtype, shard.device)
        return torch.cat([shard[begin:end] for begin, end in self.spans], out=joined)

    def write(self, shard: Tensor, values: Tensor) -> None:
        """Put `values` where `read` finds them."""
        targets = [shard[begin:end] for begin, end in self.spans]
        torch._foreach_copy_(targets, list(values.split([target.numel() for target in targets])))


@dataclass(frozen=True)
class Kind:
    """What one compressor encodes of several rows: `layout`, row after row. dense: it is rounded only, if at all."""

    compressor: Compressor
    layout: Layout
    chunks: tuple[Chunk, ...]
    dense: bool


@dataclass(frozen=True)
class Rows:
    """One row of payload for each of several shards; all are as long as the longest."""

    shards: tuple[Shard, ...]
    kinds: tuple[Kind, ...]
    nbytes: int

    @cached_property
    def layout(self) -> Layout:
        """All that is in them."""
        return Layout(tuple(piece for kind in self.kinds for piece in kind.layout.pieces))

    def take(self, count: int, tag: str, scratch: Scratch, device: torch.device) -> Tensor:
        """Return memory for `count` rows."""
        return scratch.take(tag, (count, self.nbytes), torch.uint8, device)


@lru_cache(maxsize=1024)
def rows_of(
    parts: Parts,
    owners: tuple[int, ...],
    size: int,
    compressor: Compressor,
    dense: tuple[str, ...],
    dtype: torch.dtype,
) -> Rows:
    """Return the rows for the shards of `owners`, which are ranks of `size`; values end as `dtype`.

    dense: patterns of the names of parameters that travel as they are, beside those that would not shrink.
    """
    shards = tuple(shard_of(parts, owner, size) for owner in owners)
    # Patterns are of parameters; what is cut along another dimension than the first has a name of its own.
    cut = [part for part in parts if part.dim and matches(part.name, dense)]
    dense += tuple(escape(part.called(owner, size)) for part in cut for owner in owners)
    formats = [row_format(shard.layout, 1, compressor, dense, dtype) for shard in shards]
    kinds = []
    for is_dense in (False, True):
        chunks: list[Chunk] = []
        pieces: list[Piece] = []
        encoder, begin = compressor, 0
        for row, (shard, regions) in enumerate(zip(shards, formats, strict=True)):
            for region in regions.regions:
                if region.dense == is_dense:
                    spans, end = shard.spans_of(region.layout), begin + region.numel
                    columns = (region.offset, region.offset + region.nbytes)
                    chunks.append(Chunk(row, spans, region.chunk_numel, *columns, begin, end))
                    pieces += region.layout.pieces
                    encoder, begin = region.compressor, end
        if chunks:
            kinds.append(Kind(encoder, Layout(tuple(pieces)), tuple(chunks), is_dense))
    return Rows(shards, tuple(kinds), max(each.nbytes for each in formats))
