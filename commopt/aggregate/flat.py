"""One all_reduce over all ranks: what stock DDP does, and the yardstick for everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator
from commopt.aggregate.calls import Step, call
from commopt.feedback import Account, Layout
from commopt.groups import Team, TeamShape


@dataclass(frozen=True, repr=False)
class Flat(Aggregator):
    """A single all_reduce; ring neighbours alternate between nodes only where they must."""

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        """See Aggregator."""
        if buffer.numel():
            team.all_reduce(buffer, scale=scale)

    def calls(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: TeamShape,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> tuple[Step, ...]:
        """See Aggregator."""
        return call(team, "all_reduce", layout.numel * dtype.itemsize) if layout.numel else ()

    @property
    def lossless(self) -> bool:
        """See Aggregator."""
        return True
