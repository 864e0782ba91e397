# SPDX-License-Identifier: Apache-2.0
"""Every kernel in the calls that training makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil, isqrt

import torch
from torch import Tensor

from bench.kernels.case import (
    SCALE,
    TOPK,
    Case,
    Family,
    Implementation,
    Setting,
    compiled_int8_blocks,
    hook_orthogonalize,
    microseconds,
    of_copy,
    rows,
    times_copy_of,
    times_faster,
    topk_route,
    torchao_int8_blocks,
)
from commopt.compress import COMPRESSORS, Blockwise, Cast, Compressor, OneBit, Quantize
from commopt.kernels import lowrank, quantize, sparse
from commopt.kernels import lowrank_reference as lowrank_reference
from commopt.kernels import quantize_reference as reference
from commopt.kernels import sparse_reference as sparse_reference
from commopt.kernels.codec import Codec, Encoding, RngKey
from commopt.kernels.residual import round_with_residual
from commopt.kernels.sparse import SparseRow

_INT8 = Quantize(8).codec
_OF_COPY = (of_copy(0.85),)
_RNG = RngKey(seed=1)


def of_codec(codec: Codec) -> Family:
    """Return the cases of one codec."""
    stochastic = ", stochastic" if codec.stochastic else ""
    title = f"{codec.name}, {codec.bits} bit{'s' if codec.bits > 1 else ''}{stochastic}"
    return Family(title, ("encode", "decode", "accumulate", "recode"), partial(_block_cases, codec, title))


def _block_cases(codec: Codec, variant: str, setting: Setting) -> Iterator[Case]:
    yield from _of_a_rank(codec, variant, setting)
    yield from _of_an_owner(codec, variant, setting)


def _of_a_rank(codec: Codec, variant: str, setting: Setting) -> Iterator[Case]:
    """Yield cases of a gradient that is cut into a chunk for each peer."""
    values, residual = setting.values, setting.residual
    chunk_numel = ceil(setting.numel / (setting.peers * codec.block)) * codec.block
    payload = rows(setting.peers, codec.payload_nbytes(chunk_numel), setting.device)
    quantize.encode(codec, values, payload, Encoding(chunk_numel, SCALE, rng_key=_RNG))
    sent, decoded = torch.empty_like(payload), torch.empty_like(values)
    on_gpu = codec == _INT8 and setting.device.type == "cuda"
    yield Case(
        "encode",
        variant,
        quantize.encode,
        reference.encode,
        (codec, values, sent, Encoding(chunk_numel, SCALE, residual, _RNG)),
        (values, residual.old),
        (sent, residual.new),
        others=_int8_others(values, residual.old, codec.block) if on_gpu else (),
        targets=_OF_COPY,
    )
    yield Case(
        "decode",
        variant,
        quantize.decode,
        reference.decode,
        (codec, payload, decoded, chunk_numel),
        (payload,),
        (decoded,),
        targets=_OF_COPY,
    )


def _int8_others(values: Tensor, old: Tensor, block: int) -> tuple[Implementation, ...]:
    return compiled_int8_blocks(values, old, SCALE, block), torchao_int8_blocks(values, block)


def _of_an_owner(codec: Codec, variant: str, setting: Setting) -> Iterator[Case]:
    """Yield cases of rows that hold as many elements as the gradient: with fewer, caches would be measured."""
    residual, chunk_numel = setting.residual, ceil(setting.numel / codec.block) * codec.block
    payloads = rows(setting.peers, codec.payload_nbytes(chunk_numel), setting.device)
    for peer in range(setting.peers):
        own = setting.values.roll(peer)
        quantize.encode(codec, own, payloads[peer : peer + 1], Encoding(chunk_numel, SCALE, rng_key=_RNG))
    total, sent = torch.empty(chunk_numel, device=setting.device), torch.empty_like(payloads[:1])
    variant = f"{variant}, {setting.peers} peers"
    yield Case(
        "accumulate",
        variant,
        quantize.accumulate,
        reference.accumulate,
        (codec, payloads, total),
        (payloads,),
        (total,),
        targets=_OF_COPY,
    )
    yield Case(
        "recode",
        variant,
        quantize.recode,
        reference.recode,
        (codec, payloads, sent, setting.numel, Encoding(chunk_numel, 1.0, residual, _RNG)),
        (payloads, residual.old),
        (sent, residual.new),
        targets=_OF_COPY,
    )


_CHOSEN: tuple[Compressor, ...] = (
    Cast(torch.bfloat16),
    Cast(torch.float16),
    Quantize(8),
    Quantize(4),
    Quantize(2),
    Quantize(8, rounding="stochastic"),
    Quantize(4, levels="uniform"),
    OneBit(),
)
_DENSITIES = (0.001, 0.01)
_PASSES_NBYTES = 12
"""Of an element: gradient and residual read, the sum written, which is what is left of nearly all."""


def sparse_families() -> list[Family]:
    """Return a family for each density, the first of them as DGC has it by default."""
    names = ("select", "scatter", "accumulate sparse")
    return [Family(f"{density:.1%} as bfloat16", names, partial(_sparse_cases, density)) for density in _DENSITIES]


def _sparse_cases(density: float, setting: Setting) -> Iterator[Case]:
    row = SparseRow.of(setting.numel, density, torch.bfloat16)
    payloads = rows(setting.peers, row.nbytes, setting.device)
    for peer in range(setting.peers):
        sparse.select(row, setting.values.roll(peer), payloads[peer : peer + 1], SCALE, None)
    title, total = f"{density:.1%} as bfloat16", torch.empty(setting.numel, device=setting.device)
    yield from _selections(row, title, setting)
    payload = payloads[:1]
    yield Case(
        "scatter",
        title,
        sparse.scatter,
        sparse_reference.scatter,
        (row, payload, total),
        (payload,),
        (total,),
        targets=_OF_COPY,
    )
    yield Case(
        "accumulate sparse",
        f"{title}, {setting.peers} peers",
        sparse.accumulate,
        sparse_reference.accumulate,
        (row, payloads, total),
        (payloads,),
        (total,),
        targets=_OF_COPY,
    )


def _selections(row: SparseRow, title: str, setting: Setting) -> Iterator[Case]:
    values, residual = setting.values, setting.residual
    payload = rows(1, row.nbytes, setting.device)
    targets = times_copy_of(1.4, _PASSES_NBYTES * setting.numel, f"{_PASSES_NBYTES} B an element")
    sent = torch.empty(row.count, dtype=row.value_dtype, device=setting.device)
    route = partial(topk_route, values, residual.old, residual.new, sent, SCALE)
    yield Case(
        "select",
        title,
        sparse.select,
        sparse_reference.select,
        (row, values, payload, SCALE, residual),
        (values, residual.old),
        (payload, residual.new),
        others=(Implementation(TOPK, route, (residual.new, sent)),),
        targets=(targets, times_faster(5, TOPK)),
    )


_MATRIX_RANK = 4
_COUNT, _ROWS = 50, 2048
_MOST_US = {4: 60.0, 32: 400.0}
"""What orthogonalizing `_COUNT` factors may take, by their number of columns."""


def _products(setting: Setting) -> Iterator[Case]:
    """Yield what is done with a square matrix."""
    side = max(_MATRIX_RANK, isqrt(setting.numel))
    matrices = setting.random(1, side, side)
    left, right, out = (setting.random(1, side, _MATRIX_RANK) for _ in range(3))
    product, factors = torch.empty_like(matrices), (left, right)
    changed, variant = (matrices, *factors), f"rank {_MATRIX_RANK}"
    read = matrices, right
    known = lowrank_reference
    for name, kernel, plain, arguments, moved, written in (
        ("project", lowrank.project, known.project, (*read, out), read, out),
        ("decode low rank", lowrank.decode, known.decode, (*factors, product), factors, product),
        ("subtract", lowrank.subtract, known.subtract, changed, changed, matrices),
    ):
        yield Case(name, variant, kernel, plain, arguments, moved, (written,), targets=_OF_COPY)


def _bases(setting: Setting) -> Iterator[Case]:
    """Yield what makes factors orthonormal, beside what torch has for it."""
    for matrix_rank, most_us in _MOST_US.items():
        factors = setting.random(_COUNT, _ROWS, matrix_rank)
        initial = torch.linalg.qr(setting.random(_COUNT, _ROWS, matrix_rank)).Q.contiguous()
        out, other = torch.empty_like(factors), torch.empty_like(factors)
        yield Case(
            "orthogonalize",
            f"{_COUNT} of {_ROWS} x {matrix_rank}",
            lowrank.orthogonalize,
            lambda *stack: lowrank_reference.orthogonalize_each([stack]),
            (factors, out, initial),
            (factors, initial),
            (out,),
            others=(
                Implementation("torch.linalg.qr", partial(torch.linalg.qr, factors)),
                Implementation("torch's powerSGD_hook", partial(hook_orthogonalize, factors, other), (other,)),
            ),
            targets=(microseconds(most_us),),
        )


def _casts(setting: Setting) -> Iterator[Case]:
    values, residual = setting.values, setting.residual
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    yield Case(
        "round",
        "bfloat16, stochastic",
        quantize.round_stochastically,
        round_with_residual,
        (values, rounded, SCALE, residual, _RNG, 0),
        (values, residual.old),
        (rounded, residual.new),
    )


CASTS = Family("bfloat16, stochastic", ("round",), _casts)
PRODUCTS = Family("products with factors", ("project", "decode low rank", "subtract"), _products)
BASES = Family("orthonormal factors", ("orthogonalize",), _bases)


PEERS = 8
"""Whose rows an owner adds up."""


def timed_compressors() -> list[Compressor]:
    """Return the choice above, and every other registered compressor as it is by default."""
    known = {type(compressor) for compressor in _CHOSEN}
    return [*_CHOSEN, *(kind() for kind in COMPRESSORS.values() if kind not in known)]


def families() -> Iterator[Family]:
    """Return all cases."""
    for compressor in timed_compressors():
        if isinstance(compressor, Blockwise):
            yield of_codec(compressor.codec)
    yield CASTS
    yield from sparse_families()
    yield BASES
    yield PRODUCTS


def cases(numel: int, device: torch.device) -> Iterator[Case]:
    """Yield a case for every kernel and variant, of about `numel` elements of gradient on `device`."""
    setting = Setting(numel, PEERS, device)
    for family in families():
        yield from family.build(setting)
