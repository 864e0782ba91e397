# SPDX-License-Identifier: Apache-2.0
"""Encoding and decoding of whole blocks in plain torch, one class for each codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from math import inf

import torch
from torch import Tensor

from commopt.kernels.codec import CENTROID_SPLIT, LEVELS, TINY, Codec

_BELOW_TINY = TINY * (1 - 2.0**-24)  # the float32 before it


class BlockCodec(ABC):
    """Encodes and decodes `blocks` blocks at once, in memory of its own.

    p and work are float32 [blocks, block]. Codes are the packed bytes (uint8, 1-D) of these blocks, scales their
    entries (float32 [blocks, 1]). Constants are 0-d tensors: torch turns a number into one at every call.
    """

    def __init__(self, codec: Codec, blocks: int, device: torch.device) -> None:
        self.p, self.work = torch.empty(2, blocks, codec.block, dtype=torch.float32, device=device)
        self.numel = self.p.numel()
        self._flat_work = self.work.view(-1)
        self._numbers = torch.empty(self.numel, dtype=torch.int8, device=device)
        self._packer = CodePacker(self._numbers, codec.bits)
        self._table: LevelTable | None = None

    @abstractmethod
    def encode(self, codes: Tensor, scales: Tensor, noise: Tensor | None) -> None:
        """Encode p; `noise` (like p, in [0, 1)) decides a stochastic rounding."""

    def decode(self, codes: Tensor, scales: Tensor, decoded: Tensor) -> None:
        """Write the values of codes and scales into `decoded` (like p; may be work, which is overwritten)."""
        if self._table is not None:
            self._table.look_up(codes)
        torch.mul(self.work, scales, out=decoded)

    def decode_encoded(self, codes: Tensor, scales: Tensor) -> None:
        """Decode into work the codes and scales that encode just wrote."""
        self.decode(codes, scales, self.work)

    def _absmax(self) -> Tensor:
        """Set work to |p| and return the absmax of each block, NaN when it has one: [blocks, 1]."""
        return torch.abs(self.p, out=self.work).amax(1, keepdim=True)

    def _grade(self, scales: Tensor, largest: Tensor) -> Tensor:
        """Write scales absmax / largest, set work to |p|, and return their inverses, [blocks, 1]; 0 for zero blocks."""
        absmax = self._absmax()
        torch.div(torch.threshold(absmax, _BELOW_TINY, 0), largest, out=scales)
        return largest / torch.threshold(absmax, _BELOW_TINY, inf)

    def _normalize(self) -> Tensor:
        """Set work to |p| / absmax, whose sums cannot overflow, and return absmax, [blocks, 1]; 0 for zero blocks."""
        absmax = self._absmax()
        self.work.mul_(torch.threshold(absmax, _BELOW_TINY, inf).reciprocal_())
        return torch.threshold(absmax, _BELOW_TINY, 0)


def block_codec(codec: Codec, blocks: int, device: torch.device) -> BlockCodec:
    """Return the one for `codec`."""
    return _BLOCK_CODECS[codec.name](codec, blocks, device)


class _UniformBlocks(BlockCodec):
    """Whole numbers from -t to t."""

    def __init__(self, codec: Codec, blocks: int, device: torch.device) -> None:
        super().__init__(codec, blocks, device)
        offset = 1 << (codec.bits - 1)
        self._largest = torch.full((), float(offset - 1), dtype=torch.float32, device=device)
        self._smallest = -self._largest
        self._middle = self._largest + 1
        self._offset = self._numbers.new_full((), offset if offset < 128 else -128)  # int8 wraps around
        if codec.bits < 8:
            self._table = LevelTable(tuple(float(code - offset) for code in range(2 * offset)), self.work)

    def encode(self, codes: Tensor, scales: Tensor, noise: Tensor | None) -> None:
        torch.mul(self.p, self._grade(scales, self._largest), out=self.work)
        if noise is None:
            self.work.round_()  # |p| * (t / absmax) exceeds t by an ulp at most: nothing to clamp
        else:
            torch.clamp(self.work.add_(noise).floor_(), self._smallest, self._largest, out=self.work)
        self._numbers.copy_(self._flat_work).add_(self._offset)
        self._packer.pack(codes)

    def decode(self, codes: Tensor, scales: Tensor, decoded: Tensor) -> None:
        if self._table is None:  # a byte is one code
            self._flat_work.copy_(codes).sub_(self._middle)
        super().decode(codes, scales, decoded)

    def decode_encoded(self, codes: Tensor, scales: Tensor) -> None:
        self.work.mul_(scales)


class _SignReader:
    """The sign bits of p as 0 and -1 (int8 [numel])."""

    def __init__(self, owner: BlockCodec, out: Tensor) -> None:
        self._source = owner.p.view(torch.int32)
        self._spread = owner.work.view(torch.int32)
        self._flat = self._spread.view(-1)
        self._shift = self._spread.new_full((), 31)
        self._out = out

    def read(self) -> Tensor:
        """Return them; work is overwritten."""
        torch.bitwise_right_shift(self._source, self._shift, out=self._spread)
        return self._out.copy_(self._flat)


class _CompandedBlocks(BlockCodec):
    """16 levels, denser towards zero, where most of a gradient is."""

    def __init__(self, codec: Codec, blocks: int, device: torch.device) -> None:
        super().__init__(codec, blocks, device)
        self._signs = _SignReader(self, torch.empty_like(self._numbers))
        self._table = LevelTable((*LEVELS, *(-level for level in LEVELS)), self.work)
        self._largest, self._two, self._shift, self._one = _numbers((LEVELS[-1], 2.0, 0.75, 1.0), device).unbind()

    def encode(self, codes: Tensor, scales: Tensor, noise: Tensor | None) -> None:
        inverse = self._grade(scales, self._largest).mul_(self._two)
        # trunc(sqrt(2 y + 3/4) - 1) finds the nearest level: it inverts k -> the midpoint of levels k - 1 and k.
        self.work.mul_(inverse).add_(self._shift).sqrt_().sub_(self._one)
        self._numbers.copy_(self._flat_work)
        self._numbers.sub_(self._signs.read(), alpha=8)
        self._packer.pack(codes)
        codes.view(scales.shape[0], -1).mul_((scales != 0).view(torch.uint8))  # no signs in zero blocks


class _CentroidBlocks(BlockCodec):
    """Two magnitudes: the means of the large and of the small elements of the block, as bfloat16."""

    def __init__(self, codec: Codec, blocks: int, device: torch.device) -> None:
        super().__init__(codec, blocks, device)
        self._large = torch.empty_like(self.p)
        self._flat_large = self._large.view(-1)
        self._signs = _SignReader(self, torch.empty_like(self._numbers))
        self._per_element = codec.block**-0.5
        self._low_table = LevelTable((1.0, 0.0, -1.0, 0.0), self.work)
        self._high_table = LevelTable((0.0, 1.0, 0.0, -1.0), self._large)

    def encode(self, codes: Tensor, scales: Tensor, noise: Tensor | None) -> None:
        absmax, large = self._normalize(), self._large
        root_mean_square = torch.linalg.vector_norm(self.work, dim=1, keepdim=True) * self._per_element
        torch.gt(self.work, CENTROID_SPLIT * root_mean_square, out=large)
        self._numbers.copy_(self._flat_large)
        count = large.sum(1, keepdim=True)
        high = large.mul_(self.work).sum(1, keepdim=True) / count.clamp_min(1)
        low = self.work.sub_(large).sum(1, keepdim=True) / (large.shape[1] - count)
        scales.view(torch.bfloat16).copy_(torch.cat((low, high), 1).mul_(absmax))
        self._numbers.sub_(self._signs.read(), alpha=2)
        self._packer.pack(codes)

    def decode(self, codes: Tensor, scales: Tensor, decoded: Tensor) -> None:
        low, high = scales.view(torch.bfloat16).float().split(1, dim=1)
        self._low_table.look_up(codes)
        self._high_table.look_up(codes)
        torch.add(self.work.mul_(low), self._large.mul_(high), out=decoded)


class _SignBlocks(BlockCodec):
    """One magnitude for all: the mean of |p|, or the root of the mean of p^2."""

    def __init__(self, codec: Codec, blocks: int, device: torch.device) -> None:
        super().__init__(codec, blocks, device)
        self._signs = _SignReader(self, self._numbers)
        self._table = LevelTable((1.0, -1.0), self.work)
        self._rms = codec.name == "sign_rms"

    def encode(self, codes: Tensor, scales: Tensor, noise: Tensor | None) -> None:
        absmax = self._normalize()
        mean = self.work.square_().mean(1, keepdim=True).sqrt_() if self._rms else self.work.mean(1, keepdim=True)
        torch.mul(mean, absmax, out=scales)
        self._signs.read().neg_()
        self._packer.pack(codes)

    def decode_encoded(self, codes: Tensor, scales: Tensor) -> None:
        torch.copysign(scales, self.p, out=self.work)


_BLOCK_CODECS: dict[str, type[BlockCodec]] = {
    "uniform": _UniformBlocks,
    "companded": _CompandedBlocks,
    "centroids": _CentroidBlocks,
    "sign_mean": _SignBlocks,
    "sign_rms": _SignBlocks,
}


_WORDS = {8: torch.uint8, 4: torch.int16, 2: torch.int32, 1: torch.int64}


class CodePacker:
    """Packs `codes` (int8 [numel]), always the same memory."""

    def __init__(self, codes: Tensor, bits: int) -> None:
        self._words = codes.view(_WORDS[bits])
        top = 8 * (self._words.element_size() - 1)
        # The product brings code j of a word to its place in the word's top byte; no two of its terms overlap.
        self._gather = self._words.new_full((), sum(1 << (top - (8 - bits) * j) for j in range(8 // bits)))
        self._top = self._words.new_full((), top)

    def pack(self, packed: Tensor) -> None:
        """Write the codes, of which only the low `bits` bits may be set, to `packed` (uint8); they are overwritten."""
        packed.copy_(self._words.mul_(self._gather).bitwise_right_shift_(self._top))


class LevelTable:
    """Replaces packed bytes by the levels their codes stand for, in `levels` (float32, contiguous, 16-byte aligned)."""

    def __init__(self, level_of_code: tuple[float, ...], levels: Tensor) -> None:
        rows = _levels_of_bytes(level_of_code, levels.device)
        codes_per_byte = rows.shape[1]
        self._index = torch.empty(levels.numel() // codes_per_byte, dtype=torch.int32, device=levels.device)
        self._rows = rows
        self._levels = levels.view(-1, codes_per_byte)
        if codes_per_byte <= 4:  # one wide number can hold the levels of a byte: much faster to select than a row
            self._rows = _as_wide(rows, codes_per_byte)
            self._levels = _as_wide(levels, codes_per_byte)

    def look_up(self, packed: Tensor) -> None:
        """Set the levels to those of the codes in `packed` (uint8)."""
        torch.index_select(self._rows, 0, self._index.copy_(packed), out=self._levels)


def _as_wide(x: Tensor, count: int) -> Tensor:
    """View every 2 float32 as a float64, or every 4 as a complex128: 1-D."""
    doubles = x.view(-1).view(torch.float64)
    return doubles if count == 2 else torch.view_as_complex(doubles.view(-1, 2))


@lru_cache(maxsize=64)
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return float32 values, copied to the device once: no CUDA graph can hold a copy from the host."""
    return torch.tensor(values, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def _levels_of_bytes(level_of_code: tuple[float, ...], device: torch.device) -> Tensor:
    """Return float32 [256, codes per byte]."""
    mask = len(level_of_code) - 1
    bytes_of_codes = [[byte >> shift & mask for shift in range(0, 8, mask.bit_length())] for byte in range(256)]
    return torch.tensor(
        [[level_of_code[code] for code in codes] for codes in bytes_of_codes], dtype=torch.float32, device=device
    )
