# SPDX-License-Identifier: Apache-2.0
"""`RankTable`, a few words of every rank on their way to the host, which waits for them as late as it can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt.cuda_streams import current_stream
from commopt.groups import Team
from commopt.lanes import Pending


@dataclass(eq=False)
class RankTable:
    """Words of all ranks, [rank, word]. table: on the device of the lane. host: its copy here, where that is a GPU."""

    table: Tensor
    host: Tensor | None = None
    copied: torch.cuda.Event | None = None
    pending: Pending | None = None

    def gather(self, team: Team, own: Tensor) -> None:
        """Fill the table with every rank's `own`; for the lane."""
        team.all_gather(self.table.view(-1), own)
        if self.table.device.type == "cuda":
            self.host = torch.empty(self.table.shape, dtype=self.table.dtype, device="cpu", pin_memory=True)
            self.host.copy_(self.table, non_blocking=True)
            self.copied = current_stream(self.table.device).record_event()

    def rows(self) -> list[list[Any]]:
        """Return the table once it is there; on CUDA the host waits for what was launched before it only."""
        assert self.pending is not None
        self.pending.wait()
        if self.copied is not None:
            self.copied.synchronize()
        found: list[list[Any]] = (self.table if self.host is None else self.host).tolist()
        return found
