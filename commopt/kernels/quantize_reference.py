# SPDX-License-Identifier: Apache-2.0
"""Block quantization in plain torch, in runs of blocks that stay in the cache from the first pass to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from commopt.kernels.block_codecs import BlockCodec, block_codec
from commopt.kernels.codec import Codec, Encoding
from commopt.kernels.philox import uniform
from commopt.kernels.residual import ScaledResidual, cache_numel, scale_into


@torch.no_grad()
def encode(codec: Codec, values: Tensor, payload: Tensor, encoding: Encoding) -> None:
    """Encode p = `scale * values` (+ the residual) into the rows of `payload`, without any check."""
    factor = torch.full((), encoding.scale, dtype=torch.float32, device=values.device)

    def read(run: _BlockRun, blocks: BlockCodec) -> None:
        scale_into(values[run.begin : run.end], factor, blocks.p.view(-1)[: run.end - run.begin])

    _encode(codec, read, values.numel(), payload, encoding)


@torch.no_grad()
def recode(codec: Codec, payloads: Tensor, payload: Tensor, numel: int, encoding: Encoding) -> None:
    """Encode the sum of the rows of `payloads` into the row `payload`, without any check."""
    sources = _PayloadRows(codec, payloads, encoding.chunk_numel)

    def read(run: _BlockRun, blocks: BlockCodec) -> None:
        sources.add_up(run, blocks, blocks.p)

    _encode(codec, read, numel, payload, encoding)


@torch.no_grad()
def accumulate(codec: Codec, payloads: Tensor, total: Tensor) -> None:
    """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, without any check."""
    sources = _PayloadRows(codec, payloads, total.numel())
    blocks_of = _block_codecs(codec, total.device)
    for run in _block_runs(codec, total.numel(), total.numel(), total.device):
        sources.add_up(run, blocks_of(run), total[run.begin : run.end].view(-1, codec.block))


@torch.no_grad()
def decode(codec: Codec, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
    """Decode the rows of `payload` into `values`, without any check."""
    rows = _PayloadRows(codec, payload, chunk_numel)
    blocks_of = _block_codecs(codec, values.device)
    for run in _block_runs(codec, values.numel(), chunk_numel, values.device):
        target, blocks = values[run.begin : run.end], blocks_of(run)
        if target.dtype == torch.float32 and target.numel() == blocks.numel:
            blocks.decode(*rows.of(run), target.view(-1, codec.block))
        else:
            blocks.decode(*rows.of(run), blocks.work)
            target.copy_(blocks.work.view(-1)[: target.numel()])


class _BlockRun(NamedTuple):
    """Blocks [first, last) of a row, which hold values [begin, end)."""

    row: int
    first: int
    last: int
    begin: int
    end: int


def _block_runs(codec: Codec, numel: int, chunk_numel: int, device: torch.device) -> Iterator[_BlockRun]:
    """Cut the blocks that hold any of `numel` values into runs."""
    step = cache_numel(device) // codec.block
    for row, start in enumerate(range(0, numel, max(chunk_numel, 1))):
        stop = min(start + chunk_numel, numel)
        blocks = -(-(stop - start) // codec.block)
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            yield _BlockRun(row, first, last, start + first * codec.block, min(start + last * codec.block, stop))


def _block_codecs(codec: Codec, device: torch.device) -> Callable[[_BlockRun], BlockCodec]:
    """Return a function that finds the BlockCodec for a run: the same one for the same number of blocks."""
    of_length = cache(partial(block_codec, codec, device=device))
    return lambda run: of_length(run.last - run.first)


class _PayloadRows:
    """Rows of payload, parted into codes and scales."""

    def __init__(self, codec: Codec, payload: Tensor, chunk_numel: int) -> None:
        codes_nbytes, self._block_nbytes = codec.codes_nbytes(chunk_numel), codec.codes_nbytes(codec.block)
        scales_end = codes_nbytes + 4 * (chunk_numel // codec.block)
        self.codes = payload[:, :codes_nbytes]
        self.padding = payload[:, scales_end:]
        self.scales = payload[:, codes_nbytes:scales_end].view(torch.float32)
        self._codes_of_row = self.codes.unbind()
        self._scales_of_row = self.scales[:, :, None].unbind()

    def of(self, run: _BlockRun) -> tuple[Tensor, Tensor]:
        """Return the codes (uint8, 1-D) and the scales (float32 [blocks, 1]) of a run."""
        codes = self._codes_of_row[run.row][run.first * self._block_nbytes : run.last * self._block_nbytes]
        return codes, self._scales_of_row[run.row][run.first : run.last]

    def add_up(self, run: _BlockRun, blocks: BlockCodec, total: Tensor) -> None:
        """Set `total` (float32 [blocks, block], not work) to the sum of a run over all rows, in row order."""
        blocks.decode(*self.of(run._replace(row=0)), total)
        for row in range(1, len(self._codes_of_row)):
            blocks.decode(*self.of(run._replace(row=row)), blocks.work)
            total.add_(blocks.work)


def _encode(
    codec: Codec, read: Callable[[_BlockRun, BlockCodec], None], numel: int, payload: Tensor, encoding: Encoding
) -> None:
    """Encode the values that `read` writes into the p of its second argument; it may use work."""
    device, chunk_numel = payload.device, encoding.chunk_numel
    rows = _PayloadRows(codec, payload, chunk_numel)
    blocks_of = _block_codecs(codec, device)
    residual = None if encoding.residual is None else ScaledResidual(encoding.residual)
    rows.padding.zero_()
    if numel < len(payload) * chunk_numel:  # blocks that hold no value are zeros
        rows.codes.fill_(codec.zero_byte)
        rows.scales.zero_()
    for run in _block_runs(codec, numel, chunk_numel, device):
        blocks, count = blocks_of(run), run.end - run.begin
        p, work = blocks.p.view(-1)[:count], blocks.work.view(-1)[:count]
        read(run, blocks)
        if count < blocks.numel:
            blocks.p.view(-1)[count:].zero_()
        if residual is not None:
            residual.add_old(run.begin, p, work)
        noise = None
        if codec.stochastic:
            noise = uniform(run.begin, blocks.numel, encoding.rng_key, device).view(blocks.p.shape)
        codes, scales = rows.of(run)
        blocks.encode(codes, scales, noise)
        if residual is not None:
            blocks.decode_encoded(codes, scales)
            residual.write_new(run.begin, p, work)
