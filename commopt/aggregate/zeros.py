# SPDX-License-Identifier: Apache-2.0
"""Elements that were exactly zero on all ranks in every step so far stay exactly zero.

Signs with a magnitude, and levels none of which is zero, turn a zero into plus or minus something. An optimizer that
divides by a norm of its own would move such elements by whole learning rates. So all ranks know, alike, which elements
were ever touched, that is other than zero on some rank. The others are masked: they decode to zero, and a rank's own
values of them stay in its residual.

In the first step of a buffer ranks exchange which elements are touched. Later ones that are touched for the first time
take no message, since elements have a sign bit: the bit of a masked element tells whether it was touched on this rank,
and from the next step on it is a sign. Without error feedback no residual would keep its value until then, so ranks
exchange in every step which of the masked elements are touched. Where the host knows of no masked element, nothing is
done.
PowerSGD's matrices are in zero_matrices, the shards of FSDP2 in zero_rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from commopt.aggregate.residuals import unscaled
from commopt.aggregate.rows import Region
from commopt.compress import ErrorFeedback
from commopt.feedback import BufferContext, ResidualStore
from commopt.groups import Team
from commopt.kernels.codec import Codec

_AT_ONCE_ON_CPU = 2**15  # as many as stay in a cache
_AT_ONCE = 2**20  # masked elements, each of which takes some 60 bytes meanwhile


class ZeroMask:
    """The elements of one region of a buffer that are masked: 5 bytes for each.

    indices: of elements, int32 where that suffices, ascending.
    active: which of them are masked still, bool, as only a host can leave out the others.
    empty: whether there are none.
    asks_host: as a mask of matrices may.
    """

    asks_host: ClassVar[bool] = False

    def __init__(self, masked: Tensor) -> None:
        """masked: bool [elements of the region]."""
        self._calls = 0
        dtype = torch.int32 if masked.numel() < 2**31 else torch.int64
        at_once = _at_once(masked.device)
        found = [
            (masked[begin : begin + at_once].nonzero().view(-1) + begin).to(dtype)
            for begin in range(0, masked.numel(), at_once)
        ]
        self._set(torch.cat(found) if found else masked.new_empty(0, dtype=dtype))

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.indices.nbytes + self.active.nbytes

    def state(self, copy: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""
        return {"elements": copy(self.indices), "active": copy(self.active)}

    def parts(self, begin: int | None = None, end: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the masked elements from `begin` to `end`, some at a time: indices, int64, and whether active.

        The second is part of the mask, and may be written to.
        """
        here = slice(0, len(self.indices)) if begin is None or end is None else self.within(begin, end)
        at_once = _at_once(self.indices.device)
        for first in range(here.start, here.stop, at_once):
            part = slice(first, min(first + at_once, here.stop))
            yield self.indices[part].long(), self.active[part]

    def _set(self, indices: Tensor) -> None:
        self.indices = indices
        self.active = torch.ones_like(indices, dtype=torch.bool)
        self.empty = not len(indices)
        self._slices: dict[tuple[int, int], slice] = {}

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors, which are others once elements were left out."""
        return self.indices, self.active

    def shrink(self) -> None:
        """Leave out inactive elements: at once on a CPU; on a GPU, where the host waits for it, ever more rarely."""
        self._calls += 1
        on_gpu = self.indices.is_cuda
        if on_gpu and not (_is_power_of_two(self._calls) and not torch.cuda.is_current_stream_capturing()):
            return
        if not bool(self.active.all()):
            self._set(self.indices[self.active])

    def within(self, begin: int, end: int) -> slice:
        """Return which of the indices are of elements from `begin` to `end`."""
        if (begin, end) not in self._slices:
            bounds = torch.tensor([begin, end], dtype=self.indices.dtype, device=self.indices.device)
            self._slices[begin, end] = slice(*torch.searchsorted(self.indices, bounds).tolist())
        return self._slices[begin, end]


def _at_once(device: torch.device) -> int:
    return _AT_ONCE_ON_CPU if device.type == "cpu" else _AT_ONCE


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


@dataclass(frozen=True)
class SignBitFlags:
    """Flags in the sign bits of packed codes: which masked elements are touched. Their other bits are 0."""

    codec: Codec

    def write(self, rows: Tensor, chunk_numel: int, indices: Tensor, active: Tensor, touched: Tensor) -> None:
        """Put flags into rows of payload, chunk after chunk, in place. active, touched: bool [indices]."""
        codes, row, byte, shift = self._find(rows, chunk_numel, indices)
        everything, sign = (1 << self.codec.bits) - 1, 1 << (self.codec.bits - 1)
        now = codes[row, byte].bitwise_right_shift(shift) & everything
        # Codes of one byte are added up by turns: the addend is the difference to the present byte, modulo 256.
        change = torch.where(active, touched.to(torch.uint8) * sign - now, 0).bitwise_left_shift(shift)
        codes.index_put_((row, byte), change, accumulate=True)

    def read(self, rows: Tensor, chunk_numel: int, indices: Tensor) -> Tensor:
        """Return the flags of elements: bool [indices]."""
        codes, row, byte, shift = self._find(rows, chunk_numel, indices)
        return codes[row, byte].bitwise_right_shift(shift).bitwise_and(1 << (self.codec.bits - 1)).ne(0)

    def any_of(self, rows: Tensor, chunk_numel: int, indices: Tensor) -> Tensor:
        """Return whether a flag is set in any of the rows, all of which are of the same elements."""
        found = self.read(rows[:1], chunk_numel, indices)
        for number in range(1, len(rows)):
            found |= self.read(rows[number : number + 1], chunk_numel, indices)
        return found

    def _find(self, rows: Tensor, chunk_numel: int, indices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the codes of rows, and for each index its row, its byte there and the place of its code in that."""
        bits = self.codec.bits
        inside = indices % chunk_numel
        shift = (inside % (8 // bits) * bits).to(torch.uint8)
        return rows[:, : self.codec.codes_nbytes(chunk_numel)], indices // chunk_numel, inside // (8 // bits), shift


class MaskedRegion:
    """The masked elements of a region in one step of one rank; made before the region is encoded."""

    def __init__(self, codec: Codec, mask: ZeroMask) -> None:
        self._flags = SignBitFlags(codec)
        self._mask = mask

    @staticmethod
    def may_be(region: Region, context: BufferContext) -> bool:
        """Return whether `of` may find masked elements, for which it needs the values."""
        if region.compressor.codec_without_zero is None or context.store is None:
            return False
        mask = context.store.untouched.get((context.path, region.layout))
        return mask is None or not mask.empty

    @classmethod
    def of(
        cls,
        region: Region,
        values: Tensor,
        scale: float,
        residual: ErrorFeedback | None,
        team: Team,
        context: BufferContext,
    ) -> MaskedRegion | None:
        """Return the masked elements; None for none, and without a store.

        Collective the first time, and without a residual as long as there are any. The rank is about to send
        `scale * values` plus the residual.
        """
        codec, store = region.compressor.codec_without_zero, context.store
        if codec is None or store is None:
            return None
        mask = store.untouched.get((context.path, region.layout))
        if mask is None:
            known = store.touched_before.pop((context.path, region.layout), None)
            known = None if known is None else known.to(values.device)
            mask = ZeroMask(~_agree(values, scale, residual, team, store, known))
            store.untouched[context.path, region.layout] = mask
        if residual is None and not mask.empty:
            parts = [values_to_send(values, scale, None, indices) != 0 for indices, _ in mask.parts()]
            now = torch.cat(parts)
            mask.active &= ~_agree(now, 1.0, None, team, store, now)
        return None if mask.empty else cls(codec, mask)

    def encoded(
        self, values: Tensor, scale: float, payload: Tensor, chunk_numel: int, residual: ErrorFeedback | None
    ) -> None:
        """Flag the masked elements that are touched here; their values stay in the residual."""
        for indices, active in self._mask.parts():
            own = values_to_send(values, scale, residual, indices)
            self._flags.write(payload, chunk_numel, indices, active, own != 0)
            if residual is not None:
                put_masked(residual.new, indices, active, own)

    def summed(
        self, received: Tensor, payload: Tensor, chunk_numel: int, begin: int, end: int, residual: ErrorFeedback | None
    ) -> None:
        """Flag, in the encoded sum of the elements from `begin` to `end`, those that any rank has touched."""
        for in_region, active in self._mask.parts(begin, end):
            indices = in_region - begin
            touched = self._flags.any_of(received, chunk_numel, indices)
            if residual is not None:
                old = residual.old[indices]
                touched |= old != 0
                put_masked(residual.new, indices, active, old)
            self._flags.write(payload, chunk_numel, indices, active, touched)

    def clear(self, values: Tensor, begin: int = 0) -> None:
        """Set the masked elements among `values`, which begin at element `begin`, to zero."""
        for in_region, active in self._mask.parts(begin, begin + values.numel()):
            indices = in_region - begin
            values[indices] = values[indices].masked_fill(active, 0.0)

    def arrived(self, rows: Tensor, chunk_numel: int, *, chunks: bool) -> None:
        """Take over, last of all, the flags in the rows of all ranks. chunks: each row is one chunk, not everything."""
        read = self._flags.read if chunks else self._flags.any_of
        for indices, active in self._mask.parts():
            active &= ~read(rows, chunk_numel, indices)
        self._mask.shrink()


def put_masked(residual: Tensor, indices: Tensor, active: Tensor, values: Tensor) -> None:
    """Put `values` where elements of a residual are masked."""
    residual[indices] = torch.where(active, values, residual[indices])


def values_to_send(
    values: Tensor, scale: float, residual: ErrorFeedback | None, indices: Tensor | None = None
) -> Tensor:
    """Return `scale * values` plus the residual, in its units: float32, of some elements or of all."""
    old = None if residual is None else residual.old
    if indices is not None:
        values, old = values[indices], None if old is None else old[indices]
    sent = values.float() * unscaled(scale, None if residual is None else residual.loss_scale)
    return sent if residual is None or old is None else sent.add_(old, alpha=residual.decay)


def packed_bits(flags: Tensor, nbytes: int) -> Tensor:
    """Return flags [n] as bits, in `nbytes` bytes or more than they take."""
    padded = torch.zeros(8 * nbytes, dtype=torch.bool, device=flags.device)
    padded[: flags.numel()] = flags
    return (padded.view(-1, 8) * _weights(flags.device)).sum(1, dtype=torch.uint8)


def unpacked_bits(packed: Tensor) -> Tensor:
    """Return the bits of bytes [n]: bool [8 n]."""
    return (packed.unsqueeze(-1) & _weights(packed.device)).ne(0).view(-1)


def _weights(device: torch.device) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return torch.ones_like(shifts) << shifts


def _any_of(codes: Tensor) -> Tensor:
    found = codes[0].clone()
    for row in codes[1:]:
        found |= row
    return found


def _agree(
    values: Tensor, scale: float, residual: ErrorFeedback | None, team: Team, store: ResidualStore, known: Tensor | None
) -> Tensor:
    """Return which elements any rank of `team` is about to send as anything but zero, or knows to be touched: bool.

    One bit each, to a server of each part and back.
    known: those of a checkpoint, in place of what this rank is about to send; None where there is none.
    """
    size, numel, at_once = team.size, values.numel(), _at_once(values.device)
    part_nbytes = -(-numel // (8 * size))
    mine = torch.zeros(part_nbytes * size, dtype=torch.uint8, device=values.device)
    for begin in range(0, numel, at_once):
        part = values[begin : begin + at_once]
        own = None if residual is None else residual.cut(begin, begin + len(part))
        target = mine[begin // 8 : -(-(begin + len(part)) // 8)]
        here = values_to_send(part, scale, own) != 0 if known is None else known[begin : begin + len(part)]
        target.copy_(packed_bits(here, len(target)))
    received = torch.empty_like(mine)
    store.beside += team.wire.all_to_all(mine.nbytes) + team.wire.all_gather(part_nbytes)
    team.all_to_all(received, mine)
    team.all_gather(mine, _any_of(received.view(size, part_nbytes)))
    touched = torch.empty(numel, dtype=torch.bool, device=values.device)
    for begin in range(0, numel, at_once):
        part = touched[begin : begin + at_once]
        part.copy_(unpacked_bits(mine[begin // 8 : -(-(begin + len(part)) // 8)])[: len(part)])
    return touched
