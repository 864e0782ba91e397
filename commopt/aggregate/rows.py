# SPDX-License-Identifier: Apache-2.0
"""How a buffer becomes rows of payload: one row per chunk, in which compressed and dense elements travel together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from commopt.aggregate.base import Step, call, work
from commopt.compress import Cast, Compressor, Exact
from commopt.feedback import Layout, Piece, Scratch, Spans, joined_spans, matches
from commopt.groups import Team, TeamShape

if TYPE_CHECKING:
    from commopt.aggregate.packed import Packing

Primitive = Literal["all_gather", "all_to_all"]


@dataclass(frozen=True)
class Region:
    """The elements of a buffer that one compressor encodes, cut into chunks of `chunk_numel`, the last ones shorter.

    In a row they take `nbytes` bytes from `offset` on. `dense`: they are not compressed, just rounded as the buffer is.
    """

    compressor: Compressor
    spans: Spans
    layout: Layout
    chunk_numel: int
    offset: int
    nbytes: int
    dense: bool

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return self.layout.numel

    def payload(self, rows: Tensor) -> Tensor:
        """Return the region's columns of `rows`."""
        return rows[:, self.offset : self.offset + self.nbytes]

    def chunk(self, place: int) -> tuple[int, int]:
        """Return where chunk `place` begins and ends in the region."""
        return min(place * self.chunk_numel, self.numel), min((place + 1) * self.chunk_numel, self.numel)

    def read(self, buffer: Tensor, scratch: Scratch) -> Tensor:
        """Return the region's elements of `buffer` in one piece: itself where that will do."""
        if len(self.spans) == 1:
            begin, end = self.spans[0]
            return buffer[begin:end]
        joined = scratch.take(f"region at {self.offset}", self.numel, buffer.dtype, buffer.device)
        return torch.cat([buffer[begin:end] for begin, end in self.spans], out=joined)

    def target(self, buffer: Tensor, dtype: torch.dtype, numel: int, scratch: Scratch) -> Tensor:
        """Return where to decode `numel` elements as `dtype`: the buffer itself where it fits."""
        if buffer.dtype == dtype and buffer.numel() == self.numel == numel:
            return buffer
        return scratch.take("decoded", numel, dtype, buffer.device)

    def write(self, buffer: Tensor, values: Tensor) -> None:
        """Put `values` where `read` found them, unless `target` has put them there already."""
        if values.data_ptr() == buffer.data_ptr():
            return
        targets = [buffer[begin:end] for begin, end in self.spans]
        torch._foreach_copy_(targets, list(values.split([target.numel() for target in targets])))


@dataclass(frozen=True)
class RowFormat:
    """The regions of a buffer, side by side in rows of `nbytes` bytes; the values end as `dtype`.

    packed: bfloat16 numbers travel in fewer bytes, exactly.
    """

    regions: tuple[Region, ...]
    nbytes: int
    dtype: torch.dtype
    packed: bool = False

    @cached_property
    def rounds(self) -> bool:
        """Whether float32 sums have to be rounded in the end."""
        return self.dtype.itemsize < torch.float32.itemsize

    @cached_property
    def packing(self) -> Packing | None:
        """How its bfloat16 numbers travel; None where all travels as it is."""
        if not self.packed:
            return None
        from commopt.aggregate.packed import Packing  # few need it

        packing = Packing.of(self.regions)
        return packing if packing.parts else None

    def take(self, count: int, tag: str, scratch: Scratch, device: torch.device) -> Tensor:
        """Return memory for `count` rows."""
        return scratch.take(tag, (count, self.nbytes), torch.uint8, device)

    def travel(self, primitive: Primitive, team: Team, received: Tensor, sent: Tensor, scratch: Scratch) -> None:
        """Bring rows to where `primitive` brings them. Collective."""
        collective = team.all_gather if primitive == "all_gather" else team.all_to_all
        if self.packing is None:
            collective(received.view(-1), sent.view(-1))
        else:
            self.packing.exchange(collective, received, sent, team.rank, scratch)

    def travels(self, primitive: Primitive, team: TeamShape, rows: int) -> tuple[Step, ...]:
        """Return what `travel` takes to send `rows` rows, without what does not fit into a packed one."""
        if self.packing is None:
            return call(team, primitive, self.nbytes * rows)
        numel = self.packing.numel
        packed, unpacked = work("pack", "", numel * rows), work("unpack", "", numel * (team.size - 1))
        return packed, *call(team, primitive, self.packing.nbytes * rows), unpacked


@lru_cache(maxsize=1024)
def row_format(
    layout: Layout,
    chunks: int,
    compressor: Compressor,
    dense: tuple[str, ...],
    dtype: torch.dtype,
    packed: bool = False,
) -> RowFormat:
    """Cut a buffer, whose values end as `dtype`, into `chunks` rows; what travels dense does so in float32 or less."""
    plain = Cast(dtype) if dtype.itemsize < torch.float32.itemsize else Exact()
    regions: list[Region] = []
    offset = 0
    for encoder, spans in zip((compressor, plain), split(layout, compressor, dtype, dense), strict=True):
        if spans:
            part = layout.select(spans)
            chunk_numel = ceil(part.numel / (chunks * encoder.granularity)) * encoder.granularity
            nbytes = encoder.payload_nbytes(chunk_numel)
            regions.append(Region(encoder, spans, part, chunk_numel, offset, nbytes, encoder is plain))
            offset += nbytes
    return RowFormat(tuple(regions), offset, dtype, packed)


@lru_cache(maxsize=1024)
def split(layout: Layout, compressor: Compressor, dtype: torch.dtype, dense: tuple[str, ...]) -> tuple[Spans, Spans]:
    """Return the spans of a buffer to compress and those to send as they are; neighbours are joined.

    A piece travels dense when its name matches a pattern of `dense` (as in a shell: "*.bias"), when its payload would
    not be smaller than its `dtype` values, or when the compressor does not want parameters of its shape.
    """
    compressed: list[tuple[int, int]] = []
    kept: list[tuple[int, int]] = []
    for offset, piece in zip(layout.offsets, layout.pieces, strict=True):
        worth_it = compressor.should_compress(piece.shape) and _shrinks(piece, compressor, dtype)
        spans = compressed if worth_it and not matches(piece.name, dense) else kept
        spans.append((offset, offset + piece.numel))
    return joined_spans(compressed), joined_spans(kept)


def _shrinks(piece: Piece, compressor: Compressor, dtype: torch.dtype) -> bool:
    granularity = compressor.granularity
    return compressor.payload_nbytes(ceil(piece.numel / granularity) * granularity) < piece.numel * dtype.itemsize
