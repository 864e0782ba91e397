# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 numbers in 0.719 of their bytes, exactly: on the CPU, in passes over pieces that stay in the cache.

Gradients that are near each other are of similar magnitude: of the 8 bits of their exponents about 3 tell something.
A message is as long as its number of elements says, whatever they are: mantissa and sign as they are (8 bits), for the
exponent its place in the 7 below the largest of its block of 256 (3 bits) and this largest one (8 bits a block). The
eighth place means: elsewhere; then it stands, whole, in a list that has room for 15 of each 256. Normal numbers need
7 of these. Where the list is too short the message does not hold the numbers, and `pack` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from commopt.kernels.block_codecs import Packer
from commopt.kernels.residual import piece_numel

BLOCK = 256
_LISTED = 15
_ELSEWHERE = 7
_LOWER, _UPPER = 2, 1  # bits of the place, packed apart

_CPU = torch.device("cpu")


def packed_nbytes(numel: int) -> int:
    """Return the bytes of so many numbers, a multiple of 16."""
    blocks = -(-numel // BLOCK)
    return blocks * (BLOCK * (8 + _LOWER + _UPPER) // 8 + 1 + _LISTED)


@torch.no_grad()
def pack(values: Tensor, packed: Tensor) -> bool:
    """Put `values` (bfloat16 [n]) into `packed` (uint8 [packed_nbytes(n)]); return whether they fit."""
    parts, listed, works = _Parts.of(packed), 0, cache(_Work)
    for begin, end, blocks in _pieces(values.numel()):
        work = works(len(blocks))
        count = end - begin
        work.bits[:count] = values[begin:end].view(torch.int16)
        work.bits[count:] = work.bits[count - 1]  # which finds its place
        work.split(parts.lows[blocks.start * BLOCK : blocks.stop * BLOCK])
        largest = torch.amax(work.exponents, 1, keepdim=True, out=parts.largest[blocks.start : blocks.stop])
        torch.sub(work.exponents, largest.clamp(min=_ELSEWHERE - 1).sub_(_ELSEWHERE - 1), out=work.places)
        elsewhere = np.flatnonzero(work.places.numpy() >= _ELSEWHERE)
        if listed + len(elsewhere) > len(parts.listed):
            return False
        parts.listed[listed : listed + len(elsewhere)] = work.exponents.numpy().reshape(-1)[elsewhere]
        listed += len(elsewhere)
        work.places.clamp_(max=_ELSEWHERE)
        work.pack(parts.lower[blocks.start : blocks.stop], parts.upper[blocks.start : blocks.stop])
    parts.listed[listed:] = 0
    return True


@torch.no_grad()
def unpack(packed: Tensor, values: Tensor) -> None:
    """Put what `pack` has put into `packed` back into `values` (bfloat16 [n])."""
    parts, listed, works = _Parts.of(packed), 0, cache(_Work)
    for begin, end, blocks in _pieces(values.numel()):
        work = works(len(blocks))
        work.unpack(parts.lower[blocks.start : blocks.stop], parts.upper[blocks.start : blocks.stop])
        elsewhere = np.flatnonzero(work.places.numpy() == _ELSEWHERE)
        base = parts.largest[blocks.start : blocks.stop].clamp(min=_ELSEWHERE - 1).sub_(_ELSEWHERE - 1)
        torch.add(work.places, base, out=work.exponents)
        work.exponents.numpy().reshape(-1)[elsewhere] = parts.listed[listed : listed + len(elsewhere)]
        listed += len(elsewhere)
        work.join(parts.lows[blocks.start * BLOCK : blocks.stop * BLOCK])
        values[begin:end].view(torch.int16).copy_(work.bits[: end - begin])


def _pieces(numel: int) -> Iterator[tuple[int, int, range]]:
    """Yield where pieces begin and end, and which blocks they are."""
    step = piece_numel(_CPU)
    for begin in range(0, numel, step):
        end = min(begin + step, numel)
        yield begin, end, range(begin // BLOCK, -(-end // BLOCK))


class _Parts(NamedTuple):
    """The parts of a message: bytes of mantissas and signs, places in two planes, largest exponents, and the list."""

    lows: Tensor
    lower: Tensor
    upper: Tensor
    largest: Tensor
    listed: np.ndarray[tuple[int], np.dtype[np.uint8]]

    @classmethod
    def of(cls, packed: Tensor) -> _Parts:
        blocks = len(packed) // packed_nbytes(1)
        sizes = (BLOCK, BLOCK * _LOWER // 8, BLOCK * _UPPER // 8, 1, _LISTED)
        lows, lower, upper, largest, listed = packed.split([blocks * size for size in sizes])
        return cls(lows, lower.view(blocks, -1), upper.view(blocks, -1), largest.view(blocks, 1), listed.numpy())


class _Work:
    """Memory for a piece of so many blocks. bits: int16 [numel]; exponents and places: uint8 [blocks, BLOCK]."""

    def __init__(self, blocks: int) -> None:
        self.bits, self._shifted = torch.empty(2, blocks * BLOCK, dtype=torch.int16)
        self.exponents, self.places, self._plane = torch.empty(3, blocks, BLOCK, dtype=torch.uint8)
        codes = self._plane.view(-1).view(torch.int8)
        self._packers = Packer(codes, _LOWER), Packer(codes, _UPPER)
        self._lower_of, self._upper_of = _spread(_LOWER, torch.int32), _spread(_UPPER, torch.int64) * (1 << _LOWER)
        self._index = torch.empty(blocks * BLOCK // 4, dtype=torch.int32)

    def split(self, lows: Tensor) -> None:
        """Set the exponents to those of the bits, and `lows` to the rest: the mantissa above the sign."""
        torch.bitwise_right_shift(self.bits, 15, out=self._shifted)  # 0 or -1
        self.bits.bitwise_left_shift_(1).sub_(self._shifted)
        lows.view(torch.int8).copy_(self.bits)
        exponents = torch.bitwise_right_shift(self.bits, 8, out=self._shifted)
        self.exponents.view(-1).view(torch.int8).copy_(exponents)

    def join(self, lows: Tensor) -> None:
        """Undo split."""
        self._shifted.copy_(self.exponents.view(-1)).bitwise_left_shift_(8)
        self.bits.copy_(lows).bitwise_or_(self._shifted)
        torch.bitwise_left_shift(self.bits, 15, out=self._shifted)
        self.bits.bitwise_right_shift_(1).bitwise_and_(0x7FFF).bitwise_or_(self._shifted)

    def pack(self, lower: Tensor, upper: Tensor) -> None:
        """Write the places, at most 7, to their planes."""
        words, plane = self.places.view(torch.int64), self._plane.view(torch.int64)
        torch.bitwise_and(words, 0x0303030303030303, out=plane)
        self._packers[0].pack(lower.view(-1))
        torch.bitwise_right_shift(words, _LOWER, out=plane).bitwise_and_(0x0101010101010101)
        self._packers[1].pack(upper.view(-1))

    def unpack(self, lower: Tensor, upper: Tensor) -> None:
        """Read the places from their planes."""
        for plane, table, out in ((lower, self._lower_of, self.places), (upper, self._upper_of, self._plane)):
            index = self._index[: plane.numel()].copy_(plane.reshape(-1))
            torch.index_select(table, 0, index, out=out.view(-1).view(table.dtype))
        self.places.view(torch.int64).bitwise_or_(self._plane.view(torch.int64))


@cache
def _spread(bits: int, dtype: torch.dtype) -> Tensor:
    """Return for each byte of packed codes the codes in a byte each: [256]."""
    codes = torch.arange(256)[:, None] >> torch.arange(0, 8, bits) & (1 << bits) - 1
    return codes.to(torch.uint8).view(dtype).view(-1)
