"""The collectives that are timed, each as a Team offers it, and which of them to time on which groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from commopt.cost import LinkKey
from commopt.groups import Team
from commopt.probe.settings import Settings

_DTYPE = torch.float32
_ROOT = 0


@dataclass(frozen=True)
class Collective:
    """Whether a message holds a block for each rank on the way in, and on the way out.

    closed: no rank can leave before all have entered, so that calls need no barrier between them.
    """

    primitive: str
    send_blocks: bool = False
    recv_blocks: bool = False
    in_place: bool = True
    closed: bool = True

    def sizes(self, settings: Settings, ranks: int) -> tuple[int, ...]:
        """Return the bytes of the messages to time: two or more, which can be cut into blocks of whole elements."""
        grain = _DTYPE.itemsize * (ranks if self.send_blocks else 1)
        gathers = self.recv_blocks and not self.send_blocks
        wanted = settings.sizes(settings.max_nbytes // ranks if gathers else None)
        rounded = tuple(dict.fromkeys(ceil(nbytes / grain) * grain for nbytes in wanted))
        return rounded if len(rounded) > 1 else (*rounded, 2 * rounded[0])

    def bind(self, team: Team, nbytes: int, device: torch.device) -> Callable[[], None]:
        """Return a call that runs it once over `team`, with `nbytes` as WireModel's method of that name counts them."""
        source = _touched(nbytes, device)
        match self.primitive:
            case "all_reduce":
                return lambda: team.all_reduce(source)
            case "reduce":
                return lambda: team.reduce(source, _ROOT)
            case "broadcast":
                return lambda: team.broadcast(source, _ROOT)
        output = _touched(self._output_nbytes(nbytes, team.size), device)
        move = {
            "reduce_scatter": team.reduce_scatter,
            "all_gather": team.all_gather,
            "all_to_all": team.all_to_all,
        }[self.primitive]
        return lambda: move(output, source)

    def _output_nbytes(self, nbytes: int, ranks: int) -> int:
        if self.send_blocks and self.recv_blocks:
            return nbytes
        return nbytes // ranks if self.send_blocks else nbytes * ranks


COLLECTIVES = {
    each.primitive: each
    for each in (
        Collective("all_reduce"),
        Collective("reduce_scatter", send_blocks=True),
        Collective("all_gather", recv_blocks=True),
        Collective("all_to_all", send_blocks=True, recv_blocks=True),
        Collective("reduce", closed=False),
        Collective("broadcast", closed=False),
    )
}


@dataclass(frozen=True)
class Group:
    """Groups of one level at work: `team` is this rank's, None when it only waits."""

    level: str
    ranks: int
    groups: int
    team: Team | None

    def key(self, primitive: str) -> LinkKey:
        """Return where the curve of a collective belongs."""
        return LinkKey(self.level, primitive, self.ranks, self.groups)


def groups_of(world: Team) -> list[Group]:
    """Return what to time, the same on every rank: of each level one group by itself, then all at once.

    Levels inside a node come first: they are fast, and what they leave of the time is for the slow ones.
    """
    nodes = world.wire.nodes
    counts = [nodes.count(node) for node in dict.fromkeys(nodes)]
    found: list[Group] = []
    if world.intra is not None:
        my_node = list(dict.fromkeys(nodes)).index(nodes[world.rank])
        largest = max(counts)
        alone = counts.index(largest)
        if largest > 1:
            found.append(Group("intra", largest, 1, world.intra if my_node == alone else None))
            alike = counts.count(largest)
            if alike > 1:
                found.append(Group("intra", largest, alike, world.intra if counts[my_node] == largest else None))
        places = largest if world.uniform else 1
        first = world.inter if world.intra.rank == 0 else None
        found.append(Group("inter", len(counts), 1, first))
        if places > 1:
            found.append(Group("inter", len(counts), places, world.inter))
    if world.size > 1:
        found.append(Group("world", world.size, 1, world))
    return found


def _touched(nbytes: int, device: torch.device) -> Tensor:
    """Return memory that is really there: zeros that nobody wrote would be one page of it."""
    return torch.empty(nbytes // _DTYPE.itemsize, dtype=_DTYPE, device=device).zero_()
