# SPDX-License-Identifier: Apache-2.0
"""The random bits of stochastic rounding: published vectors, and an oracle in Python's own integers."""

from __future__ import annotations

import pytest
import torch

from commopt.compress import RngKey
from commopt.kernels import philox

# The known answers for philox4x32 with 10 rounds that its authors publish: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

CPU = torch.device("cpu")


def oracle(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c, k = list(counter), list(key)
    for _ in range(10):
        products = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (products[1] >> 32) ^ c[1] ^ k[0],
            products[1] & 0xFFFFFFFF,
            (products[0] >> 32) ^ c[3] ^ k[1],
            products[0] & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def oracle_uniform(begin: int, numel: int, rng: RngKey) -> list[float]:
    key = rng.seed & 0xFFFFFFFF, rng.seed >> 32 & 0xFFFFFFFF
    numbers = []
    for i in range(begin, begin + numel):
        words = oracle((i // 4 & 0xFFFFFFFF, i // 4 >> 32, rng.step, rng.stream), key)
        numbers.append((words[i % 4] >> 8) * 2.0**-24)
    return numbers


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert philox.words_of(torch.tensor(counter)[:, None], key)[:, 0].tolist() == list(words)
    assert oracle(counter, key) == words


@pytest.mark.parametrize("begin", [0, 1, 7, 64, 2**34 - 6, 2**40])
@pytest.mark.parametrize("rng", [RngKey(), RngKey(2**64 - 3, 2**32 - 1, 5), RngKey(12345678901234, 17, 2**31)])
def test_uniform(begin: int, rng: RngKey) -> None:
    numbers = philox.uniform(begin, 21, rng, CPU)
    assert numbers.dtype == torch.float32
    assert numbers.tolist() == oracle_uniform(begin, 21, rng)


def test_numbers_stay_below_one_and_fill_the_interval() -> None:
    numbers = philox.uniform(0, 1_000_000, RngKey(seed=1), CPU)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 100, 0, 1)
    assert ((counts - 10_000) / 100).abs().max() < 5  # standard deviations


def test_a_negative_seed_is_a_seed_and_there_may_be_no_numbers() -> None:
    assert torch.equal(philox.uniform(0, 8, RngKey(seed=-1), CPU), philox.uniform(0, 8, RngKey(seed=2**64 - 1), CPU))
    assert philox.uniform(8, 0, RngKey(), CPU).shape == (0,)
