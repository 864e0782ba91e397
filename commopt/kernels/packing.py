# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 numbers in 0.719 of their bytes, exactly, on the CPU: by its kernel, or by plain numpy.

Gradients that are near each other are of similar magnitude: of the 8 bits of their exponents about 3 tell something.
A message is as long as its number of elements says, whatever they are: mantissa and sign as they are (8 bits), for the
exponent its place in the 7 below the largest of its block of 256 (3 bits) and this largest one (8 bits a block). The
eighth place means: elsewhere; then it stands, whole, in a list that has room for 15 of each 256. Normal numbers need
7 of these. Where the list is too short the message does not hold the numbers, and `pack` says so.
"""

from __future__ import annotations

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


def packed_nbytes(numel: int) -> int:
    """Return the bytes of so many numbers, a multiple of 16."""
    return -(-numel // BLOCK) * (BLOCK * (8 + _PLANES) // 8 + 1 + _LISTED)


def pack(values: Tensor, packed: Tensor) -> bool:
    """Put `values` (bfloat16 [n]) into `packed` (uint8 [packed_nbytes(n)]); return whether they fit."""
    cpu = cpu_kernels()
    if cpu is not None:
        return bool(cpu.pack(values.data_ptr(), len(values), packed.data_ptr()))
    parts, bits = _Parts.of(packed), values.view(torch.int16).numpy().view(np.uint16)
    bits = np.pad(bits, (0, parts.lows.size - len(bits)), mode="edge").reshape(-1, BLOCK)  # which finds its place
    parts.lows[:] = bits >> 8 & 0x80 | bits & 0x7F
    exponents = (bits >> 7).astype(np.uint8)
    parts.largest[:] = exponents.max(1, keepdims=True)
    places = exponents - parts.base
    listed = exponents.reshape(-1)[np.flatnonzero(places >= _ELSEWHERE)]
    if len(listed) > len(parts.listed):
        return False
    parts.listed[: len(listed)] = listed
    parts.listed[len(listed) :] = 0
    np.minimum(places, _ELSEWHERE, out=places)
    for bit, plane in enumerate(parts.planes):
        plane[:] = np.packbits(places & 1 << bit, axis=1)
    return True


def unpack(packed: Tensor, values: Tensor) -> None:
    """Put what `pack` has put into `packed` back into `values` (bfloat16 [n])."""
    cpu = cpu_kernels()
    if cpu is not None:
        cpu.unpack(packed.data_ptr(), len(values), values.data_ptr())
        return
    parts = _Parts.of(packed)
    places = np.zeros_like(parts.lows)
    for plane in reversed(parts.planes):
        places += places
        places += np.unpackbits(plane, axis=1)
    elsewhere = np.flatnonzero(places == _ELSEWHERE)
    exponents = places + parts.base
    exponents.reshape(-1)[elsewhere] = parts.listed[: len(elsewhere)]
    bits = exponents.astype(np.uint16) << 7
    bits |= parts.lows & 0x7F
    bits |= (parts.lows & 0x80).astype(np.uint16) << 8
    values.view(torch.int16).numpy().view(np.uint16)[:] = bits.reshape(-1)[: len(values)]


class _Parts(NamedTuple):
    """The parts of a message, by block: mantissas and signs, places in planes, largest exponents; and the list."""

    lows: NDArray[Any]
    planes: list[NDArray[Any]]
    largest: NDArray[Any]
    listed: NDArray[Any]

    @classmethod
    def of(cls, packed: Tensor) -> _Parts:
        blocks = len(packed) // packed_nbytes(1)
        sizes = (BLOCK, *[BLOCK // 8] * _PLANES, 1, _LISTED)
        bounds = np.cumsum([blocks * size for size in sizes])[:-1]
        lows, *planes, largest, listed = np.split(packed.numpy(), bounds)
        in_planes = [plane.reshape(blocks, -1) for plane in planes]
        return cls(lows.reshape(blocks, -1), in_planes, largest.reshape(blocks, 1), listed)

    @property
    def base(self) -> NDArray[Any]:
        """The exponent of place 0 of each block."""
        base: NDArray[Any] = np.maximum(self.largest, _ELSEWHERE - 1) - (_ELSEWHERE - 1)
        return base
