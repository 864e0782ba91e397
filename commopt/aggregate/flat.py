"""One all_reduce over all ranks: what stock DDP does, and the yardstick for everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.aggregate.base import Aggregator, apply_scale
from commopt.feedback import Account, Layout
from commopt.groups import Team, WireBytes


@dataclass(frozen=True, repr=False)
class Flat(Aggregator):
    """A single all_reduce; ring neighbours alternate between nodes only where they must."""

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, account: Account) -> None:
        """See Aggregator."""
        if buffer.numel():
            apply_scale(buffer, scale)
            team.all_reduce(buffer)

    def wire_bytes(
        self,
        layout: Layout,
        dtype: torch.dtype,
        team: Team,
        device: torch.device | None = None,
        step: int | None = None,
    ) -> WireBytes:
        """See Aggregator."""
        return team.wire.all_reduce(layout.numel * dtype.itemsize)

    @property
    def lossless(self) -> bool:
        """See Aggregator."""
        return True
