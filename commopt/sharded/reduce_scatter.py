# SPDX-License-Identifier: Apache-2.0
"""The gradients of an FSDP2 parameter group go to their owners, by the reduce_scatter of an aggregator."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.aggregate import Aggregator
from commopt.aggregate.base import Action
from commopt.aggregate.rows import ShardedBuffer
from commopt.feedback import BufferContext, Layout
from commopt.groups import Team, TeamShape
from commopt.sharded.shards import Parts, ShardOrder


class ReduceScatter:
    """The reduce_scatter of an aggregator, between FSDP's order of ranks and the team's.

    Raises ConfigurationError, alike on every rank, for an aggregator that cannot do that on `team`.
    """

    def __init__(self, aggregator: Aggregator, team: TeamShape, ranks: tuple[int, ...]) -> None:
        aggregator.check_reduce_scatter(team)
        self.aggregator = aggregator
        self.team = team
        self.order = ShardOrder(team, ranks)
        self._owners = aggregator.residual_owners(team)

    @property
    def senders(self) -> int:
        """The number of ranks that may keep a residual of the same element: they have as many owners each."""
        return len(self._owners)

    def layout(self, parts: Parts) -> Layout:
        """Return the pieces of which this rank may keep residuals."""
        shards = self.order.shards(parts)
        return Layout(tuple(piece for owner in self._owners for piece in shards[owner].layout.pieces))

    def calls(self, parts: Parts, dtype: torch.dtype, step: int | None = None) -> tuple[Action, ...]:
        """Return, in order, the actions of this rank for the gradients of `parts`, in the form of Aggregator.calls."""
        return self.aggregator.reduce_scatter_calls(ShardedBuffer(self.order.shards(parts), dtype, step), self.team)

    def __call__(self, output: Tensor, source: Tensor, parts: Parts, scale: float, context: BufferContext) -> None:
        """Set `output` [n] to this rank's row of `scale` times the sum of all ranks' `source` [size * n].

        `source` is overwritten. Runs on the lane; every rank must call it. The layout of `context` is `layout`.
        """
        team, order = self.team, self.order
        assert isinstance(team, Team)
        if not order.is_groups_own:
            source = source.view(team.size, -1).index_select(0, order.index(source.device)).view(-1)
        buffer = ShardedBuffer(order.shards(parts), source.dtype, context.step)
        self.aggregator.reduce_scatter(output, source, buffer, team, scale, context)
