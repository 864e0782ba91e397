# SPDX-License-Identifier: Apache-2.0
"""How exact the block codecs are: their definitions in NumPy and float64, hard blocks, and gradients of a GPT."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from commopt.compress import Blockwise, ErrorFeedback, OneBit, Quantize, RngKey
from examples.train_gpt import GPT, load_corpus, windows_at
from tests.payloads import decode, encode, relative_error, round_trip, slow_codes, slow_scales
from tests.test_philox import oracle_uniform

EPS = 2.0**-24
UNIFORM = [Quantize(8), Quantize(4, levels="uniform"), Quantize(2, 512, "uniform")]
NEAREST = [*UNIFORM, Quantize(4), Quantize(2, 512), OneBit(), OneBit(scale="rms")]
LEVELS = np.array([h + h * h / 2 for h in np.arange(8) + 0.5])

nearest = pytest.mark.parametrize("compressor", NEAREST, ids=str)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hard() -> Tensor:
    """Blocks of 512: ordinary, heavy-tailed, constant, single, ties, and of every magnitude from 1e-30 to 1e38."""
    ordinary = torch.randn(4, 512, generator=generator())
    heavy = ordinary[:1] / torch.rand(1, 512, generator=generator(1))
    single = torch.zeros(2, 512)
    single[0, 0], single[1, -1] = 1e-20, -3.0
    ties = torch.arange(512)[None] % 15 - 7 + 0.5 * (torch.arange(512) % 2)
    ties[0, :3] = torch.tensor([7.0, 0.5, -1.5])
    extremes = [ordinary[:1] / ordinary[:1].abs().max() * size for size in (1e-30, 1e-25, 1e-10, 1e10, 1e30, 1e38)]
    mixed = 10.0 ** -torch.arange(512)[None].remainder(45) * ordinary[1:2].sign()
    return torch.cat([ordinary, heavy, torch.full((2, 512), -0.37), single, ties, *extremes, mixed]).view(-1)


def blocks_of(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return x.reshape(-1, 512)


# -------------------------------------------------------------------------------- the definitions


def uniform_codes(compressor: Quantize, values: Tensor, noise: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    p = values.numpy().reshape(-1, 512)
    largest, absmax = np.float32(2 ** (compressor.bits - 1) - 1), np.abs(p).max(1, keepdims=True)
    zero = absmax < np.float32(2.0**-100)
    product = p * np.where(zero, np.float32(0), largest / np.where(zero, np.float32(1), absmax))
    numbers = np.rint(product) if noise is None else np.floor(product + noise.reshape(-1, 512))
    codes: npt.NDArray[Any] = numbers.clip(-largest, largest).reshape(-1).astype(int) + 2 ** (compressor.bits - 1)
    return codes


@pytest.mark.parametrize("compressor", UNIFORM, ids=str)
def test_uniform_is_its_definition(compressor: Quantize) -> None:
    made, absmax = encode(compressor, hard()), np.abs(blocks_of(hard().numpy())).max(1)
    codes = slow_codes(compressor.codec, made.payload[0], made.chunk_numel)
    np.testing.assert_array_equal(codes, uniform_codes(compressor, hard(), None))
    scales, largest = slow_scales(compressor.codec, made.payload[0], made.chunk_numel), 2 ** (compressor.bits - 1) - 1
    zero = absmax < np.float32(2.0**-100)
    np.testing.assert_array_equal(scales, np.where(zero, 0, absmax / np.float32(largest)))
    error = blocks_of(np.abs(round_trip(compressor, hard()).double().numpy() - hard().double().numpy()))
    assert (error <= np.where(zero, absmax, scales * (0.5 + largest * 8 * EPS))[:, None]).all()


def test_stochastic_is_its_definition() -> None:
    compressor, rng, values = Quantize(4, rounding="stochastic"), RngKey(2**40 + 7, 3, 9), hard()[:5000]
    made = encode(compressor, values, rows=2, rng_key=rng)
    padded = torch.cat([values, torch.zeros(2 * made.chunk_numel - 5000)])
    noise = np.array(oracle_uniform(0, padded.numel(), rng), dtype=np.float32)
    codes = [slow_codes(compressor.codec, row, made.chunk_numel) for row in made.payload]
    np.testing.assert_array_equal(np.concatenate(codes), uniform_codes(compressor, padded, noise))


def test_companded_takes_the_nearest_level() -> None:
    compressor, values = Quantize(4), hard()
    made = encode(compressor, values)
    p = blocks_of(values.double().numpy())
    absmax = np.abs(p).max(1, keepdims=True)
    codes = blocks_of(slow_codes(compressor.codec, made.payload[0], made.chunk_numel))
    chosen = LEVELS[codes.astype(int) & 7]
    zero = absmax < 2.0**-100
    scale = absmax / LEVELS[-1] + zero
    distances = np.abs(np.abs(p / scale)[..., None] - LEVELS)
    excess = np.abs(np.abs(p / scale) - chosen) - distances.min(-1)
    assert (excess <= 16 * EPS * LEVELS[-1])[~zero[:, 0]].all()
    assert ((codes.astype(int) >> 3 == 1) == np.signbit(p))[~zero[:, 0]].all()
    assert not codes[zero[:, 0]].any()
    gaps = np.diff(LEVELS, prepend=-LEVELS[0])  # of the outermost level to the next: the widest
    error = np.abs(decode(compressor, made, values.numel()).double().numpy() - values.double().numpy())
    assert (blocks_of(error) <= np.where(zero, absmax, scale * (gaps.max() / 2 + 1e-5))).all()


def test_centroids_are_the_means_of_the_small_and_the_large() -> None:
    compressor, values = Quantize(2, 512), hard()
    made = encode(compressor, values)
    magnitude = np.abs(blocks_of(values.double().numpy()))
    split = 1.05 * np.sqrt((magnitude**2).mean(1, keepdims=True))
    large = magnitude > split
    codes = blocks_of(slow_codes(compressor.codec, made.payload[0], made.chunk_numel)).astype(int)
    clear = np.abs(magnitude - split) > 1e-5 * split
    zero = magnitude.max(1) < 2.0**-100
    assert ((codes & 1 == 1) == large)[clear & ~zero[:, None]].all()
    assert ((codes >> 1 == 1) == np.signbit(blocks_of(values.double().numpy()))).all()
    scales = slow_scales(compressor.codec, made.payload[0], made.chunk_numel)
    count = large.sum(1)
    high = (magnitude * large).sum(1) / np.maximum(count, 1)
    low = (magnitude * ~large).sum(1) / (512 - count)
    half_bfloat16_ulp = 2.0**-8 * (1 + 1e-4)
    for got, expected in zip(scales.T, (low, high), strict=True):
        exact = np.where(zero, 0, expected)
        assert (np.abs(got - exact) <= half_bfloat16_ulp * exact + 1e-40).all()


@pytest.mark.parametrize("scale", ["mean", "rms"])
def test_sign_magnitudes(scale: str) -> None:
    compressor = OneBit(scale="mean") if scale == "mean" else OneBit(scale="rms")
    made = encode(compressor, hard())
    p = blocks_of(hard().double().numpy())
    expected = np.abs(p).mean(1) if scale == "mean" else np.sqrt((p**2).mean(1))
    expected[np.abs(p).max(1) < 2.0**-100] = 0
    np.testing.assert_allclose(
        slow_scales(compressor.codec, made.payload[0], made.chunk_numel).astype(np.float64), expected, rtol=1e-5
    )
    codes = slow_codes(compressor.codec, made.payload[0], made.chunk_numel)
    np.testing.assert_array_equal(codes, np.signbit(p).reshape(-1))


# ------------------------------------------------------------------------------------ contraction


@nearest
def test_every_block_is_a_contraction(compressor: Blockwise) -> None:
    """Error feedback needs ||p - D|| < ||p||; rms magnitudes only promise 2 (1 - mean / rms) of the square."""
    values = hard().double().view(-1, 512)
    error = round_trip(compressor, hard()).double().view(-1, 512) - values
    magnitude = values.abs().amax(1)
    ordinary = magnitude > 2.0**-90  # nothing rounds to subnormals
    square, exact_square = error.square().sum(1), values.square().sum(1)
    mean, rms = values.abs().mean(1), values.square().mean(1).sqrt()
    bound = torch.ones_like(mean)
    if compressor == OneBit(scale="mean"):
        bound = 1 - (mean / rms) ** 2
        torch.testing.assert_close(square[ordinary], (bound * exact_square)[ordinary], rtol=1e-4, atol=1e-12)
    elif compressor == OneBit():
        bound = 2 * (1 - mean / rms)
    elif compressor == Quantize(2, 512):
        bound = 1 - (mean / rms) ** 2 + 2.0**-16  # at least as good as one magnitude, but for bfloat16
    limit = bound * exact_square * (1 + 1e-4) + 1e-9 * exact_square
    assert (square <= limit)[ordinary].all(), (square / exact_square)[ordinary]


# ------------------------------------------------------------------------------------ hard blocks


@nearest
def test_zero_and_tiny_blocks_stay_in_the_residual(compressor: Blockwise) -> None:
    values = torch.zeros(5, 512)
    values[1, 7] = -(2.0**-101)
    values[2] = 1e-45
    values[3] = -(2.0**-100) * (1 - EPS)
    values[4] = 2.0**-100
    residual = ErrorFeedback(torch.zeros(5 * 512), torch.full((5 * 512,), 3.0))
    made = encode(compressor, values.view(-1), residual=residual)
    decoded = decode(compressor, made, values.numel()).view(5, 512)
    assert not decoded[:4].any()
    assert torch.equal(residual.new.view(5, 512)[:4], values[:4])
    assert compressor.finite(made.payload, made.chunk_numel)
    torch.testing.assert_close(decoded[4], values[4], rtol=0.01, atol=0)
    if compressor.codec.name == "companded":
        assert not slow_codes(compressor.codec, made.payload[0], made.chunk_numel)[: 4 * 512].any()


@nearest
def test_what_counts_as_finite_decodes_to_finite_values(compressor: Blockwise) -> None:
    """Up to the largest float32, where a level's product with the scale may round to infinity."""
    magnitude, limit = torch.tensor(3.4028234663852886e38), torch.tensor(3.35e38)
    while magnitude > limit:
        made = encode(compressor, magnitude.repeat(64) * torch.tensor([1, -1]).repeat(32))
        if compressor.finite(made.payload, made.chunk_numel):
            assert decode(compressor, made, 64).isfinite().all()
        magnitude = magnitude * 0.9995


def test_a_scale_is_finite_when_its_largest_multiple_is() -> None:
    largest = torch.finfo(torch.float32).max * 127 / 128
    for factor, finite in ((1 - 1e-6, True), (1 + 1e-6, False)):
        assert Quantize(8).finite(encode(Quantize(8), torch.full((64,), largest * factor)).payload, 512) == finite


@nearest
@pytest.mark.parametrize("value", [1.0, -1e-30, 3e38, 0.1])
def test_constant_blocks(compressor: Blockwise, value: float) -> None:
    values = torch.full((1024,), value)
    torch.testing.assert_close(round_trip(compressor, values), values, rtol=2.0**-8, atol=0)


@nearest
@pytest.mark.parametrize("magnitude", [1e-30, 1e38])
def test_magnitudes_do_not_matter(compressor: Blockwise, magnitude: float) -> None:
    values = torch.randn(2048, generator=generator()).clamp(-3, 3)
    factor = 2.0 ** np.floor(np.log2(magnitude))
    expected = factor * round_trip(compressor, values).double()
    torch.testing.assert_close(round_trip(compressor, factor * values).double(), expected, rtol=1e-5, atol=0)


@nearest
def test_one_element(compressor: Blockwise) -> None:
    """The block is as if 511 zeros followed."""
    value = round_trip(compressor, torch.tensor([-8.0]))
    expected = {"sign_mean": -8 / 512, "sign_rms": -8 / 512**0.5}.get(compressor.codec.name, -8.0)
    torch.testing.assert_close(value, torch.tensor([expected]))


# ----------------------------------------------------------------------------- stochastic rounding


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    steps, compressor = 400, Quantize(bits, 512, rounding="stochastic")  # type: ignore[arg-type]
    values = torch.randn(2048, generator=generator())
    largest = 2 ** (bits - 1) - 1
    scale = values.view(-1, 512).abs().amax(1).repeat_interleave(512).double() / largest
    total = torch.zeros(2048, dtype=torch.float64)
    for step in range(steps):
        made = encode(compressor, values, rng_key=RngKey(seed=11, step=step))
        decoded = decode(compressor, made, 2048)
        assert ((decoded - values).abs() <= scale * (1 + 1e-5)).all()
        total += decoded
    fraction = (values.double() / scale).remainder(1)
    deviation = scale * (fraction * (1 - fraction) / steps).sqrt()
    z = (total / steps - values.double()) / deviation.clamp_min(1e-4 * scale)
    assert z.abs().max() < 6
    assert abs(float(z.mean())) < 4 / 2048**0.5
    assert 0.85 < float(z.std()) < 1.15


def test_random_bits_follow_the_key_and_the_element() -> None:
    compressor, values = Quantize(8, rounding="stochastic"), torch.randn(4096, generator=generator())

    def payload(rng: RngKey) -> Tensor:
        return encode(compressor, values, rng_key=rng).payload[0]

    first = payload(RngKey(1, 2, 3))
    assert torch.equal(first, payload(RngKey(1, 2, 3)))
    _, another_row = encode(compressor, values.repeat(2), rows=2, rng_key=RngKey(1, 2, 3)).payload
    keys = (RngKey(2, 2, 3), RngKey(1 + 2**32, 2, 3), RngKey(1, 3, 3), RngKey(1, 2, 4))
    for other in (another_row, *map(payload, keys)):
        assert (first != other).float().mean() > 0.1


# --------------------------------------------------------------------------------------- accuracy


LADDER = [OneBit(scale="mean"), Quantize(2), Quantize(4), Quantize(8)]


def draw(name: str) -> Tensor:
    normal, uniform = torch.randn(200_000, generator=generator()), torch.rand(200_000, generator=generator(1))
    if name == "gaussian":
        return normal
    if name == "laplace":
        return normal.sign() * -(1 - uniform).log()
    chi_square = torch.randn(3, 200_000, generator=generator(2)).square().sum(0)
    return normal / (chi_square / 3).sqrt()  # Student's t with 3 degrees of freedom


@pytest.mark.parametrize("name", ["gaussian", "laplace", "student"])
def test_more_bits_are_more_exact(name: str) -> None:
    values = draw(name)
    errors = [relative_error(compressor, values) for compressor in LADDER]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.85
    assert errors[1] < 0.65 * errors[0] + 0.1
    assert errors[2] < 0.20
    assert errors[3] < 0.03
    assert relative_error(Quantize(4), values) < relative_error(Quantize(4, levels="uniform"), values)
    assert relative_error(Quantize(2), values) < relative_error(Quantize(2, levels="uniform"), values)
    assert relative_error(OneBit(scale="mean"), values) < relative_error(OneBit(), values)


@pytest.fixture(scope="module")
def gradients() -> list[Tensor]:
    """Gradients of a GPT with 1.7 million parameters, early in its training, each flat as DDP would hand it over."""
    torch.manual_seed(0)
    model = GPT(layers=2, width=256, context=128)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    text, _ = load_corpus()
    taken = []
    for step in range(1, 11):
        starts = torch.randint(len(text) - 128, (16,))
        tokens, targets = windows_at(text, starts, 128, torch.device("cpu"))
        optimizer.zero_grad()
        cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        if step in (5, 10):
            taken.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return taken


def test_gradients_of_a_gpt(gradients: list[Tensor]) -> None:
    for values in gradients:
        one, two, four, eight = (relative_error(compressor, values) for compressor in LADDER)
        assert one > two > four > eight
        assert one < 0.80
        assert two <= 0.40
        assert four <= 0.12
        assert eight <= 0.012
