# SPDX-License-Identifier: Apache-2.0
"""A rank with nobody to send to: what is left of its steps is an aggregator's own work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, context_for
from commopt.feedback import Layout, ResidualStore
from commopt.groups import Team, TeamShape, apply_scale

_CPU = torch.device("cpu")


class SilentTeam(TeamShape):
    """A team whose collectives send nothing and write what a transport would: the other ranks send what this one does.

    Sums are those of this rank alone.
    """

    def all_reduce(self, buffer: Tensor, *, scale: float = 1.0) -> None:
        """Scale `buffer`."""
        apply_scale(buffer, scale)

    def reduce(self, buffer: Tensor, dst: int) -> None:
        """Leave `buffer` as it is."""

    def broadcast(self, buffer: Tensor, src: int) -> None:
        """Leave `buffer` as it is."""

    def all_gather(self, gathered: Tensor, own: Tensor) -> None:
        """Put `own`, which may lie in its place already, where everybody's belongs: all of it can be decoded."""
        for block in gathered.view(self.size, -1):
            block.copy_(own)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Keep everything."""
        received.copy_(sent)

    def reduce_scatter(self, own: Tensor, buffer: Tensor) -> None:
        """Keep this rank's part."""
        own.copy_(buffer.view(self.size, -1)[self.rank])


class LoneRank:
    """The steps of one rank on a model's buckets, residuals included, from the first one that compresses.

    ranks_per_node: of the cluster that it pretends to be `rank` of.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        buckets: Sequence[Layout],
        ranks_per_node: Sequence[int],
        rank: int = 0,
        device: torch.device = _CPU,
    ) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        self.team = SilentTeam.of(ranks_per_node, rank, {device.type: backend})
        self._aggregator = aggregator
        self._buckets = buckets
        self._store = ResidualStore()
        self._step = aggregator.start_step - 1

    def reduce(self, number: int, buffer: Tensor) -> None:
        """Average bucket `number` in place; bucket 0 begins a step, and the others follow in their order."""
        if number == 0:
            self._step += 1
            self._store.transaction.begin_step()
        team: Team = self.team  # type: ignore[assignment]  # as good as one
        context = context_for(self._aggregator, self._buckets[number], team, self._store, self._step, number)
        scale = context.flush_into(buffer, 1.0 / team.size)
        self._aggregator.all_reduce(buffer, team, scale, context)
        self._store.transaction.end_bucket([buffer], last=number + 1 == len(self._buckets))
