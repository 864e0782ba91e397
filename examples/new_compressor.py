# SPDX-License-Identifier: Apache-2.0
"""Tutorial: a compressor of your own, in one file and one line.

    torchrun --nproc-per-node 4 -m examples.new_strategies    # trains with it

A compressor turns float values into a fixed number of bytes, and back. It never communicates: `Compressed` exchanges
its payloads, and adds the residual of each encoding to the next gradient. This one sends the largest element of every
block.

In a checkout of commopt the file goes to commopt/compress/top_of_block.py, and the line into COMPRESSORS:
`"top_of_block": TopOfBlock`. Contract tests, benchmarks and `auto(allow="top_of_block")` then know it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.compress.base import Candidates, Compressor
from commopt.errors import ConfigurationError
from commopt.kernels.codec import Encoding


# 1. A frozen dataclass: its fields are the options, its repr is what ranks compare.
@dataclass(frozen=True, repr=False)
class TopOfBlock(Compressor):
    """Send the largest element of each block of `block` (at most 256) elements; the others stay in the residual."""

    block: int = 64

    def __post_init__(self) -> None:
        if not 2 <= self.block <= 256:
            raise ConfigurationError(f"TopOfBlock(block={self.block!r}) must be from 2 to 256: a place is one byte")

    # 2. How long a payload is. The values are cut into chunks of whole blocks, and rows start at multiples of 16 bytes.
    @property
    def granularity(self) -> int:
        """Whole blocks."""
        return self.block

    def payload_nbytes(self, chunk_numel: int) -> int:
        """Return 5 bytes for each block."""
        return -(-5 * (chunk_numel // self.block) // 16) * 16

    # 3. Encode: everything in plain torch, hence on any device, and without waiting for it.
    def compress(self, values: Tensor, payload: Tensor, encoding: Encoding) -> None:
        """Find the largest of each block; argmax finds NaN first, so that it reaches every rank."""
        rows, chunk_numel, residual = len(payload), encoding.chunk_numel, encoding.residual
        padded = torch.zeros(rows * chunk_numel, dtype=torch.float32, device=values.device)
        p = padded[: values.numel()].copy_(values).mul_(encoding.scale)
        unit: Tensor | float = 1.0 if residual is None or residual.loss_scale is None else residual.loss_scale
        if residual is not None:  # of the last encoding
            p += residual.old * (unit * residual.decay)
        blocks = padded.view(-1, self.block)
        places = blocks.abs().argmax(1, keepdim=True)
        largest, place = self._parts(payload, chunk_numel)
        largest.copy_(blocks.gather(1, places).view(rows, -1))
        place.copy_(places.view(rows, -1))
        if residual is not None:  # of this encoding: all that was not sent
            blocks.scatter_(1, places, 0.0)
            torch.mul(p, 1 / unit, out=residual.new)

    # 4. Decode. Sums, sums encoded again and the search for NaN follow from these two; faster ones may be written.
    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        """Put each value in its place, zeros elsewhere."""
        largest, place = self._parts(payload, chunk_numel)
        decoded = torch.zeros(largest.numel(), self.block, dtype=torch.float32, device=values.device)
        decoded.scatter_(1, place.reshape(-1, 1).long(), largest.reshape(-1, 1))
        values.copy_(decoded.view(-1)[: values.numel()])

    def _parts(self, payload: Tensor, chunk_numel: int) -> tuple[Tensor, Tensor]:
        blocks = chunk_numel // self.block
        return payload[:, : 4 * blocks].view(torch.float32), payload[:, 4 * blocks : 5 * blocks]

    # 5. What `auto` may try, if it is allowed to: the weakest first.
    @classmethod
    def candidates(cls) -> Candidates[Compressor]:
        """Return blocks of 16, 64 and 256."""
        return Candidates("top_of_block", tuple(cls(block) for block in (16, 64, 256)), usual=1)
