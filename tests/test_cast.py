# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding to bfloat16: its definition, its mean, what chance may not do, and the kernel."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from commopt import Cast, ConfigurationError
from commopt.compress import Encoding, RngKey
from commopt.kernels import loader, philox
from commopt.kernels.residual import cache_numel
from tests.emulator import launched_by
from tests.payloads import GuardedResidual, ResidualUse, decode, encode, guarded, shifted
from tests.quantize_cases import DTYPES
from tests.ranks import run
from tests.test_feedback_formula import average_again_and_again, z_scores
from tests.test_kernels import Kernels, kernels  # noqa: F401  # a fixture
from tests.test_philox import oracle

STOCHASTIC = Cast(rounding="stochastic")
RNG = RngKey(2**40 + 7, 3, 9)
LARGEST = torch.finfo(torch.bfloat16).max


def bits_of(values: Tensor) -> list[int]:
    return [each & 0xFFFF for each in values.view(torch.int16).tolist()]


def rounded(values: Tensor, rng: RngKey = RNG) -> Tensor:
    """Return what is sent for `values`: bfloat16."""
    return decode(STOCHASTIC, encode(STOCHASTIC, values, rng_key=rng), values.numel(), torch.bfloat16)


def some(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("begin", [0, 3, 8, 2**35 - 4])
def test_chances_are_halves_of_words(begin: int) -> None:
    expected = []
    for i in range(begin, begin + 21):
        words = oracle(
            (i // 8 & 0xFFFFFFFF, i // 8 >> 32, RNG.step, RNG.stream), (RNG.seed & 0xFFFFFFFF, RNG.seed >> 32)
        )
        expected.append(words[i % 8 // 2] >> i % 2 * 16 & 0xFFFF)
    assert philox.sixteen_bits(begin, 21, RNG, torch.device("cpu")).tolist() == expected


def test_it_is_its_definition() -> None:
    """In whole numbers: the magnitude's bits plus the chance, cut; in rows of two chunks as well as in one."""
    values = torch.cat([some(3000), some(1000) * 1e-39, torch.tensor([0.0, -0.0, 1e-45, -LARGEST, LARGEST])])
    chances = philox.sixteen_bits(0, values.numel(), RNG, torch.device("cpu")).numpy().astype(np.uint64)
    expected = (values.numpy().view(np.uint32).astype(np.uint64) + chances) >> 16
    for rows in (1, 2):
        made = encode(STOCHASTIC, values, rows, rng_key=RNG)
        assert bits_of(decode(STOCHASTIC, made, values.numel(), torch.bfloat16)) == expected.tolist()


def test_a_row_longer_than_what_is_taken_at_once_is_its_definition_too() -> None:
    values = some(2 * cache_numel(torch.device("cpu")) + 13)
    chances = philox.sixteen_bits(0, values.numel(), RNG, torch.device("cpu"))
    expected = (values.view(torch.int32) + chances).bitwise_and_(~0xFFFF).view(torch.float32)
    assert torch.equal(rounded(values).float(), expected)


def test_it_is_unbiased() -> None:
    steps, values = 400, torch.cat([some(2048), some(512) * 1e-40])
    low = (values.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    unit = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double() - low
    total = sum(rounded(values, RngKey(11, step)).double() for step in range(steps))
    fraction = (values.double() - low) / unit
    deviation = unit.abs() * (fraction * (1 - fraction) / steps).sqrt()
    z = ((total / steps - values.double()) / deviation)[(fraction > 0.01) & (fraction < 0.99)]
    assert z.numel() > 2000
    assert z.abs().max() < 6
    assert abs(float(z.mean())) < 4 / z.numel() ** 0.5
    assert 0.85 < float(z.std()) < 1.15


def test_it_is_unbiased_through_an_all_reduce() -> None:
    results = run(average_again_and_again, 3, STOCHASTIC, 100)
    assert len({tuple(hashes) for _, _, hashes in results}) == 1, "ranks got different bits"
    assert len(set(results[0][2])) == 100, "the rng fell alike twice"
    z = z_scores(results[0])
    assert float(z.abs().max()) < 6
    assert abs(float(z.mean())) * z.numel() ** 0.5 < 5


def test_chance_makes_nothing_infinite() -> None:
    inf, nan = float("inf"), float("nan")
    just_over = torch.tensor([0x7F7F7FFF, 0x7F7F0001], dtype=torch.int32).view(torch.float32)  # nearest: the largest
    for seed in range(50):
        got = rounded(torch.tensor([LARGEST, -LARGEST, *just_over, inf, -inf, nan, 3.4e38]), RngKey(seed)).float()
        assert got[:4].tolist() == [LARGEST, -LARGEST, LARGEST, LARGEST]
        assert got[4:6].tolist() == [inf, -inf]
        assert got[6].isnan()
        assert got[7] == inf, "as to nearest"


def test_other_keys_fall_otherwise_and_equal_ones_alike() -> None:
    values = some(4096)
    first = rounded(values)
    assert torch.equal(first, rounded(values))
    for other in (RngKey(RNG.seed + 1, 3, 9), RngKey(RNG.seed, 4, 9), RngKey(RNG.seed, 3, 8)):
        assert (first != rounded(values, other)).float().mean() > 0.2


def test_float16_and_other_words_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"float16.*use torch.bfloat16 or rounding='nearest'"):
        Cast(torch.float16, rounding="stochastic")
    with pytest.raises(ConfigurationError, match=r"rounding='up'.*'nearest', 'stochastic'"):
        Cast(rounding="up")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 8, 4099])
def test_the_kernel_is_the_reference(kernels: Kernels, dtype: torch.dtype, numel: int) -> None:  # noqa: F811
    """Two rows, of which the second begins at a place of its own; every alignment, and bits of every kind."""
    anything = torch.randint(-(2**31), 2**31, (numel,)).to(torch.int32).view(torch.float32)
    ways = (ResidualUse(), ResidualUse(1024.0, 0.9), ResidualUse(3.0, 0.5, old_offset=1, new_offset=2), None)
    for offset, (use, source) in enumerate(itertools.product(ways, (some(numel), anything))):
        values, old = source.to(dtype), torch.randn(numel) / 64

        def sent(
            device: str, values: Tensor = values, old: Tensor = old, way: ResidualUse | None = use, at: int = offset
        ) -> list[Tensor]:
            chunk_numel = -(-numel // 16) * 8
            rows = guarded(2, 2 * chunk_numel, chunk_numel, device)
            kept = GuardedResidual(way or ResidualUse(), old, device)
            moved = shifted(values, device, at % 4)
            STOCHASTIC.compress(moved, rows.payload, Encoding(chunk_numel, 1 / 3, kept.residual if way else None, RNG))
            return [rows.arena.cpu().view(torch.bfloat16), kept.arena.cpu()]

        with patch.object(loader, "loader_for", return_value=None):
            wanted = sent("cpu")
        with launched_by(kernels.loader):
            got = sent(kernels.device)
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0, equal_nan=True)
