# SPDX-License-Identifier: Apache-2.0
"""Rows whose bfloat16 numbers travel in 0.719 of their bytes: what arrives is bit for bit what was sent.

How long a message is has to follow from its number of elements alone: all ranks must agree on it without asking, and
what `calls` says must be what is sent. No lossless code does so for every content. So a row begins with 16 bytes, of
which the first says whether all that this rank sends fits. Every rank receives a row of every other, in an all_gather
as in an all_to_all, so all of them know alike when something did not; then all send their rows once more, as they
are. That takes 1.72 times the bytes and is always exact. Gradients are far from it: see kernels.packing, which needs
half of its list for them.
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
from commopt.kernels.packing import pack, packed_nbytes, unpack

if TYPE_CHECKING:
    from commopt.aggregate.rows import Region

_HEAD_NBYTES = 16

_log = logging.getLogger("commopt")


@dataclass(frozen=True)
class _Part:
    """The columns of a region in plain rows and in packed ones; as many where it does not shrink."""

    plain: slice
    packed: slice
    shrinks: bool


@dataclass(frozen=True)
class Packing:
    """How rows of these regions are packed. numel: of packed elements in a row; 0 where rows travel as they are."""

    parts: tuple[_Part, ...]
    nbytes: int
    numel: int

    @classmethod
    def of(cls, regions: Iterable[Region]) -> Packing:
        """Pack what is bfloat16, where that is shorter."""
        parts, offset, numel = [], _HEAD_NBYTES, 0
        for region in regions:
            nbytes, encoder = region.nbytes, region.compressor
            if isinstance(encoder, Plain) and encoder.wire_dtype == torch.bfloat16:
                nbytes = min(nbytes, packed_nbytes(region.chunk_numel))
            plain = slice(region.offset, region.offset + region.nbytes)
            parts.append(_Part(plain, slice(offset, offset + nbytes), nbytes < region.nbytes))
            offset += nbytes
            numel += region.chunk_numel if nbytes < region.nbytes else 0
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
        packed = scratch.take("packed", (len(sent), self.nbytes), torch.uint8, sent.device)
        arrived = scratch.take("packed received", (len(received), self.nbytes), torch.uint8, sent.device)
        packed[:, :_HEAD_NBYTES] = 0 if self._pack(sent, packed) else 1
        collective(arrived.view(-1), packed.view(-1))
        if arrived[:, 0].any():
            _tell()
            return collective(received.view(-1), sent.view(-1))
        if len(sent) > 1:
            received[rank] = sent[rank]
        for others in (slice(0, rank), slice(rank + 1, len(received))):
            self._unpack(arrived[others], received[others])

    def _pack(self, rows: Tensor, packed: Tensor) -> bool:
        for part in self.parts:
            if not part.shrinks:
                packed[:, part.packed] = rows[:, part.plain]
                continue
            for source, target in zip(rows[:, part.plain], packed[:, part.packed], strict=True):
                if not pack(source.view(torch.bfloat16), target):
                    return False
        return True

    def _unpack(self, packed: Tensor, rows: Tensor) -> None:
        for part in self.parts:
            if not part.shrinks:
                rows[:, part.plain] = packed[:, part.packed]
                continue
            for source, target in zip(packed[:, part.packed], rows[:, part.plain], strict=True):
                unpack(source, target.view(torch.bfloat16))


@cache
def _tell() -> None:
    _log.warning(
        "a message did not fit into 0.72 of its bytes and is sent once more, as it is: its numbers are of too many "
        "magnitudes; where that happens in most steps, leave out packed=True (hierarchical_bf16: lossless=True)"
    )
