"""Inputs whose results are known exactly: small whole numbers that no order of additions can round.

Element i of a rank depends on i modulo a prime, so that blocks of any usual length differ from each other, and only
one period has to be kept. No element is zero (on up to thousands of ranks), so that a rank's share cannot be
missing unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

PERIOD = 1021
_ROUNDING = 1.01  # of float32 sums and of the buffer's dtype, beside the error that an aggregator is known to make

_CHUNK_NUMEL = 4096 * PERIOD


@dataclass(frozen=True)
class Pattern:
    """The values of all ranks for one element type."""

    dtype: torch.dtype
    world_size: int

    def of_rank(self, rank: int) -> Tensor:
        """Return one period of `rank`'s elements, float64 [PERIOD]."""
        # Where even ones would add up to too much, each element is left to every `sharing`-th rank.
        sharing = ceil(self.world_size / self._exact_limit)
        adding_ranks = ceil(self.world_size / sharing)
        # Odd, so that it has no common factor with block lengths, which are mostly powers of two.
        levels = (min(PERIOD, self._exact_limit // adding_ranks) - 1) | 1
        index = torch.arange(PERIOD, device="cpu")
        values = 1 + (7 * index + rank) % levels
        return torch.where((index + rank) % sharing == 0, values, 0).double()

    def total(self, op: str) -> Tensor:
        """Return one period of the sum or the average over ranks, float64 [PERIOD]."""
        total = torch.stack([self.of_rank(rank) for rank in range(self.world_size)]).sum(0)
        return total / self.world_size if op == "avg" else total

    def tolerance(self, op: str, reduces: bool, error_bound: float) -> float:
        """Return the relative error a correct result may have.

        None for data that only moves, for sums, and for averages over a power of two of ranks: dividing by one is
        exact as well. Other averages may round once per addition and once for the division.
        """
        if not reduces:
            return 0.0
        if error_bound:
            return _ROUNDING * error_bound + torch.finfo(self.dtype).eps
        divides_exactly = self.world_size & (self.world_size - 1) == 0
        if op == "sum" or divides_exactly:
            return 0.0
        return (self.world_size + 1) * torch.finfo(self.dtype).eps / 2

    @property
    def _exact_limit(self) -> int:
        """Whole numbers up to here are exact in `dtype`."""
        if self.dtype.is_floating_point:
            return round(2 / torch.finfo(self.dtype).eps)
        return torch.iinfo(self.dtype).max


def fill(buffer: Tensor, period: Tensor) -> None:
    """Repeat `period` over `buffer`."""
    period = period.to(buffer)
    for chunk in buffer.split(_CHUNK_NUMEL):
        chunk.copy_(_repeated(period, chunk.numel()))


def count_wrong(buffer: Tensor, period: Tensor, tolerance: float, lossless: bool) -> int:
    """Return how many elements of `buffer` differ from the repeated `period` by more than `tolerance` allows.

    Relative to each element, for lossy methods to the largest: they share a scale between elements. NaN is wrong.
    """
    period = period.to(buffer.device)
    allowed = tolerance * (period if lossless else period.max().expand(PERIOD))
    wrong = 0
    for chunk in buffer.split(_CHUNK_NUMEL):
        error = (chunk.double() - _repeated(period, chunk.numel())).abs()
        wrong += chunk.numel() - int((error <= _repeated(allowed, chunk.numel())).sum())
    return wrong


def _repeated(period: Tensor, numel: int) -> Tensor:
    return period.repeat(ceil(numel / PERIOD))[:numel]
