# SPDX-License-Identifier: Apache-2.0
"""Random numbers by place, without a state: Philox4x32-10 (Salmon et al., SC 2011) in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.kernels.codec import RngKey

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def uniform(begin: int, numel: int, rng_key: RngKey, device: torch.device) -> Tensor:
    """Return numbers `begin` to `begin + numel` of the key: float32 [numel], multiples of 2^-24 below 1."""
    words = _words(begin // 4, -(-(begin + numel) // 4), rng_key, device)
    numbers = torch.empty(words.shape[1], 4, dtype=torch.float32, device=device)
    numbers.copy_(words.bitwise_right_shift_(8).t())
    return numbers.mul_(2.0**-24).view(-1)[begin % 4 :][:numel]


def sixteen_bits(begin: int, numel: int, rng_key: RngKey, device: torch.device) -> Tensor:
    """Return whole numbers below 2^16, `begin` to `begin + numel` of the key: int32 [numel].

    Eight to a counter: the lower half of a word, then the upper.
    """
    words = _words(begin // 8, -(-(begin + numel) // 8), rng_key, device)
    halves = words.t().to(torch.int32, memory_format=torch.contiguous_format).view(torch.int16)
    return halves.view(-1)[begin % 8 :][:numel].to(torch.int32).bitwise_and_(0xFFFF)


def words_of(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Return the words that belong to counters: both int64 [4, numel], 32 bits each. `counter` is overwritten."""
    c0, c1, c2, c3 = counter
    product0, product1 = torch.empty_like(counter[:2])
    k0, k1 = key
    for _ in range(_ROUNDS):
        torch.mul(c0, _MULTIPLIERS[0], out=product0)
        torch.mul(c2, _MULTIPLIERS[1], out=product1)
        # c1, c3 and the key may have more than 32 bits: all they go into is the next XOR, whose high half is cut off.
        torch.bitwise_right_shift(product1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_LOW)
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_LOW)
        (c1, product1), (c3, product0) = (product1, c1), (product0, c3)
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return torch.stack((c0, c1, c2, c3)).bitwise_and_(_LOW)


def _words(first: int, last: int, rng_key: RngKey, device: torch.device) -> Tensor:
    """Return the words of counters `first` to `last`: int64 [4, last - first]."""
    index = torch.arange(first, last, device=device)
    counter = torch.zeros(4, index.numel(), dtype=torch.int64, device=device)
    counter[0], counter[1], counter[2], counter[3] = (
        index & _LOW,
        index >> 32,
        rng_key.step & _LOW,
        rng_key.stream & _LOW,
    )
    return words_of(counter, (rng_key.seed & _LOW, rng_key.seed >> 32 & _LOW))
