# SPDX-License-Identifier: Apache-2.0
"""How a buffer becomes rows of payload: one row per chunk, in which compressed and dense elements travel together.

`RowFormat` is the one format of a row: for the chunks of a bucket, for a shard of FSDP2 and for a message of the
parameter server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from glob import escape
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from commopt.aggregate.base import Action, WorkKind, call, work
from commopt.compress import Blockwise, Cast, Compressor, Encoding, Exact
from commopt.feedback import Layout, Piece, Scratch, Spans, joined_spans, matches
from commopt.groups import Team, TeamShape
from commopt.kernels.codec import Scattered
from commopt.kernels.cpu import copy_parts, parts_of, takes_scattered
from commopt.kernels.finite import all_true

if TYPE_CHECKING:
    from commopt.aggregate.packed import Packing

Primitive = Literal["all_gather", "all_to_all"]


@dataclass(frozen=True)
class Region:
    """The elements of a buffer that one compressor encodes, cut into chunks of `chunk_numel`, the last ones shorter.

    compressor: encodes each chunk to its part of a row.
    spans: where the elements are in the buffer.
    layout: the pieces they belong to.
    offset: the byte of a row at which the part begins.
    nbytes: the length of the part.
    dense: the elements are not compressed, only rounded to the dtype of the result.
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

    def chunk(self, number: int) -> tuple[int, int]:
        """Return where chunk `number` begins and ends in the region."""
        return min(number * self.chunk_numel, self.numel), min((number + 1) * self.chunk_numel, self.numel)

    def chunk_layout(self, number: int) -> Layout:
        """Return the pieces of chunk `number`: always the same object, which is found at once where it is a key."""
        if number not in self._chunk_layouts:
            self._chunk_layouts[number] = self.layout.cut(*self.chunk(number))
        return self._chunk_layouts[number]

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor]:
        """The copies that `read` and `write` make."""
        parts = _parts_in(self.spans)
        return parts_of(parts), parts_of((there, here, numel) for here, there, numel in parts)

    def _parts_on(self, device: torch.device) -> Tensor:
        """Return the copies that `read` makes, for kernels on a device."""
        if device.type == "cpu":
            return self._parts[0]
        known = self._parts_by_device.get(device)
        if known is None:
            known = self._parts_by_device[device] = _kept_parts(self.spans, device)
        return known

    @cached_property
    def _parts_by_device(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def _chunk_layouts(self) -> dict[int, Layout]:
        return {}

    def _in_place(self, buffer: Tensor, dtype: torch.dtype | None = None) -> tuple[Blockwise, Scattered] | None:
        """Return the compressor and the region's elements where they are in `buffer`; None where it cannot use them.

        dtype: what the buffer's must be.
        """
        compressor = self.compressor
        if not isinstance(compressor, Blockwise) or dtype not in (None, buffer.dtype):
            return None
        if not takes_scattered(buffer.device, buffer.dtype):
            return None
        if len(self.spans) == 1:
            begin, end = self.spans[0]
            return compressor, Scattered(buffer[begin:end], None, self.numel)
        return compressor, Scattered(buffer, self._parts_on(buffer.device), self.numel)

    def encode(self, buffer: Tensor, rows: Tensor, encoding: Encoding, scratch: Scratch) -> None:
        """Encode the region's elements of `buffer` into its columns of `rows`."""
        in_place = self._in_place(buffer)
        if in_place is None:
            with scratch.frame():
                self.compressor.compress(self.read(buffer, scratch), self.payload(rows), encoding)
        else:
            compressor, values = in_place
            compressor.compress(values, self.payload(rows), encoding)

    def decode(self, rows: Tensor, buffer: Tensor, dtype: torch.dtype, scratch: Scratch) -> None:
        """Decode the region's columns of `rows`, as `dtype`, to where its elements are in `buffer`."""
        in_place = self._in_place(buffer, dtype)
        if in_place is None:
            with scratch.frame():
                values = self.target(buffer, dtype, self.numel, scratch)
                self.compressor.decompress(self.payload(rows), values, self.chunk_numel)
                self.write(buffer, values)
        else:
            compressor, places = in_place
            compressor.decompress(self.payload(rows), places, self.chunk_numel)

    def accumulate(self, rows: Tensor, buffer: Tensor, scratch: Scratch) -> None:
        """Add up the region's columns of `rows`, each of one chunk, in float32, where its elements are in `buffer`."""
        in_place = self._in_place(buffer, torch.float32)
        if in_place is None:
            with scratch.frame():
                total = self.target(buffer, torch.float32, self.chunk_numel, scratch)
                self.compressor.accumulate(self.payload(rows), total)
                self.write(buffer, total[: self.numel])
        else:
            compressor, places = in_place
            compressor.accumulate(self.payload(rows), places)

    def read(self, buffer: Tensor, scratch: Scratch, tag: str = "region") -> Tensor:
        """Return the region's elements of `buffer` in one piece: a view where they are, else the memory of `tag`."""
        if len(self.spans) == 1:
            begin, end = self.spans[0]
            return buffer[begin:end]
        joined = scratch.take(f"{tag} at {self.offset}", self.numel, buffer.dtype, buffer.device)
        if copy_parts(buffer, joined, self._parts[0]):
            return joined
        return torch.cat([buffer[begin:end] for begin, end in self.spans], out=joined)

    def first(self, buffer: Tensor, numel: int) -> Tensor:
        """Return the region's first `numel` elements of `buffer`, or all that there are."""
        parts = []
        for begin, end in self.spans:
            parts.append(buffer[begin : min(end, begin + numel)])
            numel -= end - begin
            if numel <= 0:
                break
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def target(self, buffer: Tensor, dtype: torch.dtype, numel: int, scratch: Scratch) -> Tensor:
        """Return where to decode `numel` elements as `dtype`: the buffer itself where it fits."""
        if buffer.dtype == dtype and buffer.numel() == numel and self.spans == ((0, numel),):
            return buffer
        return scratch.take("decoded", numel, dtype, buffer.device)

    def write(self, buffer: Tensor, values: Tensor) -> None:
        """Put `values` where `read` found them, unless `target` has put them there already."""
        if values.data_ptr() == buffer.data_ptr() or copy_parts(values, buffer, self._parts[1]):
            return
        targets = [buffer[begin:end] for begin, end in self.spans]
        torch._foreach_copy_(targets, list(values.split([target.numel() for target in targets])))


def _parts_in(spans: Spans) -> list[tuple[int, int, int]]:
    """Return where each span begins in the buffer and among the elements, and its length."""
    ends = accumulate(end - begin for begin, end in spans)
    return [(begin, last - (end - begin), end - begin) for (begin, end), last in zip(spans, ends, strict=True)]


@cache
def _kept_parts(spans: Spans, device: torch.device) -> Tensor:
    """Return the parts on a GPU, kept for good: a CUDA graph may read them as long as the process lives."""
    return parts_of(_parts_in(spans)).to(device)


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
        return packing if packing.regions else None

    def at(self, spans: Iterable[Spans]) -> RowFormat:
        """Return the same rows of a buffer in which the regions are elsewhere."""
        moved = (replace(region, spans=places) for region, places in zip(self.regions, spans, strict=True))
        return replace(self, regions=tuple(moved))

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

    def travels(self, primitive: Primitive, team: TeamShape, rows: int) -> tuple[Action, ...]:
        """Return the actions of `travel` for `rows` sent rows, without the values that do not fit into a packed one."""
        if self.packing is None:
            return call(team, primitive, self.nbytes * rows)
        numel = self.packing.numel
        packed, unpacked = work("pack", "", numel * rows), work("unpack", "", numel * (team.size - 1))
        return packed, *call(team, primitive, self.packing.nbytes * rows), unpacked

    def decode(self, row: Tensor, buffer: Tensor, scratch: Scratch, base: Tensor | None = None) -> None:
        """Put the values of a row of one chunk (uint8 [1, nbytes]) into `buffer`.

        base: the values that are added to compressed regions in float32, which are differences; None for none.
        """
        for region in self.regions:
            if base is None or region.dense:
                region.decode(row, buffer, buffer.dtype, scratch)
                continue
            with scratch.frame():
                values = scratch.take("decoded", region.numel, torch.float32, buffer.device)
                region.compressor.decompress(region.payload(row), values, region.chunk_numel)
                values += region.read(base, scratch)
                region.write(buffer, values)


@lru_cache(maxsize=1024)
def row_format(
    layout: Layout,
    chunks: int,
    compressor: Compressor,
    dense: tuple[str, ...],
    dtype: torch.dtype,
    packed: bool = False,
) -> RowFormat:
    """Cut a buffer, whose values end as `dtype`, into `chunks` rows; dense elements travel as float32 or less."""
    plain = Cast(dtype) if dtype.itemsize < torch.float32.itemsize else Exact()
    regions: list[Region] = []
    offset = 0
    encoders = (compressor.of_chunk(chunks), plain)
    for encoder, spans in zip(encoders, split(layout, compressor, dtype, dense), strict=True):
        if spans:
            selected = layout.select(spans)
            chunk_numel = ceil(selected.numel / (chunks * encoder.granularity)) * encoder.granularity
            nbytes = encoder.payload_nbytes(chunk_numel)
            regions.append(Region(encoder, spans, selected, chunk_numel, offset, nbytes, encoder is plain))
            offset += nbytes
    return RowFormat(tuple(regions), offset, dtype, packed)


@lru_cache(maxsize=1024)
def split(layout: Layout, compressor: Compressor, dtype: torch.dtype, dense: tuple[str, ...]) -> tuple[Spans, Spans]:
    """Return the spans of a buffer to compress, and the spans to send dense; neighbours are joined.

    A piece travels dense when its name matches a pattern of `dense` (as in a shell: "*.bias"), when its payload would
    not be smaller than its `dtype` values, or when the compressor does not want parameters of its shape.
    """
    compressed: list[tuple[int, int]] = []
    uncompressed: list[tuple[int, int]] = []
    for offset, piece in zip(layout.offsets, layout.pieces, strict=True):
        worth_it = compressor.should_compress(piece.shape) and _shrinks(piece, compressor, dtype)
        spans = compressed if worth_it and not matches(piece.name, dense) else uncompressed
        spans.append((offset, offset + piece.numel))
    return joined_spans(compressed), joined_spans(uncompressed)


def _shrinks(piece: Piece, compressor: Compressor, dtype: torch.dtype) -> bool:
    granularity = compressor.granularity
    return compressor.payload_nbytes(ceil(piece.numel / granularity) * granularity) < piece.numel * dtype.itemsize


# ------------------------------------------------------------------------------------------- rows of shards


@dataclass(frozen=True)
class Shard:
    """The pieces that one rank owns of a buffer of FSDP2, with padding behind some of them.

    layout: the pieces.
    offsets: where each piece begins among the `numel` elements.
    parameters: the name of each piece's parameter, which patterns of names are about.
    """

    layout: Layout
    offsets: tuple[int, ...]
    parameters: tuple[str, ...]
    numel: int

    def __hash__(self) -> int:  # that of the layout is computed once
        return hash((self.layout, self.numel))

    @cached_property
    def spans(self) -> Spans:
        """Where the elements are that are no padding."""
        return self.spans_of(self.layout)

    def spans_of(self, selected: Layout) -> Spans:
        """Return where pieces of this shard are; neighbours are joined."""
        offsets = {piece.name: offset for piece, offset in zip(self.layout.pieces, self.offsets, strict=True)}
        return joined_spans((offsets[piece.name], offsets[piece.name] + piece.numel) for piece in selected.pieces)

    def row_format(self, compressor: Compressor, dense: tuple[str, ...], dtype: torch.dtype) -> RowFormat:
        """Return the format of a row that holds the whole shard, as one chunk."""
        row = row_format(self.layout, 1, compressor, dense, dtype)
        return row.at(self.spans_of(each.layout) for each in row.regions)


@dataclass(frozen=True)
class ShardedBuffer:
    """A buffer of whose sum each rank of a team keeps its shard, as data.

    shards: by rank; with their padding all are equally long.
    dtype: of the values.
    step: None for the step after all warm-up.
    """

    shards: tuple[Shard, ...]
    dtype: torch.dtype
    step: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements, with padding."""
        return len(self.shards) * self.shards[0].numel

    def across(self, intra: TeamShape) -> ShardedBuffer:
        """Return the part of the ranks at this rank's place on every node. intra: the ranks of its node."""
        return replace(self, shards=self.shards[intra.rank :: intra.size])


@dataclass(frozen=True)
class RowRegions:
    """The regions of several rows that one compressor encodes; they share one residual, row after row.

    by_row: the number of each row that has such a region, the region of the buffer, and its elements of the residual.
    """

    compressor: Compressor
    dense: bool
    by_row: tuple[tuple[int, Region, slice], ...]

    @cached_property
    def layout(self) -> Layout:
        """The pieces of all regions, in the order of the residual."""
        return Layout(tuple(piece for _, region, _ in self.by_row for piece in region.layout.pieces))

    def finite(self, rows: Tensor) -> Tensor:
        """Return whether everything in these regions of `rows` decodes to finite values: bool, 0-d, on their device."""
        return all_true(
            [self.compressor.finite(region.payload(rows[run]), region.chunk_numel) for run, region in self._runs]
        )

    @cached_property
    def _runs(self) -> list[tuple[slice, Region]]:
        """Rows one after the other in which the region is at the same place, which are looked at as one."""
        runs: list[tuple[slice, Region]] = []
        for row, region, _ in self.by_row:
            if runs:
                run, last = runs[-1]
                if run.stop == row and (last.offset, last.chunk_numel) == (region.offset, region.chunk_numel):
                    runs[-1] = (slice(run.start, row + 1), last)
                    continue
            runs.append((slice(row, row + 1), region))
        return runs


@dataclass(frozen=True)
class ShardRows:
    """One row of payload for each of several shards of a buffer; all rows are as long as the longest.

    formats: of the row of each shard.
    buffer_formats: the same, with the places of regions in the whole buffer.
    regions: the compressed regions of all rows in the whole buffer, then the dense ones, where there are any.
    """

    formats: tuple[RowFormat, ...]
    buffer_formats: tuple[RowFormat, ...]
    regions: tuple[RowRegions, ...]

    @cached_property
    def nbytes(self) -> int:
        """The length of a row."""
        return max(each.nbytes for each in self.formats)

    def take(self, count: int, tag: str, scratch: Scratch, device: torch.device) -> Tensor:
        """Return memory for `count` rows."""
        return scratch.take(tag, (count, self.nbytes), torch.uint8, device)

    def work(self, kind: WorkKind) -> tuple[Action, ...]:
        """Return the work of encoding or decoding all rows."""
        return tuple(work(kind, each.compressor, each.layout.numel) for each in self.regions)


@lru_cache(maxsize=1024)
def shard_rows(
    shards: tuple[Shard, ...],
    compressor: Compressor,
    dense: tuple[str, ...],
    dtype: torch.dtype,
    layout: Layout | None = None,
) -> ShardRows:
    """Return the rows of `shards`, whose values end as `dtype`.

    dense: patterns of the names of parameters that travel uncompressed, beside those that would not shrink.
    layout: of the buffer that the shards are parts of; None where it has one after the other, with their padding.
    """
    named = (
        (piece.name, name)
        for shard in shards
        for piece, name in zip(shard.layout.pieces, shard.parameters, strict=True)
    )
    dense += tuple(escape(called) for called, name in named if called != name and matches(name, dense))
    formats = tuple(shard.row_format(compressor, dense, dtype) for shard in shards)
    whole = tuple(
        each.at(_spans_in(layout, region, row * shards[row].numel) for region in each.regions)
        for row, each in enumerate(formats)
    )
    found = []
    for is_dense in (False, True):
        by_row, done = [], 0
        for row, each in enumerate(whole):
            for region in each.regions:
                if region.dense == is_dense:
                    by_row.append((row, region, slice(done, done + region.numel)))
                    done += region.numel
        if by_row:
            found.append(RowRegions(by_row[0][1].compressor, is_dense, tuple(by_row)))
    return ShardRows(formats, whole, tuple(found))


def _spans_in(layout: Layout | None, region: Region, shard_begin: int) -> Spans:
    """Return where a region of a shard is in the whole buffer."""
    if layout is not None:
        return joined_spans(layout.spans_of(region.layout))
    return tuple((shard_begin + begin, shard_begin + end) for begin, end in region.spans)
