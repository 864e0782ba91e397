# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernels of sparse rows must do, wherever they run: bit for bit what the reference does on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from commopt.kernels import sparse
from commopt.kernels import sparse_reference as reference
from commopt.kernels.loader import Loader
from commopt.kernels.sparse import SparseRow
from tests.emulator import launched_by
from tests.payloads import GuardedResidual, ResidualUse, Rows, guarded, shifted

VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

TILE_NUMEL = 4096
CAPACITY = 256
"""Candidates that a tile has slots for."""


def _normal(numel: int) -> Tensor:
    return torch.randn(numel)


def _ties(numel: int) -> Tensor:
    """Return few magnitudes, so that whichever is the threshold, there are many of it."""
    return torch.randint(-3, 4, (numel,)).mul(0.25)


def _mostly_zero(numel: int) -> Tensor:
    return torch.randn(numel) * (torch.rand(numel) < 0.02)


def _negative_zeros(numel: int) -> Tensor:
    return torch.full((numel,), -0.0)


def _close(numel: int) -> Tensor:
    """Return magnitudes that differ in their lowest bits only: the last level of the selection decides."""
    bits = torch.full((numel,), 0x3F812345, dtype=torch.int32) + torch.randint(0, 64, (numel,), dtype=torch.int32)
    return bits.view(torch.float32) * torch.randint(0, 2, (numel,)).mul(2).sub(1)


def _every_magnitude(numel: int) -> Tensor:
    """Return magnitudes from the smallest subnormal on."""
    exponents = torch.randint(-149, 10, (numel,))
    return (torch.randn(numel).double() * 2.0 ** exponents.double()).float()


CONTENTS: dict[str, Callable[[int], Tensor]] = {
    "normal": _normal,
    "ties": _ties,
    "mostly zero": _mostly_zero,
    "negative zeros": _negative_zeros,
    "close": _close,
    "every magnitude": _every_magnitude,
}


def large_in_tiles(numbers: Sequence[int], *, ties: bool) -> Tensor:
    """Return a tile for each of `numbers` with that many magnitudes between 1 and 9/8, all 1 with `ties`; others < 1/8.

    All that is between 1 and 9/8 has one bin of the first level.
    """
    values = torch.rand(len(numbers), TILE_NUMEL) / 8
    for tile, number in zip(values, numbers, strict=True):
        tile[torch.randperm(TILE_NUMEL)[:number]] = 1.0 + (0.0 if ties else 1.0) * torch.rand(number) / 8
    return values.flatten() * torch.randint(0, 2, (values.numel(),)).mul(2).sub(1)


RESIDUAL_USES = (
    None,
    ResidualUse(),
    ResidualUse(decay=0.9, new_offset=1),
    ResidualUse(1024.0),
    ResidualUse(3.0, 0.7, old_offset=1, new_offset=2),
)


class Check:
    """Runs kernels with one loader on one device."""

    def __init__(self, loader: Loader, device: str) -> None:
        self._loader = loader
        self._device = device

    def select(
        self,
        row: SparseRow,
        values: Tensor,
        rows: int,
        *,
        scale: float = 1.0,
        use: ResidualUse | None = None,
        offset: int = 0,
        spoilt: int | None = None,
    ) -> None:
        """Select from values `offset` elements behind a boundary; all bits count, except in the row called `spoilt`."""
        past = values.float().nan_to_num(0.0, 0.0, 0.0)
        wanted, got = rows_of(row, rows), rows_of(row, rows, self._device)
        kept = [GuardedResidual(use or ResidualUse(), past.roll(1) * 0.5, device) for device in ("cpu", self._device)]
        wanted_residual, got_residual = (each.residual if use else None for each in kept)
        reference.select(row, values, wanted.payload, scale, wanted_residual)
        moved = shifted(values, self._device, offset)
        with launched_by(self._loader):
            sparse.select(row, moved, got.payload, scale, got_residual)
        assert torch.equal(moved.cpu().nan_to_num(), values.nan_to_num())
        for number in range(rows):
            payload = got.payload[number].cpu()
            assert sparse.finite(row, payload[None]) == (number != spoilt)
            if number == spoilt:
                assert payload[row.values_begin : row.values_end].view(row.value_dtype)[0].isnan()
            else:
                assert torch.equal(got.arena[number].cpu(), wanted.arena[number])
        if spoilt is None:
            wanted_arena, got_arena = (each.arena for each in kept)
            assert torch.equal(got_arena.cpu(), wanted_arena)

    def scatter(self, row: SparseRow, rows: int, numel: int, dtype: torch.dtype, offset: int = 0) -> None:
        """Decode every row."""
        sources = selected(row, rows)
        wanted = torch.full((numel + 9,), 7.0, dtype=dtype)
        got = wanted.to(self._device, copy=True)
        reference.scatter(row, sources.payload, wanted[offset:][:numel])
        with launched_by(self._loader):
            sparse.scatter(row, sources.on(self._device), got[offset:][:numel])
        assert torch.equal(got.cpu(), wanted)

    def accumulate(self, row: SparseRow, peers: int) -> None:
        """Sum rows."""
        sources = selected(row, peers)
        wanted = torch.full((row.chunk_numel + 8,), 7.0)
        got = wanted.to(self._device, copy=True)
        reference.accumulate(row, sources.payload, wanted[4:-4])
        with launched_by(self._loader):
            sparse.accumulate(row, sources.on(self._device), got[4:-4])
        assert torch.equal(got.cpu(), wanted)


def rows_of(row: SparseRow, rows: int, device: str = "cpu") -> Rows:
    """Return rows of payload amid guards."""
    return guarded(rows, row.nbytes, row.chunk_numel, device)


def selected(row: SparseRow, rows: int) -> Rows:
    """Return rows that hold random values."""
    result = rows_of(row, rows)
    reference.select(row, torch.randn(rows * row.chunk_numel), result.payload, 1.0, None)
    return result
