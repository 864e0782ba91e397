# SPDX-License-Identifier: Apache-2.0
"""Payload rows with gaps and guards between them, and a slow reading of their documented layout."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commopt.compress import Compressor, Encoding, ErrorFeedback, RngKey
from commopt.kernels.codec import Codec

GAP = 48
_GUARD = 0xA5


class Rows(NamedTuple):
    """Rows for `chunk_numel` elements each, amid guards."""

    arena: Tensor
    payload: Tensor
    chunk_numel: int

    def assert_guards(self) -> None:
        assert (self.arena[:, :GAP] == _GUARD).all()
        assert (self.arena[:, GAP + self.payload.shape[1] :] == _GUARD).all()

    def on(self, device: str) -> Tensor:
        """Return the payload on a device, between the same guards."""
        return self.arena.to(device)[:, GAP : GAP + self.payload.shape[1]]


def guarded(rows: int, nbytes: int, chunk_numel: int, device: str = "cpu", gap: int = GAP) -> Rows:
    """Return uninitialized rows of so many bytes."""
    arena = torch.full((rows, nbytes + 2 * gap), _GUARD, dtype=torch.uint8, device=device)
    return Rows(arena, arena[:, gap : gap + nbytes], chunk_numel)


def rows_for(compressor: Compressor, numel: int, rows: int = 1, gap: bool = True) -> Rows:
    """Return uninitialized rows that hold `numel` elements in chunks as short as can be."""
    granularity = compressor.granularity
    chunk_numel = -(-numel // (rows * granularity)) * granularity
    return guarded(rows, compressor.payload_nbytes(chunk_numel), chunk_numel, gap=GAP if gap else 0)


def encode(
    compressor: Compressor,
    values: Tensor,
    rows: int = 1,
    scale: float = 1.0,
    residual: ErrorFeedback | None = None,
    rng_key: RngKey | None = None,
) -> Rows:
    """Compress into fresh rows and see that nothing else changed."""
    made = rows_for(compressor, values.numel(), rows)
    before = values.clone()
    compressor.compress(values, made.payload, Encoding(made.chunk_numel, scale, residual, rng_key or RngKey()))
    made.assert_guards()
    assert torch.equal(values.view(torch.uint8), before.view(torch.uint8))
    return made


def decode(compressor: Compressor, made: Rows, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decompress into memory that held something else."""
    values = torch.full((numel,), 77.0, dtype=dtype)
    compressor.decompress(made.payload, values, made.chunk_numel)
    return values


def round_trip(compressor: Compressor, values: Tensor) -> Tensor:
    """Encode and decode."""
    return decode(compressor, encode(compressor, values), values.numel())


def relative_error(compressor: Compressor, values: Tensor) -> float:
    """Return the norm of what is lost over the norm of what is sent."""
    exact = values.double()
    return float((round_trip(compressor, values).double() - exact).norm() / exact.norm())


@dataclass(frozen=True)
class ResidualUse:
    """How a residual takes part."""

    loss_scale: float | None = None
    decay: float = 1.0
    old_offset: int = 0
    new_offset: int = 0


class GuardedResidual:
    """A residual in memory of its own, amid guards."""

    def __init__(self, use: ResidualUse, old: Tensor, device: str) -> None:
        self.arena = torch.full((old.numel() + 9,), 7.0, device=device)
        new, old = self.arena[use.new_offset :][: old.numel()], shifted(old, device, use.old_offset)
        loss_scale = None if use.loss_scale is None else torch.tensor(use.loss_scale, device=device)
        self.residual = ErrorFeedback(old, new, loss_scale, use.decay)


def shifted(values: Tensor, device: str, offset: int) -> Tensor:
    """Return a copy on a device, `offset` elements behind a boundary."""
    return torch.empty(values.numel() + 9, dtype=values.dtype, device=device)[offset:][: values.numel()].copy_(values)


def slow_codes(codec: Codec, row: Tensor, chunk_numel: int) -> npt.NDArray[np.int64]:
    """Read the code of every element of a row: element i in byte i*b//8, at bit i*b%8."""
    data = bytes(row.tolist())
    mask = (1 << codec.bits) - 1
    codes = [data[i * codec.bits // 8] >> (i * codec.bits % 8) & mask for i in range(chunk_numel)]
    return np.array(codes, dtype=np.int64)


def slow_scales(codec: Codec, row: Tensor, chunk_numel: int) -> npt.NDArray[np.float32]:
    """Read the scales of a row: float32 [blocks], or [blocks, 2] for the low and the high magnitude of centroids."""
    data = bytes(row.tolist())
    begin, blocks = chunk_numel * codec.bits // 8, chunk_numel // codec.block
    assert not any(data[begin + 4 * blocks :])  # the padding
    entries = data[begin : begin + 4 * blocks]
    if codec.name != "centroids":
        return np.array(struct.unpack(f"<{blocks}f", entries), dtype=np.float32)
    halves = struct.unpack(f"<{2 * blocks}H", entries)
    widened = struct.pack(f"<{2 * blocks}I", *(half << 16 for half in halves))
    return np.array(struct.unpack(f"<{2 * blocks}f", widened), dtype=np.float32).reshape(-1, 2)


def slow_decode(codec: Codec, row: Tensor, chunk_numel: int) -> npt.NDArray[np.float32]:
    """Decode a row from the definition of the codec: float32 [chunk_numel]."""
    codes, scales = slow_codes(codec, row, chunk_numel), slow_scales(codec, row, chunk_numel)
    block = np.arange(chunk_numel) // codec.block
    if codec.name == "centroids":
        magnitudes = scales[block, codes & 1]
        signed: npt.NDArray[np.float32] = np.where(codes >> 1, -magnitudes, magnitudes)
        return signed
    if codec.name == "uniform":
        levels = (codes - 2 ** (codec.bits - 1)).astype(np.float32)
    elif codec.name == "companded":
        half = (codes & 7) + 0.5
        levels = np.where(codes >> 3, -1, 1).astype(np.float32) * (half + half**2 / 2).astype(np.float32)
    else:
        levels = np.where(codes, -1, 1).astype(np.float32)
    decoded: npt.NDArray[np.float32] = levels * scales[block]
    return decoded
