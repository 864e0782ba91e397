# SPDX-License-Identifier: Apache-2.0
"""How near nodes are to each other, from rates and latencies of pairs, and the groups that are suspected from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import combinations
from math import inf, sqrt
from statistics import median_low
from typing import NamedTuple

from commopt.probe.matchings import Group, Pair, pair

STEP = 1.3
"""How much nearer nodes of a group must be to each other than to those of other groups, to be suspected."""
LATE = 4.0
"""How many times the latency to its nearest node makes another one far."""
LEAST_LATE_US = 1000.0
"""A shorter latency makes nobody far: it does not count beside the time of a message."""

_MOST_MOVES = 8
_DOUBT = 2  # pairs that are neither near nor far, counted in a mean over the pairs of a node with a group


class PairRate(NamedTuple):
    """One pair in one matching: the rate in each direction, and the latency in one."""

    gbps: float
    latency_us: float


class Nearness:
    """Of each pair of nodes from 0 to 1: the rate that they reach beside others, of the best of the slower one.

    A slow node is as near to all others as a fast one: only what a node loses on the way to some of them counts.

    members: the nodes, of which every pair is in `seen`, once or more.
    best_gbps: the best rate of each.
    """

    def __init__(self, members: Group, seen: Mapping[Pair, Sequence[PairRate]]) -> None:
        self.members = members
        pairs = [pair(a, b) for a, b in combinations(members, 2)]
        rates = {each: _usual([one.gbps for one in seen[each]]) for each in pairs}
        latencies = {each: min(one.latency_us for one in seen[each]) for each in pairs}
        own = {node: [each for each in pairs if node in each] for node in members}
        self.best_gbps = {node: max(rates[each] for each in own[node]) for node in members}
        nearest_us = {node: min(latencies[each] for each in own[node]) for node in members}
        self._near: dict[Pair, float] = {}
        for (a, b), gbps in rates.items():
            usual_us = max(LATE * max(nearest_us[a], nearest_us[b]), LEAST_LATE_US)
            late = min(1.0, usual_us / max(latencies[a, b], 1e-9))
            self._near[a, b] = min(self.share((a, b), gbps), late)

    def share(self, pair: Pair, gbps: float) -> float:
        """Return a rate of two nodes as a share of what the slower of them reaches at best."""
        return gbps / max(min(self.best_gbps[node] for node in pair), 1e-12)

    def of(self, one: int, other: int) -> float:
        """Return the nearness of two nodes."""
        return self._near[pair(one, other)]

    def to(self, node: int, group: Group) -> float:
        """Return the mean nearness of a node to the others of a group."""
        others = [other for other in group if other != node]
        return sum(self.of(node, other) for other in others) / max(len(others), 1)


def _usual(rates: Sequence[float]) -> float:
    """Return the median of a pair's rates, the lower one of two: a disturbance makes few of them slow."""
    return median_low(rates)


# ------------------------------------------------------------------------------------------------ groups


@dataclass(frozen=True)
class Branch:
    """Nodes that were joined at a mean nearness of `near` out of two branches; a node by itself has none."""

    members: Group
    near: float = inf
    parts: tuple[Branch, ...] = ()


def join(nearness: Nearness) -> Branch:
    """Return the tree of nodes that joins the nearest branches first, by the mean over their pairs (UPGMA)."""
    members = nearness.members
    branches = {place: Branch((node,)) for place, node in enumerate(members)}
    total = {(a, b): nearness.of(members[a], members[b]) for a, b in combinations(range(len(members)), 2)}
    waiting = [(-near, a, b) for (a, b), near in total.items()]
    heapify(waiting)
    for place in range(len(members), 2 * len(members) - 1):
        while True:
            near, a, b = heappop(waiting)
            if a in branches and b in branches:
                break
        one, other = branches.pop(a), branches.pop(b)
        joint = Branch((*one.members, *other.members), -near, (one, other))
        for each, branch in branches.items():
            total[each, place] = total[pair(each, a)] + total[pair(each, b)]
            mean = total[each, place] / len(branch.members) / len(joint.members)
            heappush(waiting, (-mean, each, place))
        branches[place] = joint
    (root,) = branches.values()
    return root


def suspected(nearness: Nearness, attempt: int = 0) -> tuple[Group, ...]:
    """Return groups whose nodes are nearer to each other than to others, two or more of them; () for none.

    A group has two nodes or more: of a node by itself nobody knows whether it or its way to the others is slow. It
    joins the group that it is near to; where there is none, it stays alone beside them. Each further `attempt` looks
    for nearer groups.
    """
    root, aside = join(nearness), list[int]()
    while root.parts:
        parts = _parts(root, _limit(root.near, attempt))
        groups = [part.members for part in parts if part.parts]
        aside += [part.members[0] for part in parts if not part.parts]
        if len(groups) > 1:
            settled = _settled(groups, nearness)
            groups = [group for group in settled if len(group) > 1]
            if len(groups) < 2:
                return ()
            aside += [group[0] for group in settled if len(group) == 1]
            return tuple(tuple(sorted(group)) for group in sorted(_with(aside, groups, nearness), key=min))
        if not groups:
            return ()
        root = next(part for part in parts if part.parts)
    return ()


def _limit(near: float, attempt: int) -> float:
    """Return the nearness at which the nodes of groups were joined, by that at which all were.

    Two large sites are nearer to each other than to a small one, up to STEP**2 times: they are to be two groups. But
    what is in the middle between `near` and that of the nearest nodes, 1, is near enough.
    """
    near_enough = max(STEP * near, min(STEP**2 * near, sqrt(near)))
    return near_enough if attempt == 0 else STEP * near if near_enough > STEP * near else STEP**2 * near


def _parts(root: Branch, limit: float) -> list[Branch]:
    """Return the branches that were joined at a nearness of `limit` or more, largest ones."""
    found, waiting = [], [root]
    while waiting:
        branch = waiting.pop()
        if branch.near < limit:
            waiting += branch.parts
        else:
            found.append(branch)
    return found


def _settled(groups: Sequence[Group], nearness: Nearness) -> list[Group]:
    """Return the groups after each node has moved to the one that it is nearest to; groups may be left empty.

    The tree joins the nearest pair first, and a pair that happened to meet while few others sent is the nearest one,
    wherever its nodes belong. So a mean over few pairs counts as if some more of them were neither near nor far.
    """
    middle = _middle(groups, nearness)
    found = [set(group) for group in groups]

    def near(node: int, group: set[int]) -> float:
        others = tuple(sorted(group - {node}))
        return (len(others) * nearness.to(node, others) + _DOUBT * middle) / (len(others) + _DOUBT)

    for _ in range(_MOST_MOVES):
        moved = False
        for node in (node for group in groups for node in group):
            own = next(group for group in found if node in group)
            best = max(filter(None, found), key=lambda group: (near(node, group), group is own))
            if best is not own:
                own.remove(node)
                best.add(node)
                moved = True
        if not moved:
            break
    return [tuple(sorted(group)) for group in found if group]


def _middle(groups: Sequence[Group], nearness: Nearness) -> float:
    """Return what lies between the mean nearness of nodes in a group and that to nodes of another one."""
    inner = [nearness.to(node, group) for group in groups for node in group]
    outer = [nearness.to(node, other) for group in groups for node in group for other in groups if other != group]
    return sqrt(sum(inner) / len(inner) * sum(outer) / len(outer))


def _with(aside: Sequence[int], groups: Sequence[Group], nearness: Nearness) -> list[Group]:
    """Return the groups with the nodes aside in the nearest ones, and those far from all alone."""
    middle = _middle(groups, nearness)
    found, alone = [list(group) for group in groups], list[Group]()
    for node in aside:
        # Of equally near groups the one with the nearest neighbour in the order of ranks.
        places = range(len(groups))
        near = [round(nearness.to(node, group), 1) for group in groups]
        best = max(places, key=lambda place: (near[place], -min(abs(node - other) for other in groups[place])))
        if near[best] >= middle:
            found[best].append(node)
        else:
            alone.append((node,))
    return [*map(tuple, found), *alone]
