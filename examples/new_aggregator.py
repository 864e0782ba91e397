# SPDX-License-Identifier: Apache-2.0
"""Tutorial: an aggregator of your own, in one file and one line.

    torchrun --nproc-per-node 4 -m examples.new_strategies    # trains with it

An aggregator replaces a buffer by its scaled sum over all ranks; it is the only code that sends gradients. It is handed
a `Team`, whose collectives it calls, and says in `calls` what it does, from which bytes and prices follow. This one
adds up in rank order and float64: the average has the same bits on any network and backend, which no ring promises.

In a checkout of commopt the file goes to commopt/aggregate/in_order.py, and the line into AGGREGATORS:
`"in_order": InOrder`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.aggregate.base import Action, Aggregator, Buffer, call, work
from commopt.feedback.context import BufferContext
from commopt.groups.shape import TeamShape
from commopt.groups.team import Team


# 1. A frozen dataclass: its fields are the options, its repr is what ranks compare.
@dataclass(frozen=True, repr=False)
class InOrder(Aggregator):
    """Send each rank its chunk of everybody's buffer, add up in rank order, and gather the sums."""

    # 2. What is done, in place. All ranks must call the same collectives in the same order, and end with the same bits.
    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Exchange chunks, add, gather. `context.scratch` is memory that lives from bucket to bucket."""
        numel = buffer.numel()
        if numel == 0:
            return
        chunk_numel = -(-numel // team.size)
        shape, dtype, device = team.size * chunk_numel, buffer.dtype, buffer.device
        sent = context.scratch.take("sent", shape, dtype, device)
        sent[:numel] = buffer
        sent[numel:] = 0
        received = context.scratch.take("received", shape, dtype, device)
        team.all_to_all(received, sent)
        total = torch.zeros(chunk_numel, dtype=torch.float64 if dtype.is_floating_point else dtype, device=device)
        for chunk in received.view(team.size, chunk_numel):  # in rank order, whatever the network did
            total += chunk
        if scale != 1.0:
            total *= scale  # float64 cannot overflow before
        team.all_gather(sent, total.to(dtype))
        buffer.copy_(sent[:numel])

    # 3. The same as data: (what, bytes) of this rank. The tuner prices it, the simulator runs it, statistics count it.
    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return an all_to_all of everything and an all_gather of this rank's chunk, with a copy before and after."""
        numel = buffer.layout.numel
        if numel == 0:
            return ()
        chunk_nbytes = -(-numel // team.size) * buffer.dtype.itemsize
        copy = work("copy", "", numel)
        exchange = call(team, "all_to_all", chunk_nbytes * team.size)
        return (copy, *exchange, *call(team, "all_gather", chunk_nbytes), copy) if team.size > 1 else ()

    # 4. What it promises. Nothing is left out, so it keeps no residuals and needs no warm-up: the other defaults do.
    @property
    def lossless(self) -> bool:
        """Always."""
        return True
