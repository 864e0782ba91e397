"""What the CUDA kernels of block quantization must do, wherever they run: compared with the reference on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.kernels import quantize
from commopt.kernels import quantize_reference as reference
from commopt.kernels.codec import Codec, CodecName, ErrorFeedback, RngKey
from commopt.kernels.loader import Loader
from tests.emulator import launched_by

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DICE = RngKey(seed=0xFEDC_BA98_7654_3210, step=2**31 + 5, stream=7)

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


@dataclass(frozen=True)
class Carrying:
    """How a residual takes part."""

    loss_scale: float | None = None
    decay: float = 1.0
    old_offset: int = 0
    new_offset: int = 0

    def make(self, old: Tensor) -> tuple[ErrorFeedback, Tensor]:
        """Return a carry that adds about `old`, and the memory around its new residual."""
        arena = torch.full((old.numel() + 9,), 7.0, device=old.device)
        shifted = torch.empty(old.numel() + 9, device=old.device)[self.old_offset :][: old.numel()]
        shifted.copy_(old / (self.loss_scale or 1.0))
        loss_scale = None if self.loss_scale is None else torch.tensor(self.loss_scale, device=old.device)
        return ErrorFeedback(shifted, arena[self.new_offset :][: old.numel()], loss_scale, self.decay), arena


class Rows:
    """Payload rows amid guard bytes."""

    def __init__(self, codec: Codec, rows: int, row_blocks: int, device: str) -> None:
        nbytes = codec.payload_nbytes(row_blocks * codec.block)
        self.arena = torch.full((rows, nbytes + 48), 0xAB, dtype=torch.uint8, device=device)
        self.payload = self.arena[:, 16 : 16 + nbytes]


def encoded(codec: Codec, rows: int, row_blocks: int) -> Rows:
    """Return rows that hold random values."""
    numel = rows * row_blocks * codec.block
    result = Rows(codec, rows, row_blocks, "cpu")
    values = random_values(codec, rows * row_blocks, numel, torch.float32)
    reference.encode(codec, values, result.payload, row_blocks * codec.block, 1.0, None, DICE)
    return result


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
        carrying: Carrying | None = None,
        offset: int = 0,
        fuzzy: bool = False,
    ) -> None:
        """Encode values `offset` elements behind a boundary."""
        chunk_numel = row_blocks * codec.block
        old = torch.randn(values.numel()) * values.abs().float()
        wanted, got = Rows(codec, rows, row_blocks, "cpu"), Rows(codec, rows, row_blocks, self._device)
        moved = torch.empty(values.numel() + 9, dtype=values.dtype, device=self._device)[offset:][: values.numel()]
        moved.copy_(values)
        carry, wanted_new = carrying.make(old) if carrying else (None, None)
        reference.encode(codec, values, wanted.payload, chunk_numel, scale, carry, DICE)
        carry, got_new = carrying.make(old.to(self._device)) if carrying else (None, None)
        with launched_by(self._loader, quantize):
            quantize.encode(codec, moved, got.payload, chunk_numel, scale, carry, DICE)
        assert torch.equal(moved.cpu(), values)
        self._compare(codec, chunk_numel, wanted, got, wanted_new, got_new, fuzzy)

    def recode(
        self, codec: Codec, peers: int, row_blocks: int, numel: int, carrying: Carrying | None, *, fuzzy: bool
    ) -> None:
        """Encode the sum of `peers` rows."""
        chunk_numel = row_blocks * codec.block
        sources = encoded(codec, peers, row_blocks)
        total = torch.empty(chunk_numel)
        reference.accumulate(codec, sources.payload, total)
        old = torch.randn(numel) * total[:numel].abs()
        wanted, got = Rows(codec, 1, row_blocks, "cpu"), Rows(codec, 1, row_blocks, self._device)
        carry, wanted_new = carrying.make(old) if carrying else (None, None)
        reference.recode(codec, sources.payload, wanted.payload, chunk_numel, numel, carry, DICE)
        carry, got_new = carrying.make(old.to(self._device)) if carrying else (None, None)
        moved = self._moved(sources)
        with launched_by(self._loader, quantize):
            quantize.recode(codec, moved, got.payload, chunk_numel, numel, carry, DICE)
        self._compare(codec, chunk_numel, wanted, got, wanted_new, got_new, fuzzy)

    def decode(self, codec: Codec, rows: int, row_blocks: int, numel: int, dtype: torch.dtype, offset: int) -> None:
        """Decode every row, exactly."""
        chunk_numel = row_blocks * codec.block
        sources = encoded(codec, rows, row_blocks)
        wanted = torch.full((numel + 9,), 7.0, dtype=dtype)
        got = wanted.to(self._device, copy=True)
        reference.decode(codec, sources.payload, wanted[offset:][:numel], chunk_numel)
        moved = self._moved(sources)
        with launched_by(self._loader, quantize):
            quantize.decode(codec, moved, got[offset:][:numel], chunk_numel)
        assert torch.equal(got.cpu(), wanted)

    def accumulate(self, codec: Codec, peers: int, row_blocks: int) -> None:
        """Sum rows, exactly."""
        sources = encoded(codec, peers, row_blocks)
        wanted = torch.full((row_blocks * codec.block + 8,), 7.0)
        got = wanted.to(self._device, copy=True)
        reference.accumulate(codec, sources.payload, wanted[4:-4])
        with launched_by(self._loader, quantize):
            quantize.accumulate(codec, self._moved(sources), got[4:-4])
        assert torch.equal(got.cpu(), wanted)

    def not_finite(self, codec: Codec, dtype: torch.dtype, bad: float, where: int) -> None:
        """One bad element must spoil its whole block and no other."""
        values = torch.randn(4, codec.block).to(dtype)
        values[1, where % codec.block] = bad
        rows = Rows(codec, 1, 4, self._device)
        moved = values.view(-1).to(self._device)
        with launched_by(self._loader, quantize):
            quantize.encode(codec, moved, rows.payload, values.numel(), 1.0, None, DICE)
        payload = rows.payload.cpu()
        assert not reference.finite(codec, payload, values.numel())
        decoded = torch.empty(4, codec.block)
        reference.decode(codec, payload, decoded.view(-1), values.numel())
        finite = decoded.isfinite()
        assert finite[[0, 2, 3]].all()
        assert not finite[1].any()

    def _moved(self, rows: Rows) -> Tensor:
        """Return the payload where the kernels run, between the same guards."""
        return rows.arena.to(self._device)[:, 16 : 16 + rows.payload.shape[1]]

    def _compare(
        self,
        codec: Codec,
        chunk_numel: int,
        wanted: Rows,
        got: Rows,
        wanted_new: Tensor | None,
        got_new: Tensor | None,
        fuzzy: bool,
    ) -> None:
        # torch takes roots on the CPU with an error of up to an ulp.
        if (fuzzy and sums(codec)) or codec.name == "sign_rms":
            return _compare_sums(codec, chunk_numel, wanted, got, wanted_new, got_new)
        assert torch.equal(got.arena.cpu(), wanted.arena)
        if wanted_new is not None and got_new is not None:
            assert torch.equal(got_new.cpu(), wanted_new)


def _compare_sums(
    codec: Codec, chunk_numel: int, wanted: Rows, got: Rows, wanted_new: Tensor | None, got_new: Tensor | None
) -> None:
    """Another order of a sum changes a mean by 2^-19, a bfloat16 by its last bit, and which of two levels is near."""
    begin = codec.codes_nbytes(chunk_numel) + 16
    end = begin + 4 * (chunk_numel // codec.block)
    wanted_arena, got_arena = wanted.arena, got.arena.cpu()
    assert torch.equal(got_arena[:, end:], wanted_arena[:, end:])
    dtype, tolerance = (torch.bfloat16, 2.0**-7) if codec.name == "centroids" else (torch.float32, 2.0**-19)
    wanted_entries, got_entries = (a[:, begin:end].contiguous().view(dtype) for a in (wanted_arena, got_arena))
    torch.testing.assert_close(got_entries, wanted_entries, rtol=tolerance, atol=0.0)
    differing = got_arena[:, :begin] != wanted_arena[:, :begin]
    assert differing.sum() <= (0 if codec.bits == 1 else 1 + 1e-3 * differing.numel())
    if wanted_new is not None and got_new is not None:
        wrong = (got_new.cpu() - wanted_new).abs() > 2 * tolerance * wanted_new.abs().max()
        assert wrong.sum() <= 8 * differing.sum()
