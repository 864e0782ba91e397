# SPDX-License-Identifier: Apache-2.0
"""The collectives that `probe` and `bandwidth` time: their buffers, their sizes, and the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor


@dataclass(frozen=True)
class Collective:
    """`count` elements per rank, or per block where a side holds one block for every rank.

    name: of the method, of a Team and of a Communicator.
    reduces: whether elements are added up.
    send_blocks, recv_blocks: which sides hold a block for every rank.
    root: the one rank whose buffer is read or written; -1 where all ranks are alike.
    """

    name: str
    reduces: bool = False
    send_blocks: bool = False
    recv_blocks: bool = False
    root: int = -1

    @property
    def blocks(self) -> bool:
        """Whether the larger side holds a block for every rank; otherwise the collective works in place."""
        return self.send_blocks or self.recv_blocks

    @property
    def closed(self) -> bool:
        """Whether no rank can leave before all have entered, so that calls need no barrier between them."""
        return self.root < 0

    @property
    def aggregates(self) -> bool:
        """Whether commopt runs it with an aggregator of the caller's choice."""
        return self.reduces and not self.blocks

    @property
    def has_in_place(self) -> bool:
        """Whether NCCL's in-place layout exists; an all_to_all would overwrite blocks it has not sent."""
        return not (self.send_blocks and self.recv_blocks)

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw: the share of the larger side that must cross a link, whatever the algorithm."""
        return (1 if self.blocks else 2) * (ranks - 1) / ranks if self.closed else 1.0

    def count(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """Return the count whose larger side fits into `nbytes`, rounded down."""
        return nbytes // itemsize // (ranks if self.blocks else 1)

    def numels(self, count: int, ranks: int) -> tuple[int, int]:
        """Return the elements of the sent side and of the received one."""
        return count * (ranks if self.send_blocks else 1), count * (ranks if self.recv_blocks else 1)

    def bind(self, function: Callable[..., object], rank: int, send: Tensor, recv: Tensor) -> Callable[[], object]:
        """Return a call that runs it once; out of place a collective that works in place gets a copy first.

        function: of (recv, send), or in place of recv and, where there is one, the root.
        """
        if self.blocks:
            return partial(function, recv, send)
        run = partial(function, recv) if self.closed else partial(function, recv, self.root)
        if send.data_ptr() == recv.data_ptr() or self.root not in (-1, rank):
            return run
        return lambda: (recv.copy_(send), run())


COLLECTIVES = {
    each.name: each
    for each in (
        Collective("all_reduce", reduces=True),
        Collective("reduce_scatter", reduces=True, send_blocks=True),
        Collective("all_gather", recv_blocks=True),
        Collective("all_to_all", send_blocks=True, recv_blocks=True),
        Collective("reduce", reduces=True, root=0),
        Collective("broadcast", root=0),
    )
}


def sizes(first: int, last: float, factor: float, step: int = 0) -> Iterator[int]:
    """Yield the bytes of every message, from `first`, which comes in any case, to `last`.

    Each is `factor` times the one before or, where that is 1, `step` more.
    """
    exact: float = first
    yield first
    while (exact := exact * factor if factor > 1 else exact + step) <= last:
        yield round(exact)
