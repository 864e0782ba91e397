# SPDX-License-Identifier: Apache-2.0
"""Differences of bfloat16 or float16 numbers to ones that both ends have, exactly, on the CPU: by its kernel or numpy.

A pattern of bits, read as an integer in the order of the numbers, is subtracted from the other; zigzag puts the sign
lowest. A step of an optimizer changes all numbers of a layer by about as much, which is many units of the last place of
a small number and few of a large one. So not the length of a difference is coded but its top: the exponent of the base,
which the other end knows, plus the number of bits. 8 numbers share a top, and each takes as many bits as lie between
its own exponent and that, 16 at most.

A message: a head of 16 bytes (twice their number, and 1 if they are packed; the length); for each 1024 numbers the
highest top, 2 bytes; for each 64 a byte that tells which octets changed; the bits of these, one after the other,
the lowest first; and 4 bits for each, how far its top is above the lowest that can be told, 15 below the highest. What
would be longer than the numbers are is sent as these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from commopt.kernels.loader import cpu_kernels

MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
"""The dtypes, and the bits of their mantissas."""

HEAD_NBYTES = 16
_OCTET, _MASKED, _SECTION = 8, 64, 1024
_TOPS = 15
_BITS = np.arange(16, dtype=np.uint16)


def largest_nbytes(numel: int) -> int:
    """Return the length of the longest message of so many numbers."""
    return HEAD_NBYTES + 2 * numel


def memory_nbytes(numel: int) -> int:
    """Return the memory that `pack_difference` needs: room for more than it will keep."""
    return largest_nbytes(numel) + 2 * -(-numel // _SECTION) + -(-numel // _MASKED) + 4 * _SECTION


def pack_difference(values: Tensor, base: Tensor, message: Tensor) -> int:
    """Put the difference of `values` to `base` (both [n], of a dtype of MANTISSA) into `message`; return its length.

    message: uint8 [memory_nbytes(n)], of which the rest may change.
    """
    mantissa, cpu = MANTISSA[values.dtype], cpu_kernels()
    if cpu is not None:
        addresses = values.data_ptr(), base.data_ptr()
        return int(cpu.pack_difference(*addresses, values.numel(), mantissa, message.data_ptr()))
    made = _packed(_bits(values), _bits(base), mantissa)
    message.numpy()[: len(made)] = made
    return len(made)


def unpack_difference(message: Tensor, values: Tensor) -> None:
    """Set `values` ([n]), which hold the base, to those that were packed.

    message: uint8, as long as `pack_difference` said. Raises ValueError for one that it cannot have made of so many
    numbers; `values` may then be anything.
    """
    mantissa, cpu = MANTISSA[values.dtype], cpu_kernels()
    if cpu is not None:
        addresses = message.data_ptr(), message.numel(), values.numel(), mantissa, values.data_ptr()
        fits = cpu.unpack_difference(*addresses) == 0
    else:
        fits = _unpack(message.numpy(), _bits(values), mantissa)
    if not fits:
        raise ValueError(
            f"a message of {message.numel()} bytes is no difference of {values.numel()} numbers; it was damaged, or is "
            f"about others"
        )


# ------------------------------------------------------------------------------------------- plain numpy


def _bits(values: Tensor) -> NDArray[np.uint16]:
    return values.view(torch.int16).numpy().view(np.uint16)


def _ordered(bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
    return bits ^ np.where(bits & 0x8000, 0x7FFF, 0).astype(np.uint16)


def _padded(values: NDArray[Any], unit: int) -> NDArray[Any]:
    return np.pad(values, (0, -len(values) % unit)).reshape(-1, unit)


def _kept(tops: NDArray[np.int64], base: NDArray[np.uint16], mantissa: int) -> NDArray[np.bool_]:
    """Return which bits [n, 16] of the differences are sent."""
    places = (_padded(base, _OCTET) >> mantissa & 0x7FFF >> mantissa).astype(np.int64)
    widths = (tops[:, None] - places).clip(0, 16).reshape(-1, 1)
    kept: NDArray[np.bool_] = widths > _BITS
    return kept


def _told(tops: NDArray[np.int64], highest: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lowest top that can be told of each octet, less 1."""
    lowest: NDArray[np.int64] = np.repeat((highest - _TOPS).clip(0), _SECTION // _OCTET)[: len(tops)]
    return lowest


def _packed(values: NDArray[np.uint16], base: NDArray[np.uint16], mantissa: int) -> NDArray[np.uint8]:
    differences = _ordered(values) - _ordered(base)
    zigzag = _padded(differences << 1 ^ np.where(differences & 0x8000, 0xFFFF, 0).astype(np.uint16), _OCTET)
    lengths = np.ceil(np.log2(zigzag.astype(np.float64) + 1)).astype(np.int64)
    places = (_padded(base, _OCTET) >> mantissa & 0x7FFF >> mantissa).astype(np.int64)
    tops = np.where(zigzag, lengths + places, 0).max(1, initial=0)
    highest = _padded(tops, _SECTION // _OCTET).max(1, initial=0)
    lowest, changed = _told(tops, highest), tops > 0
    above = np.where(changed, (tops - lowest).clip(1), 0)
    kept = _kept(np.where(changed, lowest + above, 0), base, mantissa)
    bits = (zigzag.reshape(-1, 1) >> _BITS & 1).astype(np.uint8)[kept]
    nibbles = _padded(above[changed].astype(np.uint8), 2)
    parts = [
        highest.astype("<u2").view(np.uint8),
        np.packbits(changed, bitorder="little"),
        np.packbits(bits, bitorder="little"),
        nibbles[:, 0] | nibbles[:, 1] << 4,
    ]
    packed = sum(map(len, parts)) <= 2 * len(values)
    body = np.concatenate(parts) if packed else values.astype("<u2").view(np.uint8)
    head = np.array([2 * len(values) + packed, HEAD_NBYTES + len(body)], "<i8").view(np.uint8)
    return np.concatenate([head, body])


def _unpack(message: NDArray[np.uint8], values: NDArray[np.uint16], mantissa: int) -> bool:
    """Do as `unpack_difference`; return whether that is possible."""
    head, body = message[:HEAD_NBYTES], message[HEAD_NBYTES:]
    if len(head) < HEAD_NBYTES:
        return False
    content, nbytes = map(int, head.view("<i8"))
    if content >> 1 != len(values) or nbytes != len(message):
        return False
    if not content & 1:
        if body.nbytes != values.nbytes:
            return False
        values[:] = body.view("<u2")
        return True
    sections, masked = -(-len(values) // _SECTION), -(-len(values) // _MASKED)
    if len(body) < 2 * sections + masked:
        return False
    highest = body[: 2 * sections].view("<u2").astype(np.int64)
    changed = np.unpackbits(body[2 * sections :][:masked], bitorder="little").astype(bool)
    rest, count = body[2 * sections + masked :], int(changed.sum())
    if len(rest) < -(-count // 2):
        return False
    stream, nibbles = np.split(rest, [len(rest) - -(-count // 2)])
    above = np.zeros(len(changed), np.int64)
    above[changed] = np.stack([nibbles & 0xF, nibbles >> 4], 1).reshape(-1)[:count]
    tops = np.where(changed, _told(above, highest) + above, 0)[: -(-len(values) // _OCTET)]
    kept = _kept(tops, values, mantissa)
    total = int(kept.sum())
    if -(-total // 8) != len(stream):
        return False
    bits = np.zeros(kept.shape, np.uint16)
    bits[kept] = np.unpackbits(stream, bitorder="little")[:total]
    zigzag = (bits << _BITS).sum(1, dtype=np.uint16)[: len(values)]
    values[:] = _ordered(_ordered(values) + (zigzag >> 1 ^ np.where(zigzag & 1, 0xFFFF, 0).astype(np.uint16)))
    return True
