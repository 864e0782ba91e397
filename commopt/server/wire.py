# SPDX-License-Identifier: Apache-2.0
"""How the values of a parameter bucket travel between a worker and the server, one row of payload each way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.aggregate.rows import RowFormat, row_format
from commopt.compress import Compressor, Encoding, ErrorFeedback, Exact, RngKey
from commopt.feedback import Layout, Scratch


@dataclass(frozen=True)
class Wire:
    """The encoding of a bucket of float32 values.

    layout: the pieces of the bucket.
    compressor: None sends float32.
    """

    layout: Layout
    compressor: Compressor | None

    def rows(self, number: int) -> RowFormat:
        """Return the row format of a payload. number: of the round it began from, by which compressors warm up."""
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

    def decode(self, payload: Tensor, number: int) -> Tensor:
        """Return the values of a payload, float32 on its device."""
        values = torch.empty(self.layout.numel, dtype=torch.float32, device=payload.device)
        self.rows(number).decode(payload.view(1, -1), values, Scratch())
        return values
