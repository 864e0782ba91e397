# SPDX-License-Identifier: Apache-2.0
"""How the messages of a linear aggregator are added up: by one all_reduce, or level by level, and in how many bytes.

Factors may be rounded to bfloat16 before they cross: PowerSGD's residual takes what that loses, and its left factors
are made orthonormal anew. Every rank then sends all it has to all others and adds up in float32, once, in rank order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from commopt.aggregate.base import Step, call
from commopt.feedback import Scratch
from commopt.groups import Team, TeamShape

_MOST_ROUNDED = 4  # ranks: more of them send fewer bytes by an all_reduce of float32


class ByLeaders:
    """What a linear aggregator sees of a team whose leaders alone talk to other nodes."""

    def __init__(self, team: Any) -> None:
        self.rank = team.rank
        self.size = team.size
        self.intra = team.intra
        self.inter = team.inter
        self.leads = self.intra.rank == 0 and self.inter is not None


Sums: TypeAlias = "Team | ByLeaders"
Shape: TypeAlias = "TeamShape | ByLeaders"


def add_up(message: Tensor, numel: int, team: Sums, scratch: Scratch) -> Tensor | None:
    """Set `message` [n] to its sum over the team; its first `numel` elements are factors, float32, and may be rounded.

    Returns what rounding has taken of them from what this rank sent, None for nothing.
    """
    if not isinstance(team, ByLeaders):
        if numel and _rounds(team, message.device):
            return _add_up_rounded(message, numel, team, scratch)
        team.all_reduce(message)
        return None
    intra, inter = team.intra, team.inter
    lost = None
    intra.reduce(message, dst=0)
    if team.leads:
        lost = add_up(message, numel, inter, scratch)
    intra.broadcast(message, src=0)
    return lost


def calls_of_sum(numel: int, rest_nbytes: int, team: Shape, device: torch.device | None) -> tuple[Step, ...]:
    """Return what `add_up` calls for `numel` factors and as many bytes of others."""
    nbytes = 4 * numel + rest_nbytes
    if isinstance(team, ByLeaders):
        intra, inter = team.intra, team.inter
        across = calls_of_sum(numel, rest_nbytes, inter, device) if team.leads else ()
        return (*call(intra, "reduce", nbytes, 0), *across, *call(intra, "broadcast", nbytes, 0))
    if numel and _rounds(team, device or team.default_device):
        return call(team, "all_gather", 2 * numel + rest_nbytes)
    return call(team, "all_reduce", nbytes)


def _rounds(team: TeamShape, device: torch.device) -> bool:
    """Return whether factors cross in bfloat16: between few nodes, over gloo."""
    few = 1 < team.size == team.node_count <= _MOST_ROUNDED
    return few and team.backend(device) == "gloo"


def _add_up_rounded(message: Tensor, numel: int, team: Team, scratch: Scratch) -> Tensor:
    factors, rest = message[:numel], message[numel:]
    sent = scratch.take("rounded factors", rest.nbytes + 2 * numel, torch.uint8, message.device)
    sent[: rest.nbytes].view(torch.float32).copy_(rest)
    rounded = sent[rest.nbytes :].view(torch.bfloat16).copy_(factors)
    lost = factors - rounded
    rows = scratch.take("all rounded factors", (team.size, len(sent)), torch.uint8, message.device)
    team.all_gather(rows.view(-1), sent)
    message.zero_()
    for row in rows.view(torch.int16):  # bytes would have to begin at a multiple of four
        factors += row[rest.nbytes // 2 :].view(torch.bfloat16)
        rest += row[: rest.nbytes // 2].clone().view(torch.float32)
    return lost
