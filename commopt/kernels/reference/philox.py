"""Philox4x32-10, a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11)."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.kernels.codec import Dice

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def uniform(begin: int, numel: int, dice: Dice, device: torch.device) -> Tensor:
    """Return numbers `begin` to `begin + numel` that `dice` stands for: float32 [numel], multiples of 2^-24 below 1."""
    first = begin // 4
    index = torch.arange(first, -(-(begin + numel) // 4), device=device)
    counter = torch.zeros(4, index.numel(), dtype=torch.int64, device=device)
    counter[0], counter[1], counter[2], counter[3] = index & _LOW, index >> 32, dice.step & _LOW, dice.stream & _LOW
    words = words_of(counter, (dice.seed & _LOW, dice.seed >> 32 & _LOW))
    numbers = torch.empty(index.numel(), 4, dtype=torch.float32, device=device)
    numbers.copy_(words.bitwise_right_shift_(8).t())
    offset = begin - 4 * first
    return numbers.mul_(2.0**-24).view(-1)[offset : offset + numel]


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
