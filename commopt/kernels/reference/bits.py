"""Codes of 4, 2 or 1 bits to packed bytes, and packed bytes to levels."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_WORDS = {4: torch.int16, 2: torch.int32, 1: torch.int64}


class Packer:
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


class Table:
    """Replaces packed bytes by the levels their codes stand for, in `levels` (float32, contiguous, 16-byte aligned)."""

    def __init__(self, level_of_code: tuple[float, ...], levels: Tensor) -> None:
        rows = _rows(level_of_code, levels.device)
        codes_per_byte = rows.shape[1]
        self._index = torch.empty(levels.numel() // codes_per_byte, dtype=torch.int32, device=levels.device)
        self._rows, self._levels = rows, levels.view(-1, codes_per_byte)
        if codes_per_byte <= 4:  # one wide number can hold the levels of a byte: much faster to select than a row
            self._rows, self._levels = _as_wide(rows, codes_per_byte), _as_wide(levels, codes_per_byte)

    def look_up(self, packed: Tensor) -> None:
        """Set the levels to those of the codes in `packed` (uint8)."""
        torch.index_select(self._rows, 0, self._index.copy_(packed), out=self._levels)


def _as_wide(x: Tensor, count: int) -> Tensor:
    """View every 2 float32 as a float64, or every 4 as a complex128: 1-D."""
    doubles = x.view(-1).view(torch.float64)
    return doubles if count == 2 else torch.view_as_complex(doubles.view(-1, 2))


@lru_cache(maxsize=64)
def _rows(level_of_code: tuple[float, ...], device: torch.device) -> Tensor:
    """Return float32 [256, codes per byte]."""
    mask = len(level_of_code) - 1
    bytes_of_codes = [[byte >> shift & mask for shift in range(0, 8, mask.bit_length())] for byte in range(256)]
    return torch.tensor(
        [[level_of_code[code] for code in codes] for codes in bytes_of_codes], dtype=torch.float32, device=device
    )
