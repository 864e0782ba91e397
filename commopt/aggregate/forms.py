# SPDX-License-Identifier: Apache-2.0
"""The levels that Hierarchical takes a buffer through, its forms, and the rule that chooses one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

from commopt.aggregate.base import Aggregator, Flat
from commopt.groups import Team, TeamShape

Form = Literal["reduce_scatter", "leader"]

_SHARD_FROM_NBYTES = 64 * 1024
_NO_OTHER_NODE: Any = TeamShape.of((1,))
"""The level between nodes where there is one node: a team of this rank alone, which sends nothing."""


class Levels(NamedTuple):
    """What one all_reduce of a team is made of.

    intra: this rank's node, or site.
    inter: the ranks that it talks to beyond, None for none.
    average: the aggregator that does.
    share: the part of all ranks that is in `intra`.
    """

    intra: Team
    inter: Team | None
    average: Aggregator
    share: float


def levels_of(inter: Aggregator, team: TeamShape) -> tuple[Any, Any]:
    """Return the two levels of a team, None and None where there is one; Adam wants exact sums on one node too."""
    if inter.adam is not None and team.node_count == 1 < team.size:
        return team, _NO_OTHER_NODE
    return team.intra, team.inter


def alone(inter: Aggregator, team: TeamShape) -> Aggregator:
    """Return the aggregator for a team of one level: over nodes of one rank, or over one node."""
    return inter if team.node_count > 1 or inter.adam is not None else Flat()


@lru_cache(maxsize=1024)
def choose_form(
    backend: str, nbytes: int, *, uniform: bool, lossless: bool = True, linear: bool = False, sites: bool = False
) -> str:
    """Return the form for a buffer of `nbytes`: the rule behind Hierarchical(form=None).

    Gloo, where `inter` sends sums only: "compress_first". Every rank compresses its own gradient, and leaders add up:
    to move a gradient between processes takes a machine's processors longer than to compress it. Unequal nodes:
    "leader". Compression between the nodes: "reduce_scatter", so that the ranks of a node share its work and its
    residuals. Gloo: "leader", where one flow fills a slow link as well as several and the ranks of a node share its
    processors anyway. NCCL: "reduce_scatter" from 64 KiB, where every rank drives the NIC with its own shard; "leader"
    below, where one small message across beats several.

    sites: between sites, whose nodes each have a link and processors of their own, over gloo too. Sites of unequal
    length have as many leaders as the smallest has nodes: "leaders".
    """
    if linear and backend == "gloo":
        return "compress_first"
    if not uniform and not sites:
        return "leader"
    sharded = not lossless or ((backend != "gloo" or sites) and nbytes >= _SHARD_FROM_NBYTES)
    if not sharded:
        return "leader"
    return "reduce_scatter" if uniform else "leaders"
