# SPDX-License-Identifier: Apache-2.0
"""Block quantization in plain torch, in pieces that stay in the cache from the first pass over them to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from commopt.kernels.block_codecs import BlockCodec, block_codec
from commopt.kernels.codec import Codec, ErrorFeedback, RngKey
from commopt.kernels.philox import uniform
from commopt.kernels.residual import Residual, piece_numel, scale_into


@torch.no_grad()
def encode(
    codec: Codec,
    values: Tensor,
    payload: Tensor,
    chunk_numel: int,
    scale: float,
    carry: ErrorFeedback | None,
    rng: RngKey,
) -> None:
    """Encode p = `scale * values` (+ the carry) into the rows of `payload`, without any check."""
    factor = torch.full((), scale, dtype=torch.float32, device=values.device)

    def read(piece: _Piece, blocks: BlockCodec) -> None:
        scale_into(values[piece.begin : piece.end], factor, blocks.p.view(-1)[: piece.end - piece.begin])

    _encode(codec, read, values.numel(), payload, chunk_numel, carry, rng)


@torch.no_grad()
def recode(
    codec: Codec,
    payloads: Tensor,
    payload: Tensor,
    chunk_numel: int,
    numel: int,
    carry: ErrorFeedback | None,
    rng: RngKey,
) -> None:
    """Encode the sum of the rows of `payloads` into the row `payload`, without any check."""
    sources = _Rows(codec, payloads, chunk_numel)

    def read(piece: _Piece, blocks: BlockCodec) -> None:
        sources.add_up(piece, blocks, blocks.p)

    _encode(codec, read, numel, payload, chunk_numel, carry, rng)


@torch.no_grad()
def accumulate(codec: Codec, payloads: Tensor, total: Tensor) -> None:
    """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, without any check."""
    sources = _Rows(codec, payloads, total.numel())
    blocks_of = _workplaces(codec, total.device)
    for piece in _pieces(codec, total.numel(), total.numel(), total.device):
        sources.add_up(piece, blocks_of(piece), total[piece.begin : piece.end].view(-1, codec.block))


@torch.no_grad()
def decode(codec: Codec, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
    """Decode the rows of `payload` into `values`, without any check."""
    rows = _Rows(codec, payload, chunk_numel)
    blocks_of = _workplaces(codec, values.device)
    for piece in _pieces(codec, values.numel(), chunk_numel, values.device):
        target, blocks = values[piece.begin : piece.end], blocks_of(piece)
        if target.dtype == torch.float32 and target.numel() == blocks.numel:
            blocks.decode(*rows.of(piece), target.view(-1, codec.block))
        else:
            blocks.decode(*rows.of(piece), blocks.work)
            target.copy_(blocks.work.view(-1)[: target.numel()])


class _Piece(NamedTuple):
    """Blocks `first` to `last` of a row, which hold values `begin` to `end`."""

    row: int
    first: int
    last: int
    begin: int
    end: int


def _pieces(codec: Codec, numel: int, chunk_numel: int, device: torch.device) -> Iterator[_Piece]:
    """Cut the blocks that hold any of `numel` values into pieces."""
    step = piece_numel(device) // codec.block
    for row, start in enumerate(range(0, numel, max(chunk_numel, 1))):
        stop = min(start + chunk_numel, numel)
        blocks = -(-(stop - start) // codec.block)
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            yield _Piece(row, first, last, start + first * codec.block, min(start + last * codec.block, stop))


def _workplaces(codec: Codec, device: torch.device) -> Callable[[_Piece], BlockCodec]:
    """Return where to get a BlockCodec for a piece: the same one for the same number of blocks."""
    of_length = cache(partial(block_codec, codec, device=device))
    return lambda piece: of_length(piece.last - piece.first)


class _Rows:
    """The parts of payload rows."""

    def __init__(self, codec: Codec, payload: Tensor, chunk_numel: int) -> None:
        codes_nbytes, self._block_nbytes = codec.codes_nbytes(chunk_numel), codec.codes_nbytes(codec.block)
        scales_end = codes_nbytes + 4 * (chunk_numel // codec.block)
        self.codes = payload[:, :codes_nbytes]
        self.padding = payload[:, scales_end:]
        self.scales = payload[:, codes_nbytes:scales_end].view(torch.float32)
        self._codes_of_row = self.codes.unbind()
        self._scales_of_row = self.scales[:, :, None].unbind()

    def of(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        """Return the codes (uint8, 1-D) and the scales (float32 [blocks, 1]) of a piece."""
        codes = self._codes_of_row[piece.row][piece.first * self._block_nbytes : piece.last * self._block_nbytes]
        return codes, self._scales_of_row[piece.row][piece.first : piece.last]

    def add_up(self, piece: _Piece, blocks: BlockCodec, total: Tensor) -> None:
        """Set `total` (float32 [blocks, block], not work) to the sum of a piece of all rows, in row order."""
        blocks.decode(*self.of(piece._replace(row=0)), total)
        for row in range(1, len(self._codes_of_row)):
            blocks.decode(*self.of(piece._replace(row=row)), blocks.work)
            total.add_(blocks.work)


def _encode(
    codec: Codec,
    read: Callable[[_Piece, BlockCodec], None],
    numel: int,
    payload: Tensor,
    chunk_numel: int,
    carry: ErrorFeedback | None,
    rng: RngKey,
) -> None:
    """Encode what `read` writes into the p of its second argument, where it may use work."""
    device = payload.device
    rows = _Rows(codec, payload, chunk_numel)
    blocks_of = _workplaces(codec, device)
    residual = None if carry is None else Residual(carry)
    rows.padding.zero_()
    if numel < len(payload) * chunk_numel:  # blocks that hold no value are zeros
        rows.codes.fill_(codec.zero_byte)
        rows.scales.zero_()
    for piece in _pieces(codec, numel, chunk_numel, device):
        blocks, count = blocks_of(piece), piece.end - piece.begin
        p, work = blocks.p.view(-1)[:count], blocks.work.view(-1)[:count]
        read(piece, blocks)
        if count < blocks.numel:
            blocks.p.view(-1)[count:].zero_()
        if residual is not None:
            residual.add_old(piece.begin, p, work)
        noise = None
        if codec.stochastic:
            noise = uniform(piece.begin, blocks.numel, rng, device).view(blocks.p.shape)
        codes, scales = rows.of(piece)
        blocks.encode(codes, scales, noise)
        if residual is not None:
            blocks.decode_encoded(codes, scales)
            residual.write_new(piece.begin, p, work)
