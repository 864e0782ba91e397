# SPDX-License-Identifier: Apache-2.0
"""The implementations that are timed, and inputs whose results are known exactly.

Element i of a rank depends on i modulo a prime, so that blocks of any usual length differ from each other, and only
one period has to be kept. No element is zero (on up to thousands of ranks), so that a rank's share cannot be
missing unnoticed. All are small whole numbers that no order of additions can round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.aggregate import Aggregator, Hierarchical
from commopt.aggregate.forms import Form
from commopt.collectives import Communicator
from commopt.collectives.communicator import Op
from commopt.groups import WireBytes, all_gather_single, reduce_scatter_single
from commopt.hooks import PRESETS, build_preset
from commopt.probe import collectives as probe
from commopt.probe.collectives import Collective

COMMOPT = "commopt"
TORCH = "torch"

# Those that a Communicator has too, in nccl-tests' order.
COLLECTIVES = {
    name: probe.COLLECTIVES[name] for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
}


@dataclass(frozen=True)
class Implementation:
    """An implementation of the collectives.

    functions: by the collective, of (recv, send) or, in place (all_reduce, broadcast), of recv. wire_bytes: what this
    rank sends in one call of (collective, numel, dtype); None where no formula says.
    """

    name: str
    functions: Mapping[str, Callable[..., object]]
    wire_bytes: Callable[[str, int, torch.dtype], WireBytes | None] = lambda collective, numel, dtype: None
    error_bound: float = 0.0


def of_commopt(name: str, comm: Communicator, op: Op) -> Implementation:
    """Return a Communicator's methods; the aggregator of that name is used by all_reduce."""
    aggregator = find_aggregator(name)
    functions: dict[str, Callable[..., object]] = {
        "all_reduce": partial(comm.all_reduce, op=op, aggregator=aggregator),
        "reduce_scatter": partial(comm.reduce_scatter, op=op),
        "all_gather": comm.all_gather,
        "broadcast": comm.broadcast,
        "all_to_all": comm.all_to_all,
    }

    def wire_bytes(collective: str, numel: int, dtype: torch.dtype) -> WireBytes | None:
        return comm.wire_bytes(numel, dtype, aggregator) if collective == "all_reduce" else None

    return Implementation(name, functions, wire_bytes, 0.0 if aggregator is None else aggregator.error_bound)


def of_torch(op: Op, device: torch.device) -> Implementation:
    """Return torch.distributed on the default process group."""
    # Only NCCL divides by itself; elsewhere an average is a sum and a division, as in stock DDP.
    divides = op == "avg" and device.type == "cuda"
    reduce_op = dist.ReduceOp.AVG if divides else dist.ReduceOp.SUM

    def reducing(function: Callable[..., object]) -> Callable[..., object]:
        function = partial(function, op=reduce_op)
        if op == "sum" or divides:
            return function
        return lambda recv, *send: (function(recv, *send), recv.div_(dist.get_world_size()))

    functions = {
        "all_reduce": reducing(dist.all_reduce),
        "reduce_scatter": reducing(reduce_scatter_single),
        "all_gather": all_gather_single,
        "broadcast": dist.broadcast,
        "all_to_all": dist.all_to_all_single,
    }
    return Implementation(TORCH, functions)


def find_aggregator(name: str) -> Aggregator | None:
    """Return the aggregator of a name, or of a preset's name with options ("quantized:bits=4"); None if unknown.

    Raises ConfigurationError for options that a preset does not have.
    """
    return build_preset(name) if "=" in name else known_aggregators().get(name)


def known_aggregators() -> dict[str, Aggregator]:
    """Return every preset, and each form of the hierarchical one ("hierarchical:leader")."""
    forms = {f"hierarchical:{form}": Hierarchical(form=form) for form in get_args(Form)}
    return {name: preset.build() for name, preset in PRESETS.items()} | forms


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

    def buffers(
        self, collective: Collective, rank: int, count: int, device: torch.device, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (send, recv), `send` filled with the rank's elements.

        In place they share memory as NCCL wants it: the block is the rank's own in the larger side.
        """
        send_numel, recv_numel = collective.numels(count, self.world_size)
        larger = torch.zeros(max(send_numel, recv_numel), dtype=self.dtype, device=device)
        own = larger[rank * count :][:count] if collective.blocks else larger
        send = own if collective.recv_blocks and in_place else larger[:send_numel]
        if in_place:
            recv = own if collective.send_blocks else larger
        else:
            recv = torch.zeros(recv_numel, dtype=self.dtype, device=device)
        fill(send, self.of_rank(rank))
        return send, recv

    def expected(self, collective: Collective, rank: int, count: int, op: str) -> list[Tensor]:
        """Return a period of every block of `count` elements of recv, float64."""
        if collective.reduces:
            sources = [self.total(op)]
        elif collective.recv_blocks:
            sources = [self.of_rank(source) for source in range(self.world_size)]
        else:
            sources = [self.of_rank(collective.root)]
        start = rank * count if collective.send_blocks else 0
        return [source.roll(-start) for source in sources]

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
