# SPDX-License-Identifier: Apache-2.0
"""The cost of one all_reduce by an aggregator on a cluster of any shape: its calls, priced by the links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil
from typing import NamedTuple

import torch

from commopt.aggregate import Action, Aggregator, Buffer, Call
from commopt.cost.links import Links, WorkKey
from commopt.feedback import Layout
from commopt.groups import TeamShape

_SMALL = 32  # ranks, all of which are looked at where sites may be unequal

Price = Callable[[int], float]
"""Bytes of a message to microseconds."""


@dataclass(frozen=True)
class Cost:
    """The time of one all_reduce, and its parts.

    total_us: until the slowest rank is done; the sum of the parts.
    compress_us: work of the ranks themselves.
    intra_us: collectives inside nodes.
    inter_us: collectives between nodes.
    notes: assumptions and omissions of the figures.
    """

    total_us: float
    compress_us: float
    intra_us: float
    inter_us: float
    notes: tuple[str, ...] = ()


def cost(aggregator: Aggregator, layout: Layout | int, dtype: torch.dtype, shape: TeamShape, links: Links) -> Cost:
    """Return the cost of one all_reduce after all warm-up: of a buffer of `layout`, or of so many unnamed elements.

    Raises ConfigurationError where the aggregator cannot run, or the links lack a collective.
    """
    layout = Layout.anonymous(layout) if isinstance(layout, int) else layout
    return Pricing(aggregator, dtype, shape, links).cost(layout)


def price(
    aggregator: Aggregator,
    shape: TeamShape,
    links: Links,
    layout: Layout | None = None,
    dtype: torch.dtype = torch.float32,
) -> Price:
    """Return the price of buckets of `dtype`, by their bytes.

    layout: the whole model's. Where names and shapes matter (PowerSGD, dense patterns), a bucket counts as an equal
    share of everything in it; otherwise only its length does.
    """
    return Pricing(aggregator, dtype, shape, links).by_nbytes(layout)


Directions = tuple[tuple[Action, ...], tuple[Action, ...], tuple[Action, ...]]
"""Up inside the node, across the network, down inside the node."""


class _RankClass(NamedTuple):
    """Ranks that do the same, of nodes of equal length.

    shape: the cluster as one of them sees it.
    steps: their actions.
    ranks: their number.
    """

    shape: TeamShape
    steps: Directions
    ranks: int

    def calls(self, level: str) -> bool:
        """Return whether they have a collective at this level."""
        return any(isinstance(step, Call) and step.level == level for steps in self.steps for step in steps)

    def sender(self, level: str) -> int:
        """Return the node, or the site, out of whose link their collectives of a level between nodes go."""
        wire = self.shape.wire
        return (wire.nodes, *wire.sites)[level.count("inter") - 1][wire.rank]


class Pricing:
    """One aggregator on one cluster; curves are looked up once. Arguments and errors are those of `cost`."""

    def __init__(self, aggregator: Aggregator, dtype: torch.dtype, shape: TeamShape, links: Links) -> None:
        aggregator.check(shape)
        self._aggregator = aggregator
        self._dtype = dtype
        self._shape = shape
        self._links = links
        self._device = shape.default_device
        self._curve = cache(links.curve)

    def cost(self, layout: Layout) -> Cost:
        """Return the cost of one all_reduce of a buffer of `layout`."""
        return self._slowest(self._rank_classes(layout), 1.0)

    def by_nbytes(self, whole: Layout | None) -> Price:
        """Return the price of buckets by their bytes; see `price`."""
        if whole is None or whole.numel == 0 or not self._depends_on_names(whole):
            return lambda nbytes: self.cost(Layout.anonymous(ceil(nbytes / self._dtype.itemsize))).total_us
        classes, whole_nbytes = self._rank_classes(whole), whole.numel * self._dtype.itemsize
        return lambda nbytes: self._slowest(classes, nbytes / whole_nbytes).total_us

    def inter_nbytes(self, layout: Layout) -> int:
        """Return the bytes that all ranks of the first node together send to other nodes."""
        ranks = first_node(self._shape)
        return sum(self._aggregator.wire_bytes(layout, self._dtype, rank, self._device).inter for rank in ranks)

    def _depends_on_names(self, layout: Layout) -> bool:
        """Return whether the bytes that are sent depend on names and shapes."""
        anonymous = Layout.anonymous(layout.numel)
        return [each.steps for each in self._rank_classes(layout)] != [
            each.steps for each in self._rank_classes(anonymous)
        ]

    def _rank_classes(self, layout: Layout) -> list[_RankClass]:
        """Return the ranks that can be the slowest, those alike as one."""
        found: dict[tuple[object, ...], _RankClass] = {}
        if self._shape.sites_above:
            shapes = _first_site(self._shape)
        else:
            shapes = first_node(self._shape) if self._shape.uniform else _leaders(self._shape)
        for shape, steps in zip(shapes, self._directions(layout, shapes), strict=True):
            node = shape.wire.nodes[shape.rank] if self._shape.sites_above else 0  # of several nodes each is a class
            key = (shape.intra.size if shape.intra is not None else 1, steps, node)
            known = found.get(key, _RankClass(shape, steps, 0))
            found[key] = known._replace(ranks=known.ranks + 1)
        return list(found.values())

    def _directions(self, layout: Layout, shapes: Iterable[TeamShape]) -> list[Directions]:
        """Return the actions of each rank up inside its node, across the network, and down inside the node.

        Encoding and decoding between the levels belong to the messages across. A rank that sends nothing across is cut
        where the others send, after as many collectives.
        """
        per_rank = [self._aggregator.calls(Buffer(layout, self._dtype, self._device), shape) for shape in shapes]
        calls_up = next((_calls_before(steps) for steps in per_rank if any(map(_is_inter, steps))), 0)
        return [_cut(steps, calls_up) for steps in per_rank]

    def _slowest(self, classes: Sequence[_RankClass], share: float) -> Cost:
        """Return the cost if every message and all work have only a `share` of their bytes.

        Ranks wait for the slowest between the directions.
        """
        groups = self._groups(classes)
        notes: dict[str, None] = {}
        parts = {"compress": 0.0, "intra": 0.0, "inter": 0.0}
        for direction in range(3):
            spent = [self._spent(each.steps[direction], each.shape, groups, share, notes) for each in classes]
            for part, time_us in max(spent, key=lambda each: sum(each.values())).items():
                parts[part] += time_us
        return Cost(sum(parts.values()), parts["compress"], parts["intra"], parts["inter"], tuple(notes))

    def _groups(self, classes: Sequence[_RankClass]) -> dict[str, int]:
        """Return how many groups of a level between nodes share the link of a node, or of a site."""
        if not self._shape.uniform and not self._shape.sites_above:
            return {"inter": 1}
        found = Counter[str]()
        levels = {step.level for each in classes for steps in each.steps for step in steps if isinstance(step, Call)}
        for level in (level for level in levels if level.startswith("inter")):
            sending = Counter[int]()
            for each in classes:
                if each.calls(level):
                    sending[each.sender(level)] += each.ranks
            found[level] = max(sending.values())
        return found

    def _spent(
        self, steps: Iterable[Action], shape: TeamShape, groups: Mapping[str, int], share: float, notes: dict[str, None]
    ) -> dict[str, float]:
        spent = {"compress": 0.0, "intra": 0.0, "inter": 0.0}
        for step in steps:
            nbytes = step.nbytes * share
            if isinstance(step, Call):
                team = shape.at(step.level)
                at_once = {"intra": shape.ranks_per_node.count(team.size), **groups}.get(step.level, 1)
                # Where every rank is a node, sites have a level of all nodes above them.
                level = "world" if team.size == shape.size else step.level
                curve = self._curve(level, step.primitive, team.size, at_once)
                what = f"{step.primitive} at level {step.level}"
                spent["inter" if team.node_count > 1 else "intra"] += curve.time_us(nbytes)
            else:
                found = self._links.work.get(WorkKey(step.kind, step.what))
                what = f"{step.kind} by {step.what}" if step.what else step.kind
                if found is None:
                    notes[f"{what}: not measured, counted as nothing"] = None
                    continue
                curve = found
                spent["compress"] += curve.time_us(nbytes)
            if curve.note:
                notes[f"{what}: {curve.note}"] = None
            if curve.extrapolates(nbytes):
                notes[f"{what}: {nbytes:.0f} bytes are far beyond the largest measured"] = None
        return spent


def _cut(steps: Sequence[Action], calls_up: int) -> Directions:
    """Return the parts before, with and after all collectives between nodes and the work around these.

    calls_up: how many collectives come before where none is between nodes.
    """
    calls = [place for place, step in enumerate(steps) if isinstance(step, Call)]
    across = [number for number, place in enumerate(calls) if _is_inter(steps[place])]
    first, last = (across[0], across[-1] + 1) if across else (min(calls_up, len(calls)),) * 2
    begin = calls[first - 1] + 1 if first else 0
    end = begin if not across else calls[last] if last < len(calls) else len(steps)
    return tuple(steps[:begin]), tuple(steps[begin:end]), tuple(steps[end:])


def _calls_before(steps: Sequence[Action]) -> int:
    """Return how many collectives come before the first between nodes."""
    calls = [step for step in steps if isinstance(step, Call)]
    return next(number for number, step in enumerate(calls) if _is_inter(step))


def _is_inter(step: Action) -> bool:
    return isinstance(step, Call) and step.level.startswith("inter")


@lru_cache(maxsize=8)  # by identity: at thousands of ranks this takes longer than all the prices
def first_node(shape: TeamShape) -> tuple[TeamShape, ...]:
    """Return the shape as each rank of the first node sees it: where nodes are alike, all others do the same."""
    return tuple(shape.seen_from(rank) for rank in range(shape.ranks_per_node[0]))


@lru_cache(maxsize=4)
def _first_site(shape: TeamShape) -> tuple[TeamShape, ...]:
    """Return the shape as each rank of the first site of the outermost level sees it; of a small cluster, as all do."""
    site = shape.wire.sites[-1]
    ranks = range(shape.size) if shape.size <= _SMALL else range(site.count(site[0]))
    return tuple(shape.seen_from(rank) for rank in ranks)


@lru_cache(maxsize=4)
def _leaders(shape: TeamShape) -> tuple[TeamShape, ...]:
    """Return the shape as the leader of a node of each length sees it."""
    counts = shape.ranks_per_node
    firsts = {count: sum(counts[:node]) for node, count in enumerate(counts)}
    return tuple(shape.seen_from(rank) for rank in sorted(firsts.values()))
