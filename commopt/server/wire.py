# SPDX-License-Identifier: Apache-2.0
"""Encoding of a bucket between a worker and the server: one row of payload in each direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.aggregate.rows import RowFormat, row_format
from commopt.compress import Compressor, Encoding, ErrorFeedback, Exact, RngKey
from commopt.feedback import Layout, Scratch


@dataclass(frozen=True)
class Wire:
    """Encodes and decodes the float32 values of one bucket.

    layout: the bucket's pieces.
    compressor: None sends the values without compression.
    """

    layout: Layout
    compressor: Compressor | None

    def rows(self, number: int) -> RowFormat:
        """Return the format of a payload.

        number: base round of the delta, by which compressors warm up.
        """
        compressor = None if self.compressor is None else self.compressor.at(number)
        dense = () if compressor is not None else ("*",)
        return row_format(self.layout, 1, compressor or Exact(), dense, torch.float32)

    def encode(
        self, values: Tensor, number: int, residual: Tensor, decay: float = 1.0, rng_key: RngKey = RngKey()
    ) -> tuple[Tensor, Tensor]:
        """Return the payload (uint8, 1-D) of `values + decay * residual`, and the next residual (float32, as long)."""
        row = self.rows(number)
        payload = torch.zeros(1, row.nbytes, dtype=torch.uint8, device=values.device)
        next_residual = torch.zeros_like(values)
        for region in row.regions:
            taken = region.read(values, Scratch())
            feedback = ErrorFeedback(region.read(residual, Scratch()), torch.empty_like(taken), None, decay)
            encoding = Encoding(region.chunk_numel, 1.0, feedback, rng_key)
            region.compressor.compress(taken, region.payload(payload), encoding)
            region.write(next_residual, feedback.new)
        return payload.view(-1), next_residual

    def pack(self, values: Tensor) -> Tensor:
        """Return the payload (uint8, 1-D) of float32 values without compression; it may share their memory."""
        payload = values.view(torch.uint8)
        missing = self.rows(0).nbytes - payload.numel()
        return torch.cat([payload, payload.new_zeros(missing)]) if missing else payload

    def decode(self, payload: Tensor, number: int) -> Tensor:
        """Return the values of a payload (float32, on its device)."""
        values = torch.empty(self.layout.numel, dtype=torch.float32, device=payload.device)
        self.rows(number).decode(payload.view(1, -1), values, Scratch())
        return values
