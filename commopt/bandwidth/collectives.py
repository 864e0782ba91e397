# SPDX-License-Identifier: Apache-2.0
"""What is run: the collectives with nccl-tests' conventions, inputs whose results are known exactly, and who runs it.

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
from commopt.aggregate.hierarchical import Form
from commopt.collectives import Communicator
from commopt.collectives.communicator import Op
from commopt.groups import WireBytes, all_gather_single, reduce_scatter_single
from commopt.hooks import PRESETS, build_preset

COMMOPT = "commopt"
TORCH = "torch"


Call = Callable[[], object]


@dataclass(frozen=True)
class Implementation:
    """Who runs the collectives.

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
    """Return what a name stands for, or a preset's name with options ("quantized:bits=4"); None if nothing.

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


@dataclass(frozen=True)
class Collective:
    """`count` elements per rank, or per block where a side holds one block for every rank."""

    name: str
    reduces: bool = False
    send_blocks: bool = False
    recv_blocks: bool = False
    root: int = -1

    @property
    def blocks(self) -> bool:
        """Whether the larger side holds world_size blocks."""
        return self.send_blocks or self.recv_blocks

    @property
    def aggregates(self) -> bool:
        """Whether commopt runs it with an aggregator of the caller's choice."""
        return self.reduces and not self.blocks

    def bus_factor(self, world_size: int) -> float:
        """Return busbw / algbw: the share of the larger side that must cross a link, whatever the algorithm."""
        if self.root >= 0:
            return 1.0
        return (1 if self.blocks else 2) * (world_size - 1) / world_size

    def count(self, nbytes: int, dtype: torch.dtype, world_size: int) -> int:
        """Return the count that fits into `nbytes`, rounded down."""
        return nbytes // dtype.itemsize // (world_size if self.blocks else 1)

    def nbytes(self, count: int, dtype: torch.dtype, world_size: int) -> int:
        """Return the bytes of the larger side on one rank: the size in the table and in algbw."""
        return count * dtype.itemsize * (world_size if self.blocks else 1)

    @property
    def has_in_place(self) -> bool:
        """Whether NCCL's in-place layout exists; an all_to_all would overwrite blocks it has not sent."""
        return not (self.send_blocks and self.recv_blocks)

    def buffers(
        self, pattern: Pattern, rank: int, count: int, device: torch.device, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        """Return (send, recv), `send` filled with the rank's pattern.

        In place they share memory as NCCL wants it: the block is the rank's own in the larger side.
        """
        send_numel, recv_numel = (
            count * (pattern.world_size if blocks else 1) for blocks in (self.send_blocks, self.recv_blocks)
        )
        larger = torch.zeros(max(send_numel, recv_numel), dtype=pattern.dtype, device=device)
        own = larger[rank * count :][:count] if self.blocks else larger
        send = own if self.recv_blocks and in_place else larger[:send_numel]
        if in_place:
            recv = own if self.send_blocks else larger
        else:
            recv = torch.zeros(recv_numel, dtype=pattern.dtype, device=device)
        fill(send, pattern.of_rank(rank))
        return send, recv

    def bind(self, implementation: Implementation, rank: int, send: Tensor, recv: Tensor) -> Call:
        """Return a call that runs it once; out of place a collective that works in place gets a copy first."""
        run = partial(implementation.functions[self.name], recv, *([send] if self.blocks else []))
        if self.root >= 0:
            run = partial(run, src=self.root)
        if self.blocks or send.data_ptr() == recv.data_ptr() or self.root not in (-1, rank):
            return run
        return lambda: (recv.copy_(send), run())

    def expected(self, pattern: Pattern, rank: int, count: int, op: str) -> list[Tensor]:
        """Return the pattern of every block of `count` elements of recv, float64."""
        if self.reduces:
            sources = [pattern.total(op)]
        elif self.recv_blocks:
            sources = [pattern.of_rank(source) for source in range(pattern.world_size)]
        else:
            sources = [pattern.of_rank(self.root)]
        start = rank * count if self.send_blocks else 0
        return [source.roll(-start) for source in sources]


COLLECTIVES = {
    collective.name: collective
    for collective in (
        Collective("all_reduce", reduces=True),
        Collective("reduce_scatter", reduces=True, send_blocks=True),
        Collective("all_gather", recv_blocks=True),
        Collective("broadcast", root=0),
        Collective("all_to_all", send_blocks=True, recv_blocks=True),
    )
}
