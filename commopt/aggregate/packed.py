# SPDX-License-Identifier: Apache-2.0
"""Rows whose bfloat16 numbers travel in 0.713 of their bytes: what arrives is bit for bit what was sent.

How long a message is has to follow from its number of elements alone: all ranks must agree on it without asking, and
what `calls` says must be what is sent. No lossless code does so for every content. So a row begins with 16 bytes, of
which the first four say how many of this rank's do not fit into one of its parts. Every rank receives a row of every
other, in an all_gather as in an all_to_all, so all of them know alike what is the most; then all send as many in a
second message. Gradients mostly need none, see kernels.packing. Both messages together are never longer than plain
rows of whole blocks, but for their heads.
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
class _Part:
    """The columns of a region in plain rows, in packed ones, and in all that may be beyond these.

    As many and none where it does not shrink.
    """

    plain: slice
    packed: slice
    beyond: slice

    @property
    def shrinks(self) -> bool:
        return bool(self.beyond.start < self.beyond.stop)


@dataclass(frozen=True)
class Packing:
    """How rows of these regions are packed. numel: of packed elements in a row; 0 where rows travel as they are."""

    parts: tuple[_Part, ...]
    nbytes: int
    numel: int

    @classmethod
    def of(cls, regions: Iterable[Region]) -> Packing:
        """Pack what is bfloat16, where that is shorter."""
        parts, offset, numel, beyond = [], _HEAD_NBYTES, 0, 0
        for region in regions:
            nbytes, encoder, spare = region.nbytes, region.compressor, 0
            if isinstance(encoder, Plain) and encoder.wire_dtype == torch.bfloat16:
                nbytes = min(nbytes, packed_nbytes(region.chunk_numel))
            if nbytes < region.nbytes:
                spare, numel = spare_nbytes(region.chunk_numel), numel + region.chunk_numel
            plain = slice(region.offset, region.offset + region.nbytes)
            parts.append(_Part(plain, slice(offset, offset + nbytes), slice(beyond, beyond + spare)))
            offset, beyond = offset + nbytes, beyond + spare
        if offset >= parts[-1].plain.stop:
            return cls((), parts[-1].plain.stop, 0)
        return cls(tuple(parts), offset, numel)

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
        beyond = scratch.take("beyond", (len(sent), self.parts[-1].beyond.stop), torch.uint8, device)
        head = torch.tensor([self._pack(sent, packed, beyond), 0, 0, 0], dtype=torch.int32, device=device)
        packed[:, :_HEAD_NBYTES] = head.view(torch.uint8)
        collective(arrived.view(-1), packed.view(-1))
        most = int(arrived[:, :4].contiguous().view(torch.int32).max())
        rest = torch.cat([beyond[:, part.beyond][:, :most] for part in self.parts], 1)
        rest_received = scratch.take("beyond received", (len(received), rest.shape[1]), torch.uint8, device)
        if most:
            collective(rest_received.view(-1), rest.view(-1))
        if packed.shape[1] + rest.shape[1] >= sent.shape[1]:
            _tell()
        if len(sent) > 1:
            received[rank] = sent[rank]
        for others in (slice(0, rank), slice(rank + 1, len(received))):
            self._unpack(arrived[others], rest_received[others], most, received[others])

    def _pack(self, rows: Tensor, packed: Tensor, beyond: Tensor) -> int:
        """Return the most bytes that do not fit into a part."""
        most = 0
        for part in self.parts:
            if not part.shrinks:
                packed[:, part.packed] = rows[:, part.plain]
                continue
            targets = packed[:, part.packed], beyond[:, part.beyond]
            for source, target, rest in zip(rows[:, part.plain], *targets, strict=True):
                most = max(most, pack(source.view(torch.bfloat16), target, rest))
        return most

    def _unpack(self, packed: Tensor, beyond: Tensor, most: int, rows: Tensor) -> None:
        widths = [min(most, part.beyond.stop - part.beyond.start) for part in self.parts]
        for part, rests in zip(self.parts, beyond.split(widths, 1), strict=True):
            if not part.shrinks:
                rows[:, part.plain] = packed[:, part.packed]
                continue
            for source, rest, target in zip(packed[:, part.packed], rests, rows[:, part.plain], strict=True):
                unpack(source, rest, target.view(torch.bfloat16))


@cache
def _tell() -> None:
    _log.warning(
        "a message took as many bytes as its numbers have: they are of too many magnitudes; where that happens in most "
        "steps, leave out packed=True (hierarchical_bf16: lossless=True)"
    )
