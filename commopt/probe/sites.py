# SPDX-License-Identifier: Apache-2.0
"""Sites and racks found by measuring: a pure function of what pairs of nodes reach while others send too.

First every node meets every other one, in matchings whose pairs send at once: the traffic of an exchange of all with
all. Who is nearer to some than to others is suspected of being in a group with them. Then the suspicion is tried: all
pairs across the cut at once, beside as many pairs inside the groups. What survives is a level of sites, and the nodes
of each site meet among themselves, for what is slower outside hides what is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from statistics import median

from commopt.probe.matchings import Group, Matching, Pair, across, alone, inside, tournament
from commopt.probe.nearness import LATE, LEAST_LATE_US, STEP, Nearness, PairRate, suspected
from topology.network import NAMES, SiteLevel, level_names

LEAST_NODES = 4
"""Two groups of two."""
CONTRAST = 1.5
"""How much faster nodes of a site must be among themselves than across, with all sending."""
SLOW = 0.67
"""Of the median of all nodes' best rates: below it a node is called slow."""

_FIRST = 48  # matchings that the first tournaments may have together, if it is more than one
_MOST_TURNS = 6
_TRIED = 3  # of a suspicion: how often across, and inside
_ALONE = 2
_ATTEMPTS = 2  # suspicions of a set of nodes, if the first is none or wrong

Measure = Callable[[Sequence[Matching]], Sequence[dict[Pair, PairRate]]]
"""Measures matchings one after the other, the pairs of each at once. It may return fewer when time is over."""


@dataclass(frozen=True)
class FoundSites:
    """Sites of nodes 0..n-1.

    paths: the numbers of each node's site, outermost level first, and of its site's parts; as many for all nodes.
    levels: outermost first.
    best_gbps: of each node.
    slow: nodes that are slower than others, to all.
    matchings: how many were measured.
    complete: False where there was no time to look into everything.
    """

    paths: tuple[tuple[int, ...], ...]
    levels: tuple[SiteLevel, ...] = ()
    best_gbps: tuple[float, ...] = ()
    slow: tuple[int, ...] = ()
    matchings: int = 0
    complete: bool = True


def most_matchings(nodes: int) -> int:
    """Return how many matchings are measured at most: enough for all pairs, and for those of each of two halves."""
    return 0 if nodes < LEAST_NODES else max(2 * _FIRST, round(1.5 * nodes)) + 2 * _trial_length(1)


def _trial_length(attempts: int) -> int:
    return attempts * (2 * _TRIED + _ALONE)


def find_sites(nodes: int, measure: Measure) -> FoundSites:
    """Return the sites of so many nodes; nothing is measured for fewer than LEAST_NODES.

    Deterministic: ranks that measure equal rates find the same.
    """
    search = _SiteSearch(measure, most_matchings(nodes))
    if nodes >= LEAST_NODES:
        search.run(tuple(range(nodes)))
    best = search.best_gbps
    slow = tuple(node for node, gbps in best.items() if gbps < SLOW * median(best.values()))
    paths = tuple(search.paths(nodes))
    return FoundSites(paths, tuple(search.levels()), tuple(best.values()), slow, search.matchings, search.complete)


# ------------------------------------------------------------------------------------------------ search


@dataclass
class _SplitNodes:
    """A set of nodes that falls apart into groups, and the rates and latencies that say so. depth: 0 for all nodes."""

    members: Group
    groups: tuple[Group, ...]
    inside: list[PairRate]
    across: list[PairRate]
    alone: list[PairRate]
    depth: int = 0

    def is_level_of(self, outer: _SplitNodes) -> bool:
        """Return whether nodes are as far from each other here as outside: groups of `outer` were taken for one."""
        rates = [median(one.gbps for one in each.across) for each in (self, outer)]
        late = [median(one.latency_us for one in each.across) for each in (self, outer)]
        return rates[0] < STEP * rates[1] and late[1] < max(LATE * late[0], LEAST_LATE_US)

    def join(self, inner: _SplitNodes) -> None:
        """Put the groups of a part in the place of the part."""
        groups = [group for group in self.groups if group != inner.members]
        self.groups = tuple(sorted((*groups, *inner.groups)))
        self.inside += inner.inside


class _TimeIsOverError(Exception):
    """Raised where what is to be measured next does not fit into the time."""


@dataclass
class _SiteSearch:
    measure: Measure
    most: int
    matchings: int = 0
    complete: bool = True
    best_gbps: dict[int, float] = field(default_factory=dict)
    divisions: list[list[_SplitNodes]] = field(default_factory=list)

    def run(self, everyone: Group) -> None:
        """Look for levels, the outermost first, in all sets of nodes at once: they are disjoint."""
        around: dict[Group, _SplitNodes | None] = {everyone: None}
        try:
            while around:
                nearnesses = self._meet([*around])
                if not self.best_gbps:
                    self.best_gbps = nearnesses[0].best_gbps
                parts: dict[Group, _SplitNodes | None] = {}
                for division in self._divide(nearnesses):
                    level = self._placed(division, around[division.members])
                    if level.depth + 1 < len(NAMES):
                        parts |= {group: level for group in division.groups if len(group) >= LEAST_NODES}
                around = parts
        except _TimeIsOverError:
            self.complete = False

    def _placed(self, division: _SplitNodes, outer: _SplitNodes | None) -> _SplitNodes:
        """Return the division of the level that the groups belong to: this one, or the outer one that it joins."""
        if outer is not None and division.is_level_of(outer):
            outer.join(division)
            return outer
        division.depth = 0 if outer is None else outer.depth + 1
        if division.depth == len(self.divisions):
            self.divisions.append([])
        self.divisions[division.depth].append(division)
        return division

    def _measured(self, matchings: Sequence[Matching]) -> Sequence[dict[Pair, PairRate]]:
        if self.matchings + len(matchings) > self.most:
            raise _TimeIsOverError
        results = self.measure(matchings)
        self.matchings += len(results)
        if len(results) < len(matchings):
            raise _TimeIsOverError
        return results

    def _meet(self, sets: Sequence[Group]) -> list[Nearness]:
        """Let all nodes of each set meet, often where that takes few matchings."""
        length = max(map(len, sets))
        fitting = min(_FIRST, self.most - self.matchings - _trial_length(_ATTEMPTS)) // length
        tournaments = []
        for members in sets:
            turns = range(max(1, min(_MOST_TURNS, fitting)))
            met = chain.from_iterable(tournament(len(members), turn) for turn in turns)
            tournaments.append([tuple((members[a], members[b]) for a, b in matching) for matching in met])
        matchings = [tuple(chain.from_iterable(at_once)) for at_once in zip_longest(*tournaments, fillvalue=())]
        seen: dict[Pair, list[PairRate]] = {}
        for result in self._measured(matchings):
            for pair, one in result.items():
                seen.setdefault(pair, []).append(one)
        return [Nearness(members, seen) for members in sets]

    def _divide(self, nearnesses: Sequence[Nearness]) -> list[_SplitNodes]:
        """Return the divisions of those sets that fall apart."""
        found: list[_SplitNodes] = []
        tried: set[tuple[Group, ...]] = {()}
        waiting = list(nearnesses)
        for attempt in range(_ATTEMPTS):
            suspicions = [(nearness, suspected(nearness, attempt)) for nearness in waiting]
            waiting = [nearness for nearness, groups in suspicions if groups in tried]
            suspicions = [(nearness, groups) for nearness, groups in suspicions if groups not in tried]
            if not suspicions:
                continue
            tried.update(groups for _, groups in suspicions)
            divisions = self._try(suspicions)
            found += [division for division in divisions if division is not None]
            failed = zip(suspicions, divisions, strict=True)
            waiting += [nearness for (nearness, _), division in failed if division is None]
        return found

    def _try(self, suspicions: Sequence[tuple[Nearness, tuple[Group, ...]]]) -> list[_SplitNodes | None]:
        """Measure across and inside by turns, so that nothing that changes meanwhile makes the difference."""
        all_groups = [groups for _, groups in suspicions]
        matchings: list[Matching] = []
        for turn in range(_TRIED):
            matchings.append(tuple(chain.from_iterable(across(groups, turn) for groups in all_groups)))
            matchings.append(inside(chain.from_iterable(all_groups), turn))
        for turn in range(_ALONE):
            matchings.append(tuple(chain.from_iterable(alone(groups, turn) for groups in all_groups)))
        results = self._measured(matchings)
        return [_judge(nearness, groups, results) for nearness, groups in suspicions]

    def levels(self) -> Iterator[SiteLevel]:
        """Iterate over the levels that were found, outermost first."""
        for name, divisions in zip(level_names(len(self.divisions)), self.divisions, strict=True):
            seen = {
                kind: [one for division in divisions for one in getattr(division, kind)]
                for kind in ("inside", "across", "alone")
            }
            gbps = {kind: median(one.gbps for one in each) for kind, each in seen.items()}
            us = {kind: median(one.latency_us for one in each) for kind, each in seen.items()}
            counts = tuple(len(group) for division in divisions for group in division.groups)
            yield SiteLevel(name, counts, gbps["inside"], gbps["across"], gbps["alone"], us["inside"], us["across"])

    def paths(self, nodes: int) -> Iterator[tuple[int, ...]]:
        """Iterate over the nodes' sites; a set that did not fall apart is site 0 of its own."""
        for node in range(nodes):
            path = []
            for divisions in self.divisions:
                groups = (group for division in divisions for group in enumerate(division.groups))
                path.append(next((place for place, group in groups if node in group), 0))
            yield tuple(path)


def _judge(
    nearness: Nearness, groups: tuple[Group, ...], results: Sequence[dict[Pair, PairRate]]
) -> _SplitNodes | None:
    """Return the division that was suspected, None where nodes are as fast across as inside."""
    members = set(nearness.members)
    own = [{pair: one for pair, one in result.items() if members.issuperset(pair)} for result in results]
    crossing, within = own[0 : 2 * _TRIED : 2], own[1 : 2 * _TRIED : 2]

    def share(*some: dict[Pair, PairRate]) -> float:
        shares = (nearness.share(pair, one.gbps) for result in some for pair, one in result.items())
        return max(median(shares), 1e-12)

    contrasts = [share(there) / share(here) for here, there in zip(crossing, within, strict=True)]
    contrast = min(median(contrasts), share(*within) / share(*crossing))  # each turn may have been disturbed
    some = (within, crossing, own[2 * _TRIED :])
    close, far, lone = ([one for result in each for one in result.values()] for each in some)
    usual_us, late_us = (median(one.latency_us for one in each) for each in (close, far))
    late = late_us > max(LATE * usual_us, LEAST_LATE_US)
    return _SplitNodes(nearness.members, groups, close, far, lone) if late or contrast >= CONTRAST else None
