# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 numbers in 0.719 of their bytes, exactly, on the CPU: by its kernel, or by plain torch piece by piece.

Gradients that are near each other are of similar magnitude: of the 8 bits of their exponents about 3 tell something.
A message is as long as its number of elements says, whatever they are: mantissa and sign as they are (8 bits), for the
exponent its place in the 7 below the largest of its block of 256 (3 bits) and this largest one (8 bits a block). The
eighth place means: elsewhere; then it stands, whole, in a list that has room for 15 of each 256. Normal numbers need
7 of these. Where the list is too short the message does not hold the numbers, and `pack` says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from commopt.kernels.loader import cpu_kernels

BLOCK = 256
_LISTED = 15
_ELSEWHERE = 7
_PLANES = 3  # bits of a place, each of which is packed apart
_PIECE_BLOCKS = 2**17 // BLOCK  # of which a cache holds all passes


def packed_nbytes(numel: int) -> int:
    """Return the bytes of so many numbers, a multiple of 16."""
    return -(-numel // BLOCK) * (BLOCK * (8 + _PLANES) // 8 + 1 + _LISTED)


@torch.no_grad()
def pack(values: Tensor, packed: Tensor) -> bool:
    """Put `values` (bfloat16 [n]) into `packed` (uint8 [packed_nbytes(n)]); return whether they fit."""
    cpu = cpu_kernels()
    if cpu is not None:
        return bool(cpu.pack(values.data_ptr(), len(values), packed.data_ptr()))
    parts, listed = _Parts.of(packed), 0
    for first, last in _pieces(parts):
        work, part = _Work(last - first), values[first * BLOCK : last * BLOCK].view(torch.int16)
        if len(part) < work.numel:
            part = torch.cat([part, part[-1:].expand(work.numel - len(part))])  # which finds its place
        work.split(part, parts.lows[first:last])
        largest = torch.amax(work.exponents, 1, keepdim=True, out=parts.largest[first:last])
        places = torch.sub(work.exponents, _base(largest), out=work.places)
        elsewhere = np.flatnonzero(places.numpy() >= _ELSEWHERE)
        if listed + len(elsewhere) > len(parts.listed):
            return False
        parts.listed[listed : listed + len(elsewhere)] = work.exponents.numpy().reshape(-1)[elsewhere]
        listed += len(elsewhere)
        places.clamp_(max=_ELSEWHERE)
        for bit, plane in enumerate(parts.planes):
            torch.bitwise_and(places, 1 << bit, out=work.plane)
            plane[first:last] = np.packbits(work.plane.numpy(), axis=1)
    parts.listed[listed:] = 0
    return True


@torch.no_grad()
def unpack(packed: Tensor, values: Tensor) -> None:
    """Put what `pack` has put into `packed` back into `values` (bfloat16 [n])."""
    cpu = cpu_kernels()
    if cpu is not None:
        cpu.unpack(packed.data_ptr(), len(values), values.data_ptr())
        return
    parts, listed = _Parts.of(packed), 0
    for first, last in _pieces(parts):
        work, target = _Work(last - first), values[first * BLOCK : last * BLOCK].view(torch.int16)
        high, middle, low = (torch.from_numpy(np.unpackbits(plane[first:last], axis=1)) for plane in parts.planes[::-1])
        places = high.mul_(2).add_(middle).mul_(2).add_(low)
        elsewhere = np.flatnonzero(places.numpy() == _ELSEWHERE)
        torch.add(places, _base(parts.largest[first:last]), out=work.exponents)
        work.exponents.numpy().reshape(-1)[elsewhere] = parts.listed[listed : listed + len(elsewhere)]
        listed += len(elsewhere)
        target.copy_(work.joined(parts.lows[first:last])[: len(target)])


def _pieces(parts: _Parts) -> Iterator[tuple[int, int]]:
    """Yield the blocks from which and to which pieces are."""
    for first in range(0, len(parts.lows), _PIECE_BLOCKS):
        yield first, min(first + _PIECE_BLOCKS, len(parts.lows))


def _base(largest: Tensor) -> Tensor:
    """Return the exponent of place 0 of each block."""
    return largest.clamp(min=_ELSEWHERE - 1).sub_(_ELSEWHERE - 1)


class _Parts(NamedTuple):
    """The parts of a message, by block: mantissas and signs, places in planes, largest exponents; and the list."""

    lows: Tensor
    planes: list[NDArray[np.uint8]]
    largest: Tensor
    listed: NDArray[Any]

    @classmethod
    def of(cls, packed: Tensor) -> _Parts:
        blocks = len(packed) // packed_nbytes(1)
        sizes = (BLOCK, *[BLOCK // 8] * _PLANES, 1, _LISTED)
        lows, *planes, largest, listed = packed.split([blocks * size for size in sizes])
        in_planes = [plane.view(blocks, BLOCK // 8).numpy() for plane in planes]
        return cls(lows.view(blocks, BLOCK), in_planes, largest.view(blocks, 1), listed.numpy())


class _Memory(threading.local):
    """What a thread packs its pieces in: fresh memory takes longer to get than to work in."""

    def __init__(self) -> None:
        self.words = torch.empty(2, _PIECE_BLOCKS * BLOCK, dtype=torch.int16, device="cpu")
        self.bytes = torch.empty(3, _PIECE_BLOCKS, BLOCK, dtype=torch.uint8, device="cpu")


_memory = _Memory()


class _Work:
    """Memory for a piece of so many blocks: exponents, places and one plane of them are uint8 [blocks, BLOCK]."""

    def __init__(self, blocks: int) -> None:
        self.numel = blocks * BLOCK
        self._low: Tensor = _memory.words[0, : self.numel]
        self._high: Tensor = _memory.words[1, : self.numel]
        self.exponents, self.places, self.plane = _memory.bytes[:, :blocks]

    def split(self, bits: Tensor, lows: Tensor) -> None:
        """Set the exponents to those of `bits` (int16 [numel]), and `lows` to signs above mantissas."""
        torch.bitwise_right_shift(bits, 7, out=self._high)
        self.exponents.view(-1).view(torch.int8).copy_(self._high)
        self._high.bitwise_right_shift_(1).bitwise_and_(0x80)
        torch.bitwise_and(bits, 0x7F, out=self._low).bitwise_or_(self._high)
        lows.view(-1).view(torch.int8).copy_(self._low)

    def joined(self, lows: Tensor) -> Tensor:
        """Return the bits that were split."""
        joined: Tensor = self._low
        self._high.copy_(self.exponents.view(-1)).bitwise_left_shift_(7)
        joined.copy_(lows.view(-1).view(torch.int8))  # which extends the sign
        joined.bitwise_and_(-0x8000 | 0x7F).bitwise_or_(self._high)
        return joined
