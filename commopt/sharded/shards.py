# SPDX-License-Identifier: Apache-2.0
"""The shards of an FSDP2 parameter group, as every rank can tell them, in the order of commopt's teams."""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
from torch import Tensor

from commopt.aggregate.rows import Shard
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.sharded.layouts import Part

Parts = tuple[Part, ...]


@lru_cache(maxsize=4096)
def shard_of(parts: Parts, rank: int, count: int) -> Shard:
    """Return shard `rank` of `count` of the parameters of a group, in FSDP's order."""
    pieces, offsets, parameters, numel = [], [], [], 0
    for part in parts:
        piece = part.of(rank, count).piece(rank, count)
        if piece.numel:
            pieces.append(piece)
            offsets.append(numel)
            parameters.append(part.name)
        numel += part.padded
    return Shard(Layout(tuple(pieces)), tuple(offsets), tuple(parameters), numel)


class ShardOrder:
    """The ranks of a shard group in a team's order, which goes node by node.

    ranks: the rank in the shard group of each member of the team.
    """

    def __init__(self, team: TeamShape, ranks: tuple[int, ...]) -> None:
        self.team = team
        self.ranks = ranks
        self._index: dict[torch.device, Tensor] = {}

    @cached_property
    def is_groups_own(self) -> bool:
        """Whether the shard group has the same order."""
        return self.ranks == tuple(range(len(self.ranks)))

    def index(self, device: torch.device) -> Tensor:
        """Return `ranks` on `device`; copied there once, as the host waits for that."""
        if device not in self._index:
            self._index[device] = torch.tensor(self.ranks, device=device)
        return self._index[device]

    def shards(self, parts: Parts) -> tuple[Shard, ...]:
        """Return the shards of `parts`, by rank of the team."""
        return _shards(parts, self.ranks)


@lru_cache(maxsize=1024)
def _shards(parts: Parts, ranks: tuple[int, ...]) -> tuple[Shard, ...]:
    return tuple(shard_of(parts, rank, len(ranks)) for rank in ranks)
