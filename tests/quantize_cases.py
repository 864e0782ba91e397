# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernels of block quantization must do, wherever they run: compared with the reference on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import nan
from typing import TypeAlias

import torch
from torch import Tensor

from commopt.kernels import quantize
from commopt.kernels import quantize_reference as reference
from commopt.kernels.codec import Codec, CodecName, Encoding, ErrorFeedback, RngKey, Scattered
from commopt.kernels.cpu import parts_of
from commopt.kernels.loader import Loader
from tests.emulator import launched_by
from tests.payloads import GAP, GuardedResidual, ResidualUse, Rows, guarded, shifted

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RNG = RngKey(seed=0xFEDC_BA98_7654_3210, step=2**31 + 5, stream=7)

_KINDS: tuple[tuple[CodecName, int, bool], ...] = (
    ("uniform", 8, False),
    ("uniform", 4, False),
    ("uniform", 2, False),
    ("uniform", 8, True),
    ("uniform", 4, True),
    ("uniform", 2, True),
    ("companded", 4, False),
    ("centroids", 2, False),
    ("sign_mean", 1, False),
    ("sign_rms", 1, False),
)


def codecs(*block_numels: int) -> list[Codec]:
    """Return every kind of codec with every length of block."""
    return [Codec(name, bits, block, stochastic) for name, bits, stochastic in _KINDS for block in block_numels]


def codec_id(codec: Codec) -> str:
    """Return what a test is called after."""
    return f"{codec.name}{codec.bits}-{codec.block}{'-stochastic' * codec.stochastic}"


def sums(codec: Codec) -> bool:
    """Tell whether an entry is a mean, whose last bits depend on the order of a sum."""
    return codec.name in ("centroids", "sign_mean", "sign_rms")


def random_values(codec: Codec, blocks: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return normal numbers, each block in a range of its own, from all zero to where a sum would overflow."""
    ranges = torch.tensor([1.0, 1e-30, 0.0, 2.0**-103, 1e36, 3e-3, 1e-44, 2.0**-100]).repeat(blocks)[:blocks]
    values = torch.randn(blocks, codec.block) * ranges[:, None]
    values[:, ::7] = -0.0
    largest = torch.finfo(dtype).max
    return values.view(-1)[:numel].clamp(-largest, largest).to(dtype)


def exact_values(codec: Codec, blocks: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return numbers that sum up without rounding in any order: multiples of 1/64 up to 1, which every block has."""
    values = torch.randint(-64, 65, (blocks, codec.block)).div(64)
    values[:, 0] = 1.0
    return values.view(-1)[:numel].to(dtype)


def rows_of(codec: Codec, rows: int, row_blocks: int, device: str = "cpu") -> Rows:
    """Return rows of payload amid guards."""
    chunk_numel = row_blocks * codec.block
    return guarded(rows, codec.payload_nbytes(chunk_numel), chunk_numel, device)


def encoded(codec: Codec, rows: int, row_blocks: int) -> Rows:
    """Return rows that hold random values."""
    numel = rows * row_blocks * codec.block
    result = rows_of(codec, rows, row_blocks)
    values = random_values(codec, rows * row_blocks, numel, torch.float32)
    reference.encode(codec, values, result.payload, Encoding(row_blocks * codec.block, rng_key=RNG))
    return result


EncodingCall: TypeAlias = Callable[[Rows, ErrorFeedback | None], None]


class Check:
    """Runs kernels with one loader on one device; `fuzzy` allows for another order of summation."""

    def __init__(self, loader: Loader, device: str) -> None:
        self._loader = loader
        self._device = device

    def encode(
        self,
        codec: Codec,
        values: Tensor,
        rows: int,
        row_blocks: int,
        *,
        scale: float = 1.0,
        use: ResidualUse | None = None,
        offset: int = 0,
        fuzzy: bool = False,
    ) -> None:
        """Encode values `offset` elements behind a boundary."""
        old = torch.randn(values.numel()) * values.abs().float()
        moved = shifted(values, self._device, offset)

        def launch(rows: Rows, residual: ErrorFeedback | None) -> None:
            quantize.encode(codec, moved, rows.payload, Encoding(rows.chunk_numel, scale, residual, RNG))

        def refer(rows: Rows, residual: ErrorFeedback | None) -> None:
            reference.encode(codec, values, rows.payload, Encoding(rows.chunk_numel, scale, residual, RNG))

        self._compare(codec, rows, row_blocks, old, use, refer, launch, fuzzy)
        assert torch.equal(moved.cpu(), values)

    def recode(
        self, codec: Codec, peers: int, row_blocks: int, numel: int, use: ResidualUse | None, *, fuzzy: bool
    ) -> None:
        """Encode the sum of `peers` rows."""
        chunk_numel = row_blocks * codec.block
        sources = encoded(codec, peers, row_blocks)
        total = torch.empty(chunk_numel)
        reference.accumulate(codec, sources.payload, total)
        moved = sources.on(self._device)

        def launch(rows: Rows, residual: ErrorFeedback | None) -> None:
            quantize.recode(codec, moved, rows.payload, numel, Encoding(chunk_numel, 1.0, residual, RNG))

        def refer(rows: Rows, residual: ErrorFeedback | None) -> None:
            reference.recode(codec, sources.payload, rows.payload, numel, Encoding(chunk_numel, 1.0, residual, RNG))

        old = torch.randn(numel) * total[:numel].abs()
        self._compare(codec, 1, row_blocks, old, use, refer, launch, fuzzy)

    def decode(self, codec: Codec, rows: int, row_blocks: int, numel: int, dtype: torch.dtype, offset: int) -> None:
        """Decode every row, exactly."""
        chunk_numel = row_blocks * codec.block
        sources = encoded(codec, rows, row_blocks)
        wanted = torch.full((numel + 9,), 7.0, dtype=dtype)
        got = wanted.to(self._device, copy=True)
        reference.decode(codec, sources.payload, wanted[offset:][:numel], chunk_numel)
        with launched_by(self._loader):
            quantize.decode(codec, sources.on(self._device), got[offset:][:numel], chunk_numel)
        assert torch.equal(got.cpu(), wanted)

    def accumulate(self, codec: Codec, peers: int, row_blocks: int) -> None:
        """Sum rows, exactly."""
        sources = encoded(codec, peers, row_blocks)
        wanted = torch.full((row_blocks * codec.block + 8,), 7.0)
        got = wanted.to(self._device, copy=True)
        reference.accumulate(codec, sources.payload, wanted[4:-4])
        with launched_by(self._loader):
            quantize.accumulate(codec, sources.on(self._device), got[4:-4])
        assert torch.equal(got.cpu(), wanted)

    def in_parts(self, codec: Codec, dtype: torch.dtype, numels: Sequence[int], gaps: Sequence[int]) -> None:
        """Elements in parts, each behind a gap, are like those in one piece; what is between them is left alone."""
        ends = list(accumulate(gap + numel for gap, numel in zip(gaps, numels, strict=True)))
        spans = [slice(end - numel, end) for end, numel in zip(ends, numels, strict=True)]
        begins = accumulate(numels, initial=0)
        parts = parts_of((span.start, begin, numel) for span, begin, numel in zip(spans, begins, numels, strict=False))
        buffer = torch.full((ends[-1] + 9,), nan, dtype=dtype)
        for span in spans:
            buffer[span] = torch.randn(span.stop - span.start)
        joined, numel = torch.cat([buffer[span] for span in spans]), sum(numels)
        chunk_numel = -(-numel // (2 * codec.block)) * codec.block
        parts, old = parts.to(self._device), torch.randn(numel, device=self._device)

        def scattered(there: Tensor) -> Scattered:
            if len(spans) == 1:
                return Scattered(there.to(self._device)[spans[0]], None, numel)
            return Scattered(there.to(self._device), parts, numel)

        def assert_alike(found: Scattered, wanted: Tensor) -> None:
            there = found.buffer.cpu()
            if len(spans) == 1:
                assert torch.equal(there, wanted.cpu())
                return
            assert torch.equal(torch.cat([there[span] for span in spans]), wanted.cpu())
            assert int(there.isnan().sum()) == len(there) - numel

        made = []
        with launched_by(self._loader):
            for values in (joined.to(self._device), scattered(buffer)):
                rows = rows_of(codec, 2, chunk_numel // codec.block, self._device)
                residual = ErrorFeedback(old, torch.full_like(old, nan), None, 0.5)
                quantize.encode(codec, values, rows.payload, Encoding(chunk_numel, 0.5, residual, RNG))
                made.append((rows.arena, residual.new))
            assert all(torch.equal(*pair) for pair in zip(*made, strict=True))
            decoded = torch.empty_like(joined, device=self._device)
            quantize.decode(codec, rows.payload, decoded, chunk_numel)
            quantize.decode(codec, rows.payload, there := scattered(torch.full_like(buffer, nan)), chunk_numel)
            assert_alike(there, decoded)
            whole = -(-numel // codec.block) * codec.block
            rows = rows_of(codec, 3, whole // codec.block, self._device)
            values = torch.randn(3 * whole).to(self._device)
            quantize.encode(codec, values, rows.payload, Encoding(whole, rng_key=RNG))
            total = torch.empty(whole, device=self._device)
            quantize.accumulate(codec, rows.payload, total)
            quantize.accumulate(codec, rows.payload, there := scattered(torch.full((len(buffer),), nan)))
            assert_alike(there, total[:numel])

    def not_finite(self, codec: Codec, dtype: torch.dtype, bad: float, where: int) -> None:
        """One bad element must spoil its whole block and no other."""
        values = torch.randn(4, codec.block).to(dtype)
        values[1, where % codec.block] = bad
        rows = rows_of(codec, 1, 4, self._device)
        moved = values.view(-1).to(self._device)
        with launched_by(self._loader):
            quantize.encode(codec, moved, rows.payload, Encoding(values.numel(), rng_key=RNG))
        payload = rows.payload.cpu()
        assert not quantize.finite(codec, payload, values.numel())
        decoded = torch.empty(4, codec.block)
        reference.decode(codec, payload, decoded.view(-1), values.numel())
        finite = decoded.isfinite()
        assert finite[[0, 2, 3]].all()
        assert not finite[1].any()

    def _compare(
        self,
        codec: Codec,
        rows: int,
        row_blocks: int,
        old: Tensor,
        use: ResidualUse | None,
        refer: EncodingCall,
        launch: EncodingCall,
        fuzzy: bool,
    ) -> None:
        """Encode by the reference and by the kernel, and compare the new residuals."""
        wanted, got = rows_of(codec, rows, row_blocks), rows_of(codec, rows, row_blocks, self._device)
        way = use or ResidualUse()
        kept = [GuardedResidual(way, old / (way.loss_scale or 1.0), device) for device in ("cpu", self._device)]
        wanted_residual, got_residual = (each.residual if use else None for each in kept)
        refer(wanted, wanted_residual)
        with launched_by(self._loader):
            launch(got, got_residual)
        wanted_new, got_new = (each.arena for each in kept)
        # torch takes roots on the CPU with an error of up to an ulp.
        if (fuzzy and sums(codec)) or codec.name == "sign_rms":
            return _compare_sums(codec, wanted, got, wanted_new, got_new.cpu())
        assert torch.equal(got.arena.cpu(), wanted.arena)
        assert torch.equal(got_new.cpu(), wanted_new)


def _compare_sums(codec: Codec, wanted: Rows, got: Rows, wanted_new: Tensor, got_new: Tensor) -> None:
    """Another order of a sum changes a mean by 2^-19, a bfloat16 by its last bit, and which of two levels is near."""
    begin = codec.codes_nbytes(wanted.chunk_numel) + GAP
    end = begin + 4 * (wanted.chunk_numel // codec.block)
    wanted_arena, got_arena = wanted.arena, got.arena.cpu()
    assert torch.equal(got_arena[:, end:], wanted_arena[:, end:])
    dtype, tolerance = (torch.bfloat16, 2.0**-7) if codec.name == "centroids" else (torch.float32, 2.0**-19)
    wanted_entries, got_entries = (a[:, begin:end].contiguous().view(dtype) for a in (wanted_arena, got_arena))
    torch.testing.assert_close(got_entries, wanted_entries, rtol=tolerance, atol=0.0)
    differing = got_arena[:, :begin] != wanted_arena[:, :begin]
    assert differing.sum() <= (0 if codec.bits == 1 else 1 + 1e-3 * differing.numel())
    wrong = (got_new - wanted_new).abs() > 2 * tolerance * wanted_new.abs().max()
    assert wrong.sum() <= 8 * differing.sum()
