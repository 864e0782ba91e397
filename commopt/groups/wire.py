"""Exact payload bytes that one rank sends in each primitive, told apart by whether they leave the node.

The formulas describe the algorithms the backends use for large messages: rings for all_reduce, reduce_scatter and
all_gather, a binomial tree for broadcast, direct sends for all_to_all (docs/performance.md derives them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WireBytes:
    """Payload bytes one rank sends: to ranks of its own node (`intra`) and to other nodes (`inter`)."""

    intra: int = 0
    inter: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, count: int) -> WireBytes:
        return WireBytes(self.intra * count, self.inter * count)


@dataclass(frozen=True)
class WireModel:
    """Who sends what to whom among ranks 0..size-1, `nodes[rank]` being the node of each."""

    rank: int
    nodes: Sequence[int]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    def _send(self, peer: int, nbytes: int) -> WireBytes:
        same_node = self.nodes[peer] == self.nodes[self.rank]
        return WireBytes(intra=nbytes) if same_node else WireBytes(inter=nbytes)

    def _to_next(self, nbytes: int) -> WireBytes:
        return self._send((self.rank + 1) % self.size, nbytes)

    def _block(self, place: int, nbytes: int) -> int:
        """Bytes of one of the `size` blocks a buffer is cut into."""
        place %= self.size
        return (place + 1) * nbytes // self.size - place * nbytes // self.size

    def all_reduce(self, nbytes: int) -> WireBytes:
        """Ring: reduce-scatter and all-gather, every block but one to the next rank in each.

        As many bytes leave the node when gloo's ranks on different nodes exchange their parts directly.
        """
        kept = self._block(self.rank + 1, nbytes) + self._block(self.rank + 2, nbytes)
        return self._to_next(2 * nbytes - kept)

    def reduce_scatter(self, nbytes: int) -> WireBytes:
        """Half an all_reduce; `nbytes` is one rank's whole input."""
        return self._to_next(nbytes - self._block(self.rank + 1, nbytes))

    def all_gather(self, nbytes: int) -> WireBytes:
        """Ring: every block but one passes through; `nbytes` is one rank's block."""
        return self._to_next((self.size - 1) * nbytes)

    def all_to_all(self, nbytes: int) -> WireBytes:
        """Direct sends; `nbytes` is one rank's whole input."""
        peers = (peer for peer in range(self.size) if peer != self.rank)
        return sum((self._send(peer, self._block(peer, nbytes)) for peer in peers), WireBytes())

    def reduce(self, nbytes: int, dst: int) -> WireBytes:
        """Ring reduce-scatter, then every rank hands its finished block to `dst`."""
        scattered = self._to_next(nbytes - self._block(self.rank + 1, nbytes))
        handed = 0 if self.rank == dst else self._block(self.rank + 1, nbytes)
        return scattered + self._send(dst, handed)

    def broadcast(self, nbytes: int, src: int) -> WireBytes:
        """Binomial tree rooted at `src`: in round i the first 2^i ranks each serve one more."""
        position = (self.rank - src) % self.size
        sent = WireBytes()
        step = 1
        while step < self.size:
            if position < step and position + step < self.size:
                sent += self._send((src + position + step) % self.size, nbytes)
            step *= 2
        return sent
