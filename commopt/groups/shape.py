# SPDX-License-Identifier: Apache-2.0
"""The shape of a team without a process group: its ranks, their nodes and levels, and the bytes that each rank sends.

WireModel returns the payload bytes of each primitive, for the algorithms that backends use for large messages: rings
for all_reduce, reduce_scatter and all_gather, a binomial tree for broadcast, direct sends for all_to_all
(docs/performance.md derives them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap, zip_longest
from operator import add, sub
from typing import TypeVar

import torch

from commopt.errors import ConfigurationError


@dataclass(frozen=True)
class WireBytes:
    """Payload bytes sent by one rank.

    intra: bytes to ranks of its own node.
    inter: bytes to other nodes.
    beyond: of these, the bytes that leave its site, for each level of sites: the innermost (the rack) first.
    """

    intra: int = 0
    inter: int = 0
    beyond: tuple[int, ...] = ()

    def by_level(self) -> dict[str, int]:
        """Return the bytes by level: "inter.intra" is the part of "inter" that stays in a site, "inter.inter" the rest.

        Levels of sites follow where there are any.
        """
        found, level = {"intra": self.intra, "inter": self.inter}, "inter"
        for leaving in self.beyond:
            found |= {f"{level}.intra": found[level] - leaving, f"{level}.inter": leaving}
            level += ".inter"
        return found

    def __add__(self, other: WireBytes) -> WireBytes:
        return self._each(other, add)

    def __sub__(self, other: WireBytes) -> WireBytes:
        return self._each(other, sub)

    def __mul__(self, count: int) -> WireBytes:
        return WireBytes(self.intra * count, self.inter * count, tuple(nbytes * count for nbytes in self.beyond))

    def __floordiv__(self, count: int) -> WireBytes:
        return WireBytes(self.intra // count, self.inter // count, tuple(nbytes // count for nbytes in self.beyond))

    def _each(self, other: WireBytes, join: Callable[[int, int], int]) -> WireBytes:
        beyond = zip_longest(self.beyond, other.beyond, fillvalue=0)
        return WireBytes(join(self.intra, other.intra), join(self.inter, other.inter), tuple(starmap(join, beyond)))


@dataclass(frozen=True)
class WireModel:
    """Payload bytes that each primitive sends, for ranks 0..size-1.

    rank: the sending rank.
    nodes: node of each rank.
    sites: site of each rank, for each level of sites, innermost first.
    """

    rank: int
    nodes: Sequence[int]
    sites: tuple[Sequence[int], ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    def _send(self, peer: int, nbytes: int) -> WireBytes:
        beyond = tuple(0 if site[peer] == site[self.rank] else nbytes for site in self.sites)
        if self.nodes[peer] == self.nodes[self.rank]:
            return WireBytes(intra=nbytes, beyond=beyond)
        return WireBytes(inter=nbytes, beyond=beyond)

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
    """Ranks 0..size-1 in node-contiguous order, with levels of teams below: a tree.

    The world consists of nodes. Where sites are known, so does its `inter`, which consists of sites: its own `intra`
    are the nodes of one site, its own `inter` one rank of each site, and so on for sites of sites.

    nodes: node of each rank.
    rank: this rank.
    backends: name of the backend for each type of device.
    level: "world", or for a part of it "intra" (one node) or "inter" (one rank of each node). Parts of "inter" are
        "inter.intra" (one site) and "inter.inter" (one rank of each site).
    sites: site of each rank, for each level of sites, innermost first; no two levels divide the ranks alike.
    intra: this rank's node, or site; None if there are no further levels, and in a world of nodes with one rank each.
    inter: the ranks at this rank's place on all nodes, or in all sites; None if there are no further levels, and on
        ranks whose place does not exist everywhere (on unequal nodes: that are not leaders). In a world of nodes with
        one rank each it is there if sites are known, with all ranks.
    """

    intra: TeamShape | None = None
    inter: TeamShape | None = None

    def __init__(
        self,
        nodes: Sequence[int],
        rank: int,
        backends: Mapping[str, str],
        level: str = "world",
        sites: Sequence[Sequence[int]] = (),
    ) -> None:
        self.rank = rank
        self.size = len(nodes)
        self.level = level
        self.wire = WireModel(rank, tuple(nodes), tuple(map(tuple, sites)))
        self._backends = dict(backends)

    @classmethod
    def of(
        cls,
        nodes: Sequence[int],
        rank: int = 0,
        backends: Mapping[str, str] | None = None,
        sites: Sequence[Sequence[int]] = (),
    ) -> TeamShape:
        """Return the shape of any cluster, with its levels. Raises ConfigurationError for an invalid shape.

        nodes: number of ranks on each node.
        backends: None: gloo for CPU tensors.
        sites: site of each node, for each level of sites, innermost first.
        """
        if not nodes or any(count < 1 for count in nodes) or not 0 <= rank < sum(nodes):
            raise ConfigurationError(
                f"rank {rank} of nodes with {tuple(nodes)} ranks: every node needs a rank or more, and the rank must "
                f"be one of them"
            )
        backends = {"cpu": "gloo"} if backends is None else backends
        node_of = tuple(node for node, count in enumerate(nodes) for _ in range(count))

        sites = [[site[node] for node in node_of] for site in sites]

        def part(level: str, members: Sequence[int]) -> TeamShape:
            placed = [[site[member] for member in members] for site in sites]
            return cls([node_of[member] for member in members], members.index(rank), backends, level, placed)

        return with_levels(part, rank, [node_of, *sites])

    @property
    def parts(self) -> Iterator[TeamShape]:
        """This team and all teams of its levels."""
        yield self
        for part in (self.intra, self.inter):
            if part is not None:
                yield from part.parts

    @property
    def has_levels(self) -> bool:
        """Whether there are levels below this team."""
        return self.intra is not None or self.inter is not None

    @cached_property
    def sites_above(self) -> int:
        """How many levels of sites there are above the nodes, or the sites, that this team consists of."""
        return 0 if self.level.endswith("intra") else len(self.wire.sites) - self.level.count("inter")

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
    def members(self) -> tuple[int, ...]:
        """Number of ranks in each node of the world, or in each site of a team of sites."""
        depth = self.level.count("inter")
        return tuple(Counter((self.wire.nodes, *self.wire.sites)[min(depth, len(self.wire.sites))]).values())

    @cached_property
    def uniform(self) -> bool:
        """Whether all nodes (in a team of sites: all sites) have equally many of the ranks."""
        return len(set(self.members)) == 1

    @cached_property
    def leaders(self) -> int:
        """How many ranks of each node, or site, are in an `inter` level."""
        return _leaders(self.members, of_sites=self.level != "world")

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
        for team in self.parts:
            if team.level == level:
                return team
        raise ConfigurationError(f"rank {self.rank} of nodes with {self.ranks_per_node} ranks has no level {level!r}")

    def seen_from(self, rank: int) -> TeamShape:
        """Return the shape of the same cluster for another of its ranks."""
        first = {node: place for place, node in reversed(list(enumerate(self.wire.nodes)))}
        sites = [[site[first[node]] for node in dict.fromkeys(self.wire.nodes)] for site in self.wire.sites]
        return TeamShape.of(self.ranks_per_node, rank, self._backends, sites)


Shape = TypeVar("Shape", bound=TeamShape)


def with_levels(make: Callable[[str, Sequence[int]], Shape], rank: int, divisions: Sequence[Sequence[int]]) -> Shape:
    """Return the team of `rank` in a world with this division into nodes, and then into sites, innermost first.

    make: returns the team of a level and its members, ranks of the world. Called from the world inwards, in one order
        on all ranks.
    """
    world = team = make("world", range(len(divisions[0])))
    members: Sequence[int] = range(len(divisions[0]))
    level = ""
    for depth, division in enumerate(divisions):
        units: dict[int, list[int]] = {}
        for member in members:
            units.setdefault(division[member], []).append(member)
        own = units[division[rank]]
        counts = [len(unit) for unit in units.values()]
        levels_follow = depth + 1 < len(divisions)
        if len(units) == 1 or (max(counts) == 1 and not levels_follow):
            break
        if max(counts) > 1:
            team.intra = make(f"{level}intra", own)
        place = own.index(rank)
        if place >= _leaders(counts, of_sites=depth > 0):
            break
        members = [unit[place] for unit in units.values()]
        team.inter = across = make(f"{level}inter", members)
        team, level = across, f"{level}inter."
    return world


def _leaders(counts: Sequence[int], *, of_sites: bool) -> int:
    """Return how many places have a level of their own between nodes, or sites, with so many ranks.

    A place needs a rank everywhere. On unequal nodes only the first rank communicates with other nodes, since the
    ranks of a node share its link; nodes of a site each have their own.
    """
    return min(counts) if of_sites or len(set(counts)) == 1 else 1
