# SPDX-License-Identifier: Apache-2.0
"""Rows whose bfloat16 numbers travel in 0.713 of their bytes, and arrive bit for bit.

The length of a message has to follow from its number of elements alone: all ranks must agree on it without asking, and
`calls` must describe it. No lossless code does so for every content. So a row begins with a head of 16 bytes, of which
the first four say how many bytes of this rank do not fit: the most of any region. Every rank receives a row of every
other, in an all_gather as in an all_to_all, so all of them know the most of any rank; then all send as many in a second
message. Gradients mostly need none, see kernels.packing. Both messages together are never longer than plain rows of
whole blocks, but for their heads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commopt.compress import Plain
from commopt.feedback import Scratch
from commopt.kernels.packing import pack, packed_nbytes, spare_nbytes, unpack

if TYPE_CHECKING:
    from commopt.aggregate.rows import Region

_HEAD_NBYTES = 16

_log = logging.getLogger("commopt")


@dataclass(frozen=True)
class _Columns:
    """The columns of a region.

    plain: in plain rows.
    packed: in packed rows; as many where the region does not shrink.
    overflow: among the bytes that may not fit into packed rows; none where the region does not shrink.
    """

    plain: slice
    packed: slice
    overflow: slice

    @property
    def shrinks(self) -> bool:
        return bool(self.overflow.start < self.overflow.stop)


@dataclass(frozen=True)
class Packing:
    """How rows are packed.

    regions: the columns of each region; none where rows travel as they are.
    nbytes: of a row.
    numel: of packed elements in a row.
    """

    regions: tuple[_Columns, ...]
    nbytes: int
    numel: int

    @classmethod
    def of(cls, regions: Iterable[Region]) -> Packing:
        """Pack the regions that are bfloat16, where that is shorter."""
        columns, offset, numel, overflow = [], _HEAD_NBYTES, 0, 0
        for region in regions:
            nbytes, encoder, spare = region.nbytes, region.compressor, 0
            if isinstance(encoder, Plain) and encoder.wire_dtype == torch.bfloat16:
                nbytes = min(nbytes, packed_nbytes(region.chunk_numel))
            if nbytes < region.nbytes:
                spare, numel = spare_nbytes(region.chunk_numel), numel + region.chunk_numel
            plain = slice(region.offset, region.offset + region.nbytes)
            columns.append(_Columns(plain, slice(offset, offset + nbytes), slice(overflow, overflow + spare)))
            offset, overflow = offset + nbytes, overflow + spare
        if offset >= columns[-1].plain.stop:
            return cls((), columns[-1].plain.stop, 0)
        return cls(tuple(columns), offset, numel)

    def exchange(
        self, collective: Callable[[Tensor, Tensor], None], received: Tensor, sent: Tensor, rank: int, scratch: Scratch
    ) -> None:
        """Fill the rows `received` as `collective(received, sent)` would: all are uint8 [rows, nbytes of plain rows].

        collective: brings a row of every rank to every rank. `rank` is this one, whose own row need not be unpacked: if
        it is all that is sent, it lies where it would be received.
        """
        device = sent.device
        packed = scratch.take("packed", (len(sent), self.nbytes), torch.uint8, device)
        arrived = scratch.take("packed received", (len(received), self.nbytes), torch.uint8, device)
        overflow = scratch.take("overflow", (len(sent), self.regions[-1].overflow.stop), torch.uint8, device)
        head = torch.tensor([self._pack(sent, packed, overflow), 0, 0, 0], dtype=torch.int32, device=device)
        packed[:, :_HEAD_NBYTES] = head.view(torch.uint8)
        collective(arrived.view(-1), packed.view(-1))
        most = int(arrived[:, :4].contiguous().view(torch.int32).max())
        rest = torch.cat([overflow[:, columns.overflow][:, :most] for columns in self.regions], 1)
        rest_received = scratch.take("overflow received", (len(received), rest.shape[1]), torch.uint8, device)
        if most:
            collective(rest_received.view(-1), rest.view(-1))
        if packed.shape[1] + rest.shape[1] >= sent.shape[1]:
            _warn_once()
        if len(sent) > 1:
            received[rank] = sent[rank]
        for others in (slice(0, rank), slice(rank + 1, len(received))):
            self._unpack(arrived[others], rest_received[others], most, received[others])

    def _pack(self, rows: Tensor, packed: Tensor, overflow: Tensor) -> int:
        """Return the most bytes of a region that do not fit."""
        most = 0
        for columns in self.regions:
            if not columns.shrinks:
                packed[:, columns.packed] = rows[:, columns.plain]
                continue
            targets = packed[:, columns.packed], overflow[:, columns.overflow]
            for source, target, rest in zip(rows[:, columns.plain], *targets, strict=True):
                most = max(most, pack(source.view(torch.bfloat16), target, rest))
        return most

    def _unpack(self, packed: Tensor, overflow: Tensor, most: int, rows: Tensor) -> None:
        widths = [min(most, columns.overflow.stop - columns.overflow.start) for columns in self.regions]
        for columns, rests in zip(self.regions, overflow.split(widths, 1), strict=True):
            if not columns.shrinks:
                rows[:, columns.plain] = packed[:, columns.packed]
                continue
            for source, rest, target in zip(packed[:, columns.packed], rests, rows[:, columns.plain], strict=True):
                unpack(source, rest, target.view(torch.bfloat16))


@cache
def _warn_once() -> None:
    _log.warning(
        "a message took as many bytes as its numbers have: they are of too many magnitudes; where that happens in most "
        "steps, leave out packed=True (hierarchical_bf16: lossless=True)"
    )
