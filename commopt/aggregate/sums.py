# SPDX-License-Identifier: Apache-2.0
"""Linear aggregators, and how their messages are added up: by one all_reduce or level by level, in how many bytes.

Factors may be rounded to bfloat16 before they cross: PowerSGD's residual takes the rounding error, and its left factors
are made orthonormal anew. Every rank then sends all it has to all others and adds up in float32, once, in rank order.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from commopt.aggregate.base import Action, Aggregator, Buffer, Call, call
from commopt.feedback import BufferContext, Scratch
from commopt.groups import Team, TeamShape, WireBytes

_MOST_ROUNDED = 4  # ranks: more of them send fewer bytes by an all_reduce of float32


@dataclass(frozen=True)
class Sums:
    """How the messages of a linear aggregator are added up over a team.

    team: a Team where anything is to be added up, a TeamShape to describe it.
    by_leaders: reduce inside the node, let its first rank add up with those of other nodes, broadcast inside the node.
        Where sites are known, these do the same: inside the site, and with one rank of each other site.
    """

    team: TeamShape
    by_leaders: bool = False

    @property
    def size(self) -> int:
        """Number of ranks whose values are added up."""
        return self.team.size

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.team.rank

    def add_up(self, message: Tensor, numel: int, scratch: Scratch) -> Tensor | None:
        """Set `message` [n] to its sum. Its first `numel` elements are float32 factors and may be rounded. Collective.

        Returns the rounding error of the factors that this rank sent, None for none.
        """
        team = cast(Team, self.team)
        if not self.by_leaders:
            if numel and _rounds(team, message.device):
                return _add_up_rounded(message, numel, team, scratch)
            team.all_reduce(message)
            return None
        intra = team.intra
        assert intra is not None
        rounding_error = None
        intra.reduce(message, dst=0)
        if intra.rank == 0 and team.inter is not None:
            rounding_error = self._across(team.inter).add_up(message, numel, scratch)
        intra.broadcast(message, src=0)
        return rounding_error

    def calls(self, numel: int, rest_nbytes: int, device: torch.device | None = None) -> tuple[Action, ...]:
        """Return the calls of `add_up` for `numel` factors and `rest_nbytes` bytes of other values."""
        nbytes = 4 * numel + rest_nbytes
        intra, inter = self.team.intra, self.team.inter
        if self.by_leaders:
            assert intra is not None
            leads = intra.rank == 0 and inter is not None
            across = self._across(inter).calls(numel, rest_nbytes, device) if leads and inter is not None else ()
            return (*call(intra, "reduce", nbytes, 0), *across, *call(intra, "broadcast", nbytes, 0))
        if numel and _rounds(self.team, device or self.team.default_device):
            return call(self.team, "all_gather", 2 * numel + rest_nbytes)
        return call(self.team, "all_reduce", nbytes)

    @staticmethod
    def _across(inter: TeamShape) -> Sums:
        return Sums(inter, by_leaders=inter.intra is not None)

    def wire_bytes(self, numel: int, rest_nbytes: int) -> WireBytes:
        """Return the payload bytes this rank sends in such a sum."""
        calls = self.calls(numel, rest_nbytes)
        return sum((each.wire_bytes(self.team) for each in calls if isinstance(each, Call)), WireBytes())


class LinearAggregator(Aggregator):
    """An aggregator that sends sums only, so that the sums may be made level by level.

    Two methods take `Sums` in place of a team; all_reduce and calls follow from them.
    """

    @abstractmethod
    def sum_up(self, buffer: Tensor, sums: Sums, scale: float, context: BufferContext) -> None:
        """Do as `all_reduce`, with the sums of `sums`."""

    @abstractmethod
    def sum_calls(self, buffer: Buffer, sums: Sums) -> tuple[Action, ...]:
        """Return, in order, the actions of this rank in one `sum_up` of `buffer`."""

    def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None:
        """Add up over the whole team at once."""
        self.sum_up(buffer, Sums(team), scale, context)

    def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
        """Return the calls of sums over the whole team at once."""
        return self.sum_calls(buffer, Sums(team))


def _rounds(team: TeamShape, device: torch.device) -> bool:
    """Return whether factors cross in bfloat16: between few nodes, over gloo."""
    few = 1 < team.size == team.node_count <= _MOST_ROUNDED
    return few and team.backend(device) == "gloo"


def _add_up_rounded(message: Tensor, numel: int, team: Team, scratch: Scratch) -> Tensor:
    factors, rest = message[:numel], message[numel:]
    sent = scratch.take("rounded factors", rest.nbytes + 2 * numel, torch.uint8, message.device)
    sent[: rest.nbytes].view(torch.float32).copy_(rest)
    rounded = sent[rest.nbytes :].view(torch.bfloat16).copy_(factors)
    rounding_error = factors - rounded
    rows = scratch.take("all rounded factors", (team.size, len(sent)), torch.uint8, message.device)
    team.all_gather(rows.view(-1), sent)
    message.zero_()
    for row in rows.view(torch.int16):  # bytes would have to begin at a multiple of four
        factors += row[rest.nbytes // 2 :].view(torch.bfloat16)
        rest += row[: rest.nbytes // 2].clone().view(torch.float32)
    return rounding_error
