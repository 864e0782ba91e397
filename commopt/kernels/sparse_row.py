"""What the kernels of sparse rows agree on: which elements a row holds, and where its bytes are."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from commopt.kernels.codec import ROW_ALIGNMENT

BLOCK = 65536
"""Elements whose index within their block fits into 16 bits."""


@dataclass(frozen=True)
class SparseRow:
    """A row of payload with the `count` largest of `chunk_numel` elements.

    Elements count as larger by the bits of |x| as an integer, which puts NaN above inf above all numbers; among equals
    the one of the lowest index comes first. Elements past the end of the values are zeros at the highest indices.

    Bytes: `ends`, int32 [blocks], the number of entries in blocks 0..b of 65536 elements; the entries' indices within
    their block, uint16 [count], ascending by element; their values, `value_dtype` [count]; zeros. Each part begins at
    a multiple of 4 bytes, and a row is a multiple of 16 long. When any of the chosen elements is not finite, the first
    entry's value is NaN.
    """

    chunk_numel: int
    count: int
    value_dtype: torch.dtype

    @classmethod
    def of(cls, chunk_numel: int, density: float, value_dtype: torch.dtype, least: int = 1) -> SparseRow:
        """Return the row that holds the share `density` of its chunk, rounded up, or `least` elements, or all."""
        return cls(chunk_numel, min(chunk_numel, max(least, ceil(density * chunk_numel))), value_dtype)

    @property
    def blocks(self) -> int:
        """Number of blocks of the chunk."""
        return -(-self.chunk_numel // BLOCK)

    @property
    def indices_begin(self) -> int:
        """Byte at which the indices begin."""
        return 4 * self.blocks

    @property
    def values_begin(self) -> int:
        """Byte at which the values begin."""
        return self.indices_begin + -(-2 * self.count // 4) * 4

    @property
    def values_end(self) -> int:
        """Byte behind the last value."""
        return self.values_begin + self.count * self.value_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return -(-self.values_end // ROW_ALIGNMENT) * ROW_ALIGNMENT
