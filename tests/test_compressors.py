# SPDX-License-Identifier: Apache-2.0
"""What every compressor promises, and the row layout of those that work on blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from commopt.compress import (
    COMPRESSORS,
    DGC,
    Blockwise,
    Cast,
    Compressor,
    Encoding,
    ErrorFeedback,
    Exact,
    OneBit,
    Quantize,
    RngKey,
)
from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.kernels import quantize
from tests.catalogue import compressors
from tests.payloads import decode, encode, rows_for, slow_decode

BLOCKWISE = [
    *(compressor for compressor in compressors() if isinstance(compressor, Blockwise)),
    Quantize(2, levels="uniform"),
    Quantize(4, block=64, rounding="stochastic"),
    Quantize(2, block=64),
    Quantize(8, block=4096),
    OneBit(scale="mean"),
    OneBit(block=64),
]
EVERY = [*(compressor for compressor in compressors() if not isinstance(compressor, Blockwise)), Exact(), *BLOCKWISE]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

every = pytest.mark.parametrize("compressor", EVERY, ids=str)
blockwise = pytest.mark.parametrize("compressor", BLOCKWISE, ids=str)


def some(numel: int, seed: int = 0) -> Tensor:
    """Values of both signs, none so small that a loss scale would take it out of float16's subnormals."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return values + 0.02 * values.sign()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def residual_of(numel: int, loss_scale: float | None = None, decay: float = 1.0) -> ErrorFeedback:
    scale = None if loss_scale is None else torch.tensor(loss_scale)
    return ErrorFeedback(some(numel, seed=1) / 8, torch.full((numel,), 55.0), scale, decay)


# ------------------------------------------------------------------------------------------- rows


@every
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("numel", [0, 1, 7, 63, 65, 512, 5000, 12_289])
def test_elements_past_the_end_count_as_zero(compressor: Compressor, rows: int, numel: int) -> None:
    values = some(numel)
    made = encode(compressor, values, rows)
    assert made.payload.shape[1] % 16 == 0
    padded = torch.cat([values, torch.zeros(rows * made.chunk_numel - numel)])
    assert same(made.payload, encode(compressor, padded, rows).payload)
    everything = decode(compressor, made, padded.numel())
    assert same(decode(compressor, made, numel), everything[:numel])


@every
def test_rows_are_cut_where_chunks_end(compressor: Compressor) -> None:
    """A row is what its chunk alone would be, random bits apart."""
    if compressor.stochastic:
        pytest.skip("random bits follow the element's place among all values")
    values = some(36_860)
    made = encode(compressor, values, rows=3)
    assert made.chunk_numel == -(-36_860 // (3 * compressor.granularity)) * compressor.granularity
    for row, chunk in zip(made.payload, values.split(made.chunk_numel), strict=True):
        alone = torch.zeros(made.chunk_numel)
        alone[: chunk.numel()] = chunk
        assert same(row, encode(compressor, alone).payload[0])


@every
def test_gaps_between_rows_change_nothing(compressor: Compressor) -> None:
    values = some(10_000)
    made, dense = encode(compressor, values, rows=3), rows_for(compressor, 10_000, rows=3, gap=False)
    compressor.compress(values, dense.payload, Encoding(dense.chunk_numel))
    assert same(made.payload, dense.payload)
    assert same(decode(compressor, made, 10_000), decode(compressor, dense, 10_000))
    totals = torch.empty(2, made.chunk_numel)
    for total, payloads in zip(totals, (made.payload, dense.payload), strict=True):
        compressor.accumulate(payloads, total)
    assert same(*totals)


@every
def test_a_long_call_is_its_blocks(compressor: Compressor) -> None:
    """However the work is cut into pieces: half a million elements, an odd count."""
    values = some(500_003)
    made = encode(compressor, values)
    decoded = decode(compressor, made, values.numel())
    begin = 131_072 // compressor.granularity * compressor.granularity - 3 * compressor.granularity
    end = begin + 8 * compressor.granularity
    if compressor.nan_reach(made.chunk_numel) <= compressor.granularity and not compressor.stochastic:
        few = encode(compressor, values[begin:end])
        assert same(decode(compressor, few, end - begin), decoded[begin:end])
    assert (decoded - values).norm() < values.norm()


@every
@pytest.mark.parametrize("numel", [63, 5000, 131_075])
def test_no_element_is_further_off_than_is_said(compressor: Compressor, numel: int) -> None:
    """`error_bound` is a share of the largest element that shows in this one."""
    values = some(numel)
    made = encode(compressor, values)
    error = torch.zeros(made.chunk_numel)
    error[:numel] = (decode(compressor, made, numel) - values).abs()
    padded = torch.zeros(made.chunk_numel)
    padded[:numel] = values
    reach = compressor.nan_reach(made.chunk_numel)
    largest = padded.abs().view(-1, reach).amax(1, keepdim=True)
    assert (error.view(-1, reach) <= (compressor.error_bound + 1e-6) * largest).all()


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(compressor: Compressor, dtype: torch.dtype) -> None:
    values = some(3000).to(dtype)
    made = encode(compressor, values, rows=2, scale=0.5)
    assert same(made.payload, encode(compressor, values.float(), rows=2, scale=0.5).payload)
    narrow, wide = residual_of(3000), residual_of(3000)
    made = encode(compressor, values, 2, 1 / 3, narrow)
    assert same(made.payload, encode(compressor, values.float(), 2, 1 / 3, wide).payload)
    assert same(narrow.new, wide.new)
    assert same(decode(compressor, made, 3000, dtype), decode(compressor, made, 3000).to(dtype))


@every
def test_nothing(compressor: Compressor) -> None:
    empty = torch.empty(0)
    made = encode(compressor, empty, rows=2, residual=ErrorFeedback(empty, empty.clone()))
    assert made.payload.shape == (2, 0)
    assert compressor.finite(made.payload, made.chunk_numel)
    compressor.accumulate(made.payload, empty)
    compressor.recompress(made.payload, made.payload[:1], 0, Encoding(0))
    payload = torch.full((2, compressor.payload_nbytes(8192)), 3, dtype=torch.uint8)
    compressor.compress(empty, payload, Encoding(8192))
    decoded = torch.ones(16_384)
    compressor.decompress(payload, decoded, 8192)
    assert not decoded.any()


@blockwise
def test_layout_is_as_documented(compressor: Blockwise) -> None:
    values = some(9001)
    values[4096:6000] *= 1e-3
    made = encode(compressor, values, rows=2)
    slow = np.concatenate([slow_decode(compressor.codec, row, made.chunk_numel) for row in made.payload])
    fast = decode(compressor, made, 2 * made.chunk_numel)
    np.testing.assert_array_equal(fast.numpy(), slow)


@pytest.mark.parametrize(
    ("compressor", "bits"),
    [
        (Exact(), 32),
        (Cast(), 16),
        (Quantize(8), 8 + 32 / 512),
        (Quantize(4), 4 + 32 / 512),
        (Quantize(2), 2 + 32 / 64),
        (OneBit(), 1 + 32 / 512),
        (Quantize(4, block=256), 4 + 32 / 256),
        (Quantize(2, block=4096), 2 + 32 / 4096),
        (DGC(0.5), 0.5 * (16 + 16) + 32 / 2**16),
        (DGC(0.25, value_dtype=torch.float32), 0.25 * (16 + 32) + 32 / 2**16),
    ],
    ids=str,
)
def test_bits_per_element(compressor: Compressor, bits: float) -> None:
    assert compressor.payload_nbytes(2**20) * 8 / 2**20 == bits


# ------------------------------------------------------------------------------------------ residual


@every
@pytest.mark.parametrize(("loss_scale", "decay"), [(None, 1.0), (None, 0.9), (1024.0, 1.0), (3.7, 0.9)])
def test_residual(compressor: Compressor, loss_scale: float | None, decay: float) -> None:
    values, residual = some(10_001), residual_of(10_001, loss_scale, decay)
    values[:8] = residual.old[:8] = torch.tensor([0.0, -0.0]).repeat(4)
    old = residual.old.clone()
    made = encode(compressor, values, 2, 1 / 3, residual)
    assert same(residual.old, old)
    unit = torch.tensor(1.0 if loss_scale is None else loss_scale)
    p = values * torch.tensor(1 / 3) + old * (torch.tensor(decay) * unit)
    assert same(made.payload, encode(compressor, p, 2).payload)
    decoded = decode(compressor, made, p.numel())
    assert torch.equal(residual.new, (p - decoded) * (1 / unit))  # but for the sign of a zero
    exact = values.double() / 3 + decay * unit.double() * old.double()
    left = decoded.double() + unit.double() * residual.new.double() - exact
    assert (left.abs() <= 4 * 2**-24 * (exact.abs() + decoded.double().abs() + unit.double() * old.abs())).all()


@every
def test_a_loss_scale_changes_nothing_but_the_scale(compressor: Compressor) -> None:
    values, plain, scaled = some(5000), residual_of(5000, None, 0.9), residual_of(5000, 64.0, 0.9)
    expected = decode(compressor, encode(compressor, values, residual=plain), 5000)
    got = decode(compressor, encode(compressor, 64 * values, residual=scaled), 5000)
    assert same(got, 64 * expected)
    assert same(scaled.new, plain.new)


# ------------------------------------------------------------------------------------------- sums


@every
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_accumulate_adds_in_row_order(compressor: Compressor, world_size: int) -> None:
    chunk_numel = 24_576
    payloads = rows_for(compressor, world_size * chunk_numel, world_size)
    assert payloads.chunk_numel == chunk_numel
    compressor.compress(some(world_size * chunk_numel - 100), payloads.payload, Encoding(chunk_numel))
    total = torch.full((chunk_numel,), 9.0)
    compressor.accumulate(payloads.payload, total)
    decoded = decode(compressor, payloads, world_size * chunk_numel).view(world_size, chunk_numel)
    by_hand = decoded[0].clone()
    for row in decoded[1:]:
        by_hand += row
    assert torch.equal(total, by_hand)


@every
@pytest.mark.parametrize("numel", [0, 1, 24_000, 24_576])
def test_recompress_is_accumulate_and_compress(compressor: Compressor, numel: int) -> None:
    chunk_numel, rng_key = 24_576, RngKey(3, 1, 4)
    payloads = rows_for(compressor, 3 * chunk_numel, 3)
    compressor.compress(some(3 * chunk_numel), payloads.payload, Encoding(chunk_numel))
    once, twice = rows_for(compressor, chunk_numel), rows_for(compressor, chunk_numel)
    residual, by_hand = residual_of(numel, 8.0, 0.5), residual_of(numel, 8.0, 0.5)
    compressor.recompress(payloads.payload, once.payload, numel, Encoding(chunk_numel, 1.0, residual, rng_key))
    total = torch.empty(chunk_numel)
    compressor.accumulate(payloads.payload, total)
    compressor.compress(total[:numel], twice.payload, Encoding(chunk_numel, 1.0, by_hand, rng_key))
    assert same(once.payload, twice.payload)
    assert same(residual.new, by_hand.new)
    once.assert_guards()
    payloads.assert_guards()


# ------------------------------------------------------------------------------------- non-finite


def block_of(place: int, length: int, chunk_numel: int, numel: int) -> Tensor:
    """Return which of `numel` elements are in the block of `place`, blocks beginning with each chunk."""
    begin = place - place % chunk_numel % length
    hit = torch.zeros(numel, dtype=torch.bool)
    hit[begin : begin + length] = True
    return hit


@every
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 5000, 9_999])
def test_non_finite_values_arrive(compressor: Compressor, bad: float, place: int) -> None:
    values = some(10_000)
    before = encode(compressor, values, rows=2)
    assert compressor.finite(before.payload, before.chunk_numel)
    values[place] = bad
    after = encode(compressor, values, rows=2)
    flag = compressor.finite(after.payload, after.chunk_numel)
    assert flag.dtype == torch.bool
    assert flag.shape == ()
    assert not flag
    hit = block_of(place, compressor.nan_reach(after.chunk_numel), after.chunk_numel, 10_000)
    decoded = decode(compressor, after, 10_000)
    assert not decoded[hit].isfinite().all()
    assert same(decoded[~hit], decode(compressor, before, 10_000)[~hit])
    total = torch.empty(after.chunk_numel)
    compressor.accumulate(after.payload, total)
    assert not total.isfinite().all()
    compressor.recompress(after.payload, before.payload[:1], after.chunk_numel, Encoding(after.chunk_numel))
    assert not compressor.finite(before.payload[:1], before.chunk_numel)


@blockwise
@pytest.mark.parametrize("place", [0, 5000, 9_999])
def test_a_scale_that_is_not_finite_is_its_whole_blocks(compressor: Blockwise, place: int) -> None:
    values = some(10_000)
    values[place] = float("nan")
    made = encode(compressor, values, rows=2)
    hit = block_of(place, compressor.codec.block, made.chunk_numel, 10_000)
    assert not decode(compressor, made, 10_000)[hit].isfinite().any()


@every
def test_overflow_of_the_scaled_value_arrives(compressor: Compressor) -> None:
    made = encode(compressor, torch.full((100,), 1e38), scale=1e3)
    assert not compressor.finite(made.payload, made.chunk_numel)
    assert not decode(compressor, made, 100).isfinite().all()


# ---------------------------------------------------------------------------------------- rounding


def awkward(dtype: torch.dtype) -> Tensor:
    """Values where rounding, overflow and underflow happen, NaN and infinities included."""
    if dtype != torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(2**31), 2**31, (20_000,), generator=generator).to(torch.int32)
    ties = (torch.randint(0, 2**16, (5_000,), generator=generator, dtype=torch.int32) << 16) | 0x8000
    special = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-45, 65519.996, 65520.0, 3.4e38])
    return torch.cat([anything.view(torch.float32), ties.view(torch.float32), special])


def rounded(x: npt.NDArray[np.float32], dtype: torch.dtype) -> Tensor:
    """Round float32 to a 16-bit float, in NumPy and integer arithmetic only."""
    if dtype == torch.float16:
        return torch.from_numpy(x.astype(np.float16))
    bits = x.view(np.uint32).astype(np.uint64)
    found = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even; carries into infinity by itself
    found[np.isnan(x)] = 0x7FC0
    return torch.from_numpy(found.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1e-5, 3e38, -7.0])
@pytest.mark.parametrize("source", DTYPES[:3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, where values overflow
def test_a_cast_rounds_the_float32_product_once(dtype: torch.dtype, source: torch.dtype, scale: float) -> None:
    values = awkward(source)
    made = encode(Cast(dtype), values, scale=scale)
    wanted = rounded(values.float().numpy() * np.float32(scale), dtype)
    got = made.payload[0].view(dtype)[: values.numel()]
    wrong = (got.view(torch.int16) != wanted.view(torch.int16)) & ~(got.isnan() & wanted.isnan())
    assert not wrong.any(), f"{got[wrong][:5]} instead of {wanted[wrong][:5]}"
    assert same(decode(Cast(dtype), made, values.numel()).nan_to_num(), got.float().nan_to_num())


# -------------------------------------------------------------------------------------- bad input


def test_defaults_choose_the_levels_that_exist() -> None:
    assert Quantize(8).codec.name == Quantize(4, rounding="stochastic").codec.name == "uniform"
    assert Quantize(4).codec == Quantize(4, levels="nonuniform").codec
    assert [Quantize(4).codec.name, Quantize(2).codec.name, OneBit().codec.name] == [
        "companded",
        "centroids",
        "sign_rms",
    ]


def test_every_registered_compressor_is_tried_here() -> None:
    assert {Cast, Quantize, OneBit, DGC} <= set(COMPRESSORS.values())
    assert {type(compressor) for compressor in EVERY} >= set(COMPRESSORS.values())


VALUES, CODEC = torch.ones(512), Quantize().codec
NBYTES = CODEC.payload_nbytes(512)
ROW = torch.empty(1, NBYTES, dtype=torch.uint8)
WIDE = torch.empty(2, 2 * NBYTES + 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("values", "payload", "chunk_numel", "residual", "error", "message"),
    [
        (VALUES, ROW, 500, None, ConfigurationError, "500 elements is no multiple of the block, 512"),
        (VALUES, ROW[:, 16:], 512, None, ConfigurationError, rf"are uint8 \[rows, {NBYTES}\]"),
        (VALUES, ROW.float(), 512, None, ConfigurationError, "payload is torch.float32"),
        (VALUES, WIDE[:, :NBYTES], 512, None, ConfigurationError, "start at multiples of 16 bytes"),
        (VALUES, WIDE[:1, 8 : 8 + NBYTES], 512, None, ConfigurationError, "start at multiples of 16 bytes"),
        (VALUES, WIDE[:1, : 2 * NBYTES : 2], 512, None, ConfigurationError, "must be gapless"),
        (torch.ones(513), ROW, 512, None, ConfigurationError, "513 values do not fit into 1 rows of 512"),
        (VALUES.view(2, -1), ROW, 512, None, ConfigurationError, "must be 1-D and contiguous"),
        (torch.ones(64)[::2], ROW, 512, None, ConfigurationError, "must be 1-D and contiguous"),
        (VALUES.int(), ROW, 512, None, UnsupportedTensorError, "values are torch.int32"),
        (VALUES.to("meta"), ROW, 512, None, ConfigurationError, "values are on meta and payload on cpu"),
        (
            VALUES,
            ROW,
            512,
            ErrorFeedback(VALUES[1:], VALUES),
            ConfigurationError,
            r"residual's old is torch.float32 \(511,\)",
        ),
        (VALUES, ROW, 512, ErrorFeedback(VALUES, VALUES.half()), ConfigurationError, "residual's new is torch.float16"),
    ],
)
def test_bad_arguments(
    values: Tensor,
    payload: Tensor,
    chunk_numel: int,
    residual: ErrorFeedback | None,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        quantize.encode(CODEC, values, payload, Encoding(chunk_numel, residual=residual))


def test_bad_sums() -> None:
    with pytest.raises(UnsupportedTensorError, match=r"total is torch\.float16; sums are float32"):
        quantize.accumulate(CODEC, ROW, VALUES.half())
    with pytest.raises(ConfigurationError, match="513 elements in 1 rows of 512"):
        quantize.recode(CODEC, ROW, ROW, 513, Encoding(512))
