# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 numbers in 0.713 of their bytes, exactly, on the CPU: by its kernel, or by plain numpy.

Gradients that are near each other are of similar magnitude: of the 8 bits of their exponents about 3 tell something.
A message is as long as its number of elements says, whatever they are: mantissa and sign as they are (8 bits), for the
exponent its place in the 7 below the largest of its block of 256 (3 bits) and this largest one (8 bits a block). The
eighth place means: elsewhere; then it stands, whole, in a list that has room for 12 of each 256. Normal numbers need
7 of these. Where the list is too short it goes on beyond the message. Where that would be longer than the numbers are,
all exponents stand in the place of all this: the message and what is beyond it are never longer than the numbers, in
whole blocks, and a head of 16 bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from commopt.kernels.loader import cpu_kernels

BLOCK = 256
_LISTED = 12
_ELSEWHERE = 7
_PLANES = 3  # bits of a place, each of which is packed apart
_HEAD_NBYTES = 16


def packed_nbytes(numel: int) -> int:
    """Return the bytes of the message of so many numbers, a multiple of 16."""
    blocks = -(-numel // BLOCK)
    return -(-(_HEAD_NBYTES + blocks * (BLOCK * (8 + _PLANES) // 8 + 1 + _LISTED)) // 16) * 16


def spare_nbytes(numel: int) -> int:
    """Return how many bytes may stand beyond the message."""
    return _HEAD_NBYTES + 2 * BLOCK * -(-numel // BLOCK) - packed_nbytes(numel)


def pack(values: Tensor, packed: Tensor, beyond: Tensor) -> int:
    """Put `values` (bfloat16 [n]) into `packed` (uint8 [packed_nbytes(n)]); return the bytes that do not fit.

    These are in `beyond` (uint8 [spare_nbytes(n)]) then.
    """
    cpu = cpu_kernels()
    if cpu is not None:
        return int(cpu.pack(values.data_ptr(), len(values), packed.data_ptr(), beyond.data_ptr()))
    bits = values.view(torch.int16).numpy().view(np.uint16)
    bits = np.pad(bits, (0, -len(bits) % BLOCK), mode="edge").reshape(-1, BLOCK)  # which finds its place
    exponents = (bits >> 7).astype(np.uint8)
    largest = exponents.max(1, keepdims=True)
    places = exponents - (np.maximum(largest, _ELSEWHERE - 1) - (_ELSEWHERE - 1))
    listed = exponents.reshape(-1)[np.flatnonzero(places >= _ELSEWHERE)]
    np.minimum(places, _ELSEWHERE, out=places)
    parts = [(bits >> 8 & 0x80 | bits & 0x7F).astype(np.uint8)]
    parts += [np.packbits(places & 1 << bit, axis=1) for bit in range(_PLANES)] + [largest, listed]
    as_it_is = sum(part.size for part in parts) > 2 * exponents.size
    if as_it_is:
        parts[1:] = [exponents]
    head = np.array([as_it_is] + [0] * (_HEAD_NBYTES - 1), np.uint8)
    message, target = np.concatenate([head, *(part.reshape(-1) for part in parts)]), packed.numpy()
    target[: len(message)] = message[: len(target)]
    target[len(message) :] = 0
    rest = message[len(target) :]
    beyond.numpy()[: len(rest)] = rest
    return len(rest)


def unpack(packed: Tensor, beyond: Tensor, values: Tensor) -> None:
    """Restore `values` (bfloat16 [n]) from the bytes that `pack` wrote, `packed` and `beyond` (uint8 [m])."""
    cpu = cpu_kernels()
    if cpu is not None:
        cpu.unpack(packed.data_ptr(), beyond.data_ptr(), len(beyond), len(values), values.data_ptr())
        return
    blocks = -(-len(values) // BLOCK)
    numel, plane_nbytes = blocks * BLOCK, blocks * BLOCK // 8
    head, lows, rest = np.split(np.concatenate([packed.numpy(), beyond.numpy()]), [_HEAD_NBYTES, _HEAD_NBYTES + numel])
    exponents = rest[:numel]
    if not head[0]:
        *planes, largest, listed = np.split(rest, np.cumsum([plane_nbytes] * _PLANES + [blocks]))
        places = np.zeros((blocks, BLOCK), np.uint8)
        for plane in reversed(planes):
            places += places
            places += np.unpackbits(plane.reshape(blocks, -1), axis=1)
        elsewhere = np.flatnonzero(places == _ELSEWHERE)
        places += (np.maximum(largest, _ELSEWHERE - 1) - (_ELSEWHERE - 1))[:, None]
        exponents = places.reshape(-1)
        exponents[elsewhere] = listed[: len(elsewhere)]
    bits = exponents.astype(np.uint16) << 7
    bits |= lows & 0x7F
    bits |= (lows & 0x80).astype(np.uint16) << 8
    values.view(torch.int16).numpy().view(np.uint16)[:] = bits[: len(values)]
