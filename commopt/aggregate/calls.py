"""What an aggregator does, as plain data: the collectives it takes part in, and the work between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from commopt.groups import TeamShape, WireBytes

WorkKind = Literal["encode", "decode", "recode", "factor", "refresh", "copy"]


@dataclass(frozen=True)
class Call:
    """One collective of a level of the team. `nbytes` is what `WireModel`'s method of that name takes; so is `root`."""

    level: str
    primitive: str
    nbytes: int
    root: int | None = None

    def wire_bytes(self, team: TeamShape) -> WireBytes:
        """Return what it makes this rank of `team` send."""
        arguments = (self.nbytes,) if self.root is None else (self.nbytes, self.root)
        sent: WireBytes = getattr(team.at(self.level).wire, self.primitive)(*arguments)
        return sent


@dataclass(frozen=True)
class Work:
    """Work of one rank by itself: `nbytes` as float32 of the values that it reads, or decodes.

    encode, decode: by the compressor whose repr is `what`; recode: add up encoded rows and encode the sum; factor: all
    arithmetic that one message of low-rank factors takes; refresh: what a second message of the other factors adds;
    copy: into another order, or another dtype.
    """

    kind: WorkKind
    what: str
    nbytes: int


Step = Call | Work


class Stages(NamedTuple):
    """What one chunk of a buffer takes: up inside the node, across the network, down inside the node.

    Chunks may overlap: `up` and `down` of all of them take turns on one lane, `across` runs beside it.
    """

    up: tuple[Step, ...]
    across: tuple[Step, ...]
    down: tuple[Step, ...]


def in_one_line(chunks: Iterable[Stages]) -> tuple[Step, ...]:
    """Return all steps in the order in which they run on one lane: a chunk comes down when the next is across."""
    steps: list[Step] = []
    landing: tuple[Step, ...] = ()
    for chunk in chunks:
        steps += chunk.up + chunk.across + landing
        landing = chunk.down
    return (*steps, *landing)


def call(team: TeamShape, primitive: str, nbytes: int, root: int | None = None) -> tuple[Call, ...]:
    """Return a collective over `team`: none where nobody else is in it."""
    return (Call(team.level, primitive, nbytes, root),) if team.size > 1 else ()


def work(kind: WorkKind, what: object, numel: int) -> Work:
    """Return work on `numel` values by what `what` shows itself as."""
    return Work(kind, str(what), 4 * numel)
