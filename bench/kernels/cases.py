"""Every kernel in the calls that training makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil, isqrt

import torch
from torch import Tensor

from bench.compression import contenders
from bench.kernels.case import Case, rows
from commopt.compress.blockwise import Blockwise
from commopt.kernels import lowrank, pack, quantize, reference, sparse, unpack
from commopt.kernels.codec import Carry, Codec, Dice
from commopt.kernels.reference import lowrank as lowrank_reference
from commopt.kernels.reference import sparse as sparse_reference
from commopt.kernels.sparse_row import SparseRow

RANKS = 4  # whose rows an owner adds up
_TENSORS = 64
_DENSITIES = (0.001, 0.01)
_MATRIX_RANK = 4
_HALF = 0.5  # a scale: with 1 there would be nothing to compute


def cases(numel: int, device: torch.device) -> Iterator[Case]:
    """Yield a case for every kernel and variant, of about `numel` elements of gradient on `device`."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    carry = Carry(torch.zeros_like(values), torch.empty_like(values))
    yield from _packing(values)
    for compressor in contenders():
        if isinstance(compressor, Blockwise):
            yield from _blocks(compressor.codec, values, carry)
    yield from _sparse(values, carry)
    yield from _low_rank(numel, device)


def _packing(values: Tensor) -> Iterator[Case]:
    pieces = [piece.clone() for piece in values.tensor_split(_TENSORS)]
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.empty(values.numel(), dtype=dtype, device=values.device)
        variant = f"{_TENSORS} tensors, float32 and {str(dtype).removeprefix('torch.')}"
        yield Case("pack", variant, pack, reference.pack, (pieces, flat, _HALF), tuple(pieces), (flat,))
        yield Case("unpack", variant, unpack, reference.unpack, (flat, pieces, _HALF), (flat,), tuple(pieces))


def _blocks(codec: Codec, values: Tensor, carry: Carry) -> Iterator[Case]:
    """Yield what a rank does with its gradient, and what an owner does with the rows of `RANKS` ranks."""
    numel, dice = values.numel(), Dice(seed=1)
    chunk_numel = ceil(numel / (RANKS * codec.block)) * codec.block
    own_numel = min(numel, chunk_numel)
    payload = rows(RANKS, codec.payload_nbytes(chunk_numel), values.device)
    quantize.encode(codec, values, payload, chunk_numel, _HALF, None, dice)
    sent, total = torch.zeros_like(payload[:1]), torch.empty(chunk_numel, device=values.device)
    variant = f"{codec.name}, {codec.bits} bits{', stochastic' if codec.stochastic else ''}"
    decoded = torch.empty_like(values)
    owned = Carry(carry.old[:own_numel], carry.new[:own_numel])
    yield Case(
        "encode",
        variant,
        quantize.encode,
        reference.encode,
        (codec, values, torch.zeros_like(payload), chunk_numel, _HALF, carry, dice),
        (values, carry.old),
        (payload, carry.new),
    )
    yield Case(
        "decode",
        variant,
        quantize.decode,
        reference.decode,
        (codec, payload, decoded, chunk_numel),
        (payload,),
        (decoded,),
    )
    yield Case(
        "accumulate",
        variant,
        quantize.accumulate,
        reference.accumulate,
        (codec, payload, total),
        (payload,),
        (total,),
    )
    yield Case(
        "recode",
        variant,
        quantize.recode,
        reference.recode,
        (codec, payload, sent, chunk_numel, own_numel, owned, dice),
        (payload, owned.old),
        (sent, owned.new),
    )


def _sparse(values: Tensor, carry: Carry) -> Iterator[Case]:
    numel = values.numel()
    for density in _DENSITIES:
        row = SparseRow.of(numel, density, torch.bfloat16)
        payload = rows(1, row.nbytes, values.device)
        sparse.select(row, values, payload, _HALF, None)
        payloads, total = payload.repeat(RANKS, 1), torch.empty_like(values)
        variant = f"{density:.1%} as bfloat16"
        yield Case(
            "select",
            variant,
            sparse.select,
            sparse_reference.select,
            (row, values, torch.zeros_like(payload), _HALF, carry),
            (values, carry.old),
            (payload, carry.new),
        )
        yield Case(
            "scatter", variant, sparse.scatter, sparse_reference.scatter, (row, payload, total), (payload,), (total,)
        )
        yield Case(
            "accumulate sparse",
            variant,
            sparse.accumulate,
            sparse_reference.accumulate,
            (row, payloads, total),
            (payloads,),
            (total,),
        )


def _low_rank(numel: int, device: torch.device) -> Iterator[Case]:
    """Yield what PowerSGD does with a square matrix."""
    side = max(_MATRIX_RANK, isqrt(numel))
    matrices = torch.randn(1, side, side, device=device)
    left, right, out = (torch.randn(1, side, _MATRIX_RANK, device=device) for _ in range(3))
    product = torch.empty_like(matrices)
    variant, plain = f"rank {_MATRIX_RANK}", lowrank_reference
    projected = partial(plain.project, transposed=False)
    yield Case("project", variant, lowrank.project, projected, (matrices, right, out), (matrices, right), (out,))
    yield Case("orthogonalize", variant, lowrank.orthogonalize, plain.orthogonalize, (left, out, None), (left,), (out,))
    factors = (left, right)
    yield Case("decode low rank", variant, lowrank.decode, plain.decode, (*factors, product), factors, (product,))
    changed = (matrices, *factors)
    yield Case("subtract", variant, lowrank.subtract, plain.subtract, changed, changed, (matrices,))
