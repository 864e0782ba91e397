# SPDX-License-Identifier: Apache-2.0
"""The machine of each process, and the ranks that share one, by NCCL's rules but without NCCL."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class HostIdentity:
    """Identity of a process's machine. Processes with equal `node_key` are on the same machine."""

    hostname: str
    boot_id: str
    nccl_hostid: str | None
    local_rank: int | None

    @property
    def node_key(self) -> tuple[str, ...]:
        """The machine's key, as in NCCL: NCCL_HOSTID if it is set, otherwise host name and boot id."""
        return (self.nccl_hostid,) if self.nccl_hostid else (self.hostname, self.boot_id)

    def as_dict(self) -> dict[str, str | int | None]:
        """Return plain values for JSON."""
        return asdict(self)


def read_host_identity(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> HostIdentity:
    """Return this process's identity.

    root: folder with recorded files to read instead of the machine's.
    """
    try:
        boot_id = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux, or a hardened container: only the host name is known
        boot_id = ""
    local_rank = environ.get("LOCAL_RANK", "")
    return HostIdentity(
        hostname=socket.gethostname(),
        boot_id=boot_id,
        nccl_hostid=environ.get("NCCL_HOSTID") or None,
        local_rank=int(local_rank) if local_rank.isdecimal() else None,
    )


@dataclass(frozen=True)
class Cluster:
    """Ranks 0..world_size-1 of one group, sorted into nodes.

    Nodes are ordered by their smallest rank. Ranks of a node are ordered by local rank, so that equal positions on
    different nodes are equal GPUs (and rails).

    nodes: ranks of each node.
    names: name of each node.
    emulated: whether blocks of ranks were declared to be nodes.
    sites: site of each node, outermost level first: ("berlin", "rack 3"); () if no sites are known. Nodes of a site
        are neighbours in the order of nodes.
    """

    nodes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    emulated: bool = False
    sites: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def from_hosts(cls, hosts: Sequence[HostIdentity], emulated: bool = False) -> Cluster:
        """Group ranks by machine; `hosts[rank]` is the identity of each rank's machine."""
        members: dict[tuple[str, ...], list[int]] = {}
        for rank, host in enumerate(hosts):
            members.setdefault(host.node_key, []).append(rank)
        nodes = tuple(tuple(sorted(ranks, key=lambda r: _local_order(hosts[r], r))) for ranks in members.values())
        names = tuple(hosts[node[0]].nccl_hostid or hosts[node[0]].hostname for node in nodes)
        return cls(nodes, names, emulated)

    @classmethod
    def from_ranks_per_node(cls, world_size: int, ranks_per_node: int) -> Cluster:
        """Declare consecutive blocks of ranks to be nodes, regardless of their machines.

        Raises ValueError unless the blocks fill the world exactly.
        """
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node {ranks_per_node} is not a positive number; pass at least 1")
        if world_size % ranks_per_node:
            best = max(d for d in range(1, min(ranks_per_node, world_size) + 1) if world_size % d == 0)
            raise ValueError(
                f"world_size {world_size} is not a multiple of ranks_per_node {ranks_per_node}; "
                f"pass ranks_per_node={best}, or leave it out to use the real hosts"
            )
        starts = range(0, world_size, ranks_per_node)
        nodes = tuple(tuple(range(start, start + ranks_per_node)) for start in starts)
        return cls(nodes, tuple(f"node{i}" for i in range(len(nodes))), emulated=True)

    def in_sites(self, site_of: Sequence[str]) -> Cluster:
        """Return the same ranks with the sites of their nodes.

        site_of: site of each rank, with levels outermost first, as in "berlin/rack 3"; "" for none.
        Raises ValueError if only some ranks have a site, if their levels differ, or if a node is split.
        """
        without = [rank for rank, site in enumerate(site_of) if not site]
        if len(without) == len(site_of):
            return self
        first = next(rank for rank, site in enumerate(site_of) if site)
        if without:
            raise ValueError(
                f"rank {_listed(without)} has no site, and rank {first} is in site {site_of[first]!r}; give every rank "
                f"a site, or none"
            )
        paths = [tuple(site.split("/")) for site in site_of]
        for rank, path in enumerate(paths):
            if len(path) != len(paths[0]):
                raise ValueError(
                    f"rank 0 is in site {site_of[0]!r}, of {len(paths[0])} level(s), and rank {rank} in "
                    f"{site_of[rank]!r}, of {len(path)}; give every rank equally many levels, as in site/rack"
                )
        for node, name in zip(self.nodes, self.names, strict=True):
            for rank in node:
                if paths[rank] != paths[node[0]]:
                    raise ValueError(
                        f"ranks {node[0]} and {rank} are on node {name} and in sites {site_of[node[0]]!r} and "
                        f"{site_of[rank]!r}; a site holds whole nodes: give all ranks of a node the same site"
                    )
        order = _by_site([paths[node[0]] for node in self.nodes])
        return replace(
            self,
            nodes=tuple(self.nodes[node] for node in order),
            names=tuple(self.names[node] for node in order),
            sites=tuple(paths[self.nodes[node][0]] for node in order),
        )

    @cached_property
    def site_levels(self) -> tuple[tuple[int, ...], ...]:
        """Site of each node as a number, for each level of sites that divides the nodes, innermost first.

        A level is left out if all nodes are in one of its sites, or if it divides them as the level below does.
        """
        levels: list[tuple[int, ...]] = []
        below = len(self.nodes)
        for depth in range(len(self.sites[0]) if self.sites else 0, 0, -1):
            numbers = {path: number for number, path in enumerate(dict.fromkeys(path[:depth] for path in self.sites))}
            if 1 < len(numbers) < below:
                levels.append(tuple(numbers[path[:depth]] for path in self.sites))
                below = len(numbers)
        return tuple(levels)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(node) for node in self.nodes)

    @property
    def order(self) -> tuple[int, ...]:
        """All ranks, node by node: a ring in this order crosses each node boundary once."""
        return tuple(rank for node in self.nodes for rank in node)

    @property
    def uniform(self) -> bool:
        """Whether every node has the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    @property
    def node_contiguous(self) -> bool:
        """Whether the launcher numbered the ranks node by node."""
        return all(max(node) - min(node) + 1 == len(node) for node in self.nodes)

    def node_of(self, rank: int) -> int:
        """Return the index of the node that holds `rank`."""
        for index, node in enumerate(self.nodes):
            if rank in node:
                return index
        raise ValueError(f"rank {rank} is not in this cluster of {self.world_size} ranks")

    def __str__(self) -> str:
        counts = [len(node) for node in self.nodes]
        per_node = f"{counts[0]}" if self.uniform else "+".join(map(str, counts))
        shape = f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''} x {per_node} rank(s)"
        for site in self.site_levels:
            counts = [site.count(number) for number in dict.fromkeys(site)]
            shape += f" in {len(counts)} sites of {' + '.join(map(str, counts))} nodes"
        return shape + (" (emulated)" if self.emulated else "")


def _by_site(paths: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the nodes site by site: in a site they keep their order, and sites that of their first nodes."""
    first: dict[tuple[str, ...], int] = {}
    for node, path in enumerate(paths):
        for depth in _depths(path):
            first.setdefault(path[:depth], node)
    return sorted(range(len(paths)), key=lambda node: [first[paths[node][:depth]] for depth in _depths(paths[node])])


def _depths(path: tuple[str, ...]) -> range:
    return range(1, len(path) + 1)


def _listed(ranks: Sequence[int]) -> str:
    """Return at most eight of the ranks, as text."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more


def _local_order(host: HostIdentity, rank: int) -> tuple[int, int]:
    return (rank if host.local_rank is None else host.local_rank, rank)
