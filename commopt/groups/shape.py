# SPDX-License-Identifier: Apache-2.0
"""The shape of a team without a process group: its ranks, their nodes and levels, and the bytes that each rank sends.

WireModel returns the payload bytes of each primitive, for the algorithms that backends use for large messages: rings
for all_reduce, reduce_scatter and all_gather, a binomial tree for broadcast, direct sends for all_to_all
(docs/performance.md derives them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from commopt.errors import ConfigurationError


@dataclass(frozen=True)
class WireBytes:
    """Payload bytes sent by one rank.

    intra: bytes to ranks of its own node.
    inter: bytes to other nodes.
    """

    intra: int = 0
    inter: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.intra + other.intra, self.inter + other.inter)

    def __mul__(self, count: int) -> WireBytes:
        return WireBytes(self.intra * count, self.inter * count)


@dataclass(frozen=True)
class WireModel:
    """Payload bytes that each primitive sends, for ranks 0..size-1.

    rank: the sending rank.
    nodes: node of each rank.
    """

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
        """Return the bytes of one of the `size` blocks of a buffer."""
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


class TeamShape:
    """Ranks 0..size-1 in node-contiguous order.

    nodes: node of each rank.
    rank: this rank.
    backends: name of the backend for each type of device.
    level: "world", or for a part of it "intra" (one node) or "inter" (one rank of each node).
    intra: this rank's node; None if there are no further levels.
    inter: the ranks at this rank's place on all nodes; None if there are no further levels, and on ranks that are not
        leaders if nodes are unequal.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        rank: int,
        backends: Mapping[str, str],
        level: str = "world",
        intra: TeamShape | None = None,
        inter: TeamShape | None = None,
    ) -> None:
        self.rank = rank
        self.size = len(nodes)
        self.level = level
        self.wire = WireModel(rank, tuple(nodes))
        self.intra = intra
        self.inter = inter
        self._backends = dict(backends)

    @classmethod
    def of(cls, nodes: Sequence[int], rank: int = 0, backends: Mapping[str, str] | None = None) -> TeamShape:
        """Return the shape of any cluster, with its levels. Raises ConfigurationError for an invalid shape.

        nodes: number of ranks on each node.
        backends: None: gloo for CPU tensors.
        """
        if not nodes or any(count < 1 for count in nodes) or not 0 <= rank < sum(nodes):
            raise ConfigurationError(
                f"rank {rank} of nodes with {tuple(nodes)} ranks: every node needs a rank or more, and the rank must "
                f"be one of them"
            )
        backends = {"cpu": "gloo"} if backends is None else backends
        node_of = tuple(node for node, count in enumerate(nodes) for _ in range(count))

        def part(level: str, members: tuple[int, ...] | None) -> TeamShape | None:
            if members is None:
                return None
            return cls([node_of[member] for member in members], members.index(rank), backends, level)

        found = levels_of(node_of, rank)
        if found is None:
            return cls(node_of, rank, backends)
        return cls(node_of, rank, backends, "world", part("intra", found.intra), part("inter", found.inter))

    # Cached: every message needs these three, and computing them takes time proportional to the team.
    @cached_property
    def node_count(self) -> int:
        """Number of different nodes among the ranks."""
        return len(set(self.wire.nodes))

    @cached_property
    def ranks_per_node(self) -> tuple[int, ...]:
        """Number of ranks on each node, in node order."""
        return tuple(Counter(self.wire.nodes).values())

    @cached_property
    def uniform(self) -> bool:
        """Whether all nodes have equally many of the ranks."""
        return len(set(self.ranks_per_node)) == 1

    @property
    def default_device(self) -> torch.device:
        """The type of device whose tensors this team is for: the GPU if its backend is NCCL."""
        return torch.device("cuda" if self._backends.get("cuda") == "nccl" else "cpu")

    def backend(self, device: torch.device) -> str:
        """Return the name of the backend for tensors of `device` (gloo, nccl, ...).

        Raises ConfigurationError if there is none, as for CPU tensors in an NCCL group.
        """
        if device.type not in self._backends:
            raise ConfigurationError(
                f"a {device.type} tensor cannot travel over a process group with backends {self._backends}; move the "
                f"tensor, or start with init_process_group('cpu:gloo,cuda:nccl')"
            )
        return self._backends[device.type]

    def at(self, level: str) -> TeamShape:
        """Return the part of this team at a level. Raises ConfigurationError if there is none."""
        for team in (self, self.intra, self.inter):
            if team is not None and team.level == level:
                return team
        raise ConfigurationError(f"rank {self.rank} of nodes with {self.ranks_per_node} ranks has no level {level!r}")

    def seen_from(self, rank: int) -> TeamShape:
        """Return the shape of the same cluster for another of its ranks."""
        return TeamShape.of(self.ranks_per_node, rank, self._backends)


class Levels(NamedTuple):
    """Levels below a team.

    intra: ranks of this rank's node.
    inter: ranks at this rank's place on every node; None if it takes no part in that level.
    """

    intra: tuple[int, ...]
    inter: tuple[int, ...] | None


def levels_of(node_of: Sequence[int], rank: int) -> Levels | None:
    """Return the levels of `rank` in a cluster of these nodes; None if there is only one level."""
    members = [[other for other, node in enumerate(node_of) if node == mine] for mine in dict.fromkeys(node_of)]
    if len(members) == 1 or all(len(node) == 1 for node in members):
        return None
    own = next(node for node in members if rank in node)
    place = own.index(rank)
    # On unequal nodes only the first place exists on every node: only leaders communicate between nodes.
    has_inter = place == 0 or len({len(node) for node in members}) == 1
    return Levels(tuple(own), tuple(node[place] for node in members) if has_inter else None)
