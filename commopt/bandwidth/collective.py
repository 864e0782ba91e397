"""What each collective moves, with the conventions of nccl-tests for its size, count and bus bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.bandwidth.contenders import Contender
from commopt.bandwidth.pattern import Pattern, fill


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

    def bind(self, contender: Contender, rank: int, send: Tensor, recv: Tensor) -> Callable[[], object]:
        """Return a call that runs it once; out of place a collective that works in place gets a copy first."""
        run = contender.bind(self.name, recv, send, self.root)
        if self.blocks or send.data_ptr() == recv.data_ptr() or self.root not in (-1, rank):
            return run

        def copy_and_run() -> None:
            recv.copy_(send)
            run()

        return copy_and_run

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
