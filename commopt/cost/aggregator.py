"""What one all_reduce by an aggregator costs on a cluster of any shape: its calls, priced by the links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import ceil
from typing import NamedTuple

import torch

from commopt.aggregate import Aggregator, Hierarchical
from commopt.aggregate.calls import Call, Stages, Step
from commopt.cost.curve import Curve
from commopt.cost.formulas import StageTimes, overlapped_us
from commopt.cost.links import Links, WorkKey
from commopt.feedback import Layout
from commopt.groups import TeamShape

Price = Callable[[int], float]
"""Bytes of a message to microseconds."""


@dataclass(frozen=True)
class Cost:
    """`total_us` is what passes until the slowest rank is done; the parts are how long each is busy.

    compress_us: work of the ranks themselves. notes: what the figures leave out or assume. chunks: the stages of each,
    as the slowest rank takes them.
    """

    total_us: float
    compress_us: float
    intra_us: float
    inter_us: float
    notes: tuple[str, ...] = ()
    chunks: tuple[StageTimes, ...] = ()


def cost(
    aggregator: Aggregator,
    layout: Layout | int,
    dtype: torch.dtype,
    shape: TeamShape,
    links: Links,
    *,
    chunks: int | None = None,
    lanes: int | None = None,
) -> Cost:
    """Return what one all_reduce of a buffer of `layout`, or of so many elements of no model, costs after all warm-up.

    chunks: in place of a Hierarchical's own. lanes: 2 where the levels work on different chunks at once, 1 where they
    take turns; None: whichever is safe with the backend, of any version. Raises ConfigurationError where the aggregator
    cannot run, or the links lack a collective.
    """
    layout = Layout.anonymous(layout) if isinstance(layout, int) else layout
    return Pricing(aggregator, dtype, shape, links, chunks=chunks, lanes=lanes).cost(layout)


def cost_us(
    aggregator: Aggregator,
    layout: Layout | int,
    dtype: torch.dtype,
    shape: TeamShape,
    links: Links,
    *,
    chunks: int | None = None,
    lanes: int | None = None,
) -> float:
    """Return the total of `cost`."""
    return cost(aggregator, layout, dtype, shape, links, chunks=chunks, lanes=lanes).total_us


def price(
    aggregator: Aggregator,
    shape: TeamShape,
    links: Links,
    layout: Layout | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    chunks: int | None = None,
    lanes: int | None = None,
) -> Price:
    """Return what buckets of `dtype` cost by their bytes.

    layout: the whole model's. Where names and shapes matter (PowerSGD, dense patterns), a bucket counts as an equal
    share of everything in it; otherwise only its length does.
    """
    return Pricing(aggregator, dtype, shape, links, chunks=chunks, lanes=lanes).by_nbytes(layout)


class _Alike(NamedTuple):
    """Ranks, of nodes of equal length, that do the same: how one of them sees the cluster, what they do, how many."""

    shape: TeamShape
    stages: tuple[Stages, ...]
    ranks: int


class Pricing:
    """One aggregator on one cluster; curves are looked up once. Arguments and errors are those of `cost`."""

    def __init__(
        self,
        aggregator: Aggregator,
        dtype: torch.dtype,
        shape: TeamShape,
        links: Links,
        *,
        chunks: int | None = None,
        lanes: int | None = None,
    ) -> None:
        aggregator.check(shape)
        self._aggregator, self._dtype, self._links = _with_chunks(aggregator, chunks), dtype, links
        self._device = shape.default_device
        self._lanes = 1 if lanes is None else lanes
        self._shape = shape
        self._curves: dict[tuple[str, str, int, int], Curve] = {}

    def cost(self, layout: Layout) -> Cost:
        """Return what one all_reduce of a buffer of `layout` costs."""
        return self._summed(self._ranks(layout), 1.0)

    def by_nbytes(self, whole: Layout | None) -> Price:
        """Return what buckets cost by their bytes; see `price`."""
        if whole is None or whole.numel == 0 or not self._heeds(whole):
            return lambda nbytes: self.cost(Layout.anonymous(ceil(nbytes / self._dtype.itemsize))).total_us
        ranks, whole_nbytes = self._ranks(whole), whole.numel * self._dtype.itemsize
        return lambda nbytes: self._summed(ranks, nbytes / whole_nbytes).total_us

    def inter_nbytes(self, layout: Layout) -> int:
        """Return what all ranks of the first node together send to other nodes."""
        ranks = _first_node(self._shape)
        return sum(self._aggregator.wire_bytes(layout, self._dtype, rank, self._device).inter for rank in ranks)

    def _heeds(self, layout: Layout) -> bool:
        """Return whether names and shapes matter to what is sent."""
        anonymous = Layout.anonymous(layout.numel)
        return [each.stages for each in self._ranks(layout)] != [each.stages for each in self._ranks(anonymous)]

    def _ranks(self, layout: Layout) -> list[_Alike]:
        """Return what the ranks do that can be the slowest."""
        found: dict[tuple[int, tuple[Stages, ...]], _Alike] = {}
        for shape in _telling(self._shape):
            stages = self._aggregator.stages(layout, self._dtype, shape, self._device)
            key = (shape.intra.size if shape.intra is not None else 1, stages)
            alike = found.get(key, _Alike(shape, stages, 0))
            found[key] = alike._replace(ranks=alike.ranks + 1)
        return list(found.values())

    def _summed(self, ranks: Sequence[_Alike], share: float) -> Cost:
        """Return what it costs when every message and all work have only a `share` of their bytes."""
        groups = sum(each.ranks for each in ranks if any(_is_inter(step) for step in _steps(each.stages)))
        groups = groups if self._shape.uniform else 1
        notes: dict[str, None] = {}
        parts = {"compress": 0.0, "intra": 0.0, "inter": 0.0}
        chunks = []
        for chunk in zip(*(each.stages for each in ranks), strict=True):
            slowest = []
            for stage in range(len(StageTimes._fields)):
                spent = [
                    self._spent(steps[stage], each.shape, groups, share, notes)
                    for steps, each in zip(chunk, ranks, strict=True)
                ]
                worst = max(spent, key=lambda each: sum(each.values()))
                for part, time_us in worst.items():
                    parts[part] += time_us
                slowest.append(sum(worst.values()))
            chunks.append(StageTimes(*slowest))
        total_us = overlapped_us(chunks) if self._lanes > 1 else sum(map(sum, chunks))
        return Cost(total_us, parts["compress"], parts["intra"], parts["inter"], tuple(notes), tuple(chunks))

    def _spent(
        self, steps: Iterable[Step], shape: TeamShape, groups: int, share: float, notes: dict[str, None]
    ) -> dict[str, float]:
        spent = {"compress": 0.0, "intra": 0.0, "inter": 0.0}
        for step in steps:
            nbytes = step.nbytes * share
            if isinstance(step, Call):
                team = shape.at(step.level)
                curve = self._curve(step, team, shape, groups)
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

    def _curve(self, step: Call, team: TeamShape, shape: TeamShape, groups: int) -> Curve:
        at_once = {"inter": groups, "intra": shape.ranks_per_node.count(team.size)}.get(step.level, 1)
        key = (step.level, step.primitive, team.size, at_once)
        if key not in self._curves:
            self._curves[key] = self._links.curve(*key)
        return self._curves[key]


@lru_cache(maxsize=4)  # by identity: at thousands of ranks this takes longer than all the prices
def _first_node(shape: TeamShape) -> tuple[TeamShape, ...]:
    """Return the shape as each rank of the first node sees it."""
    return tuple(shape.seen_from(rank) for rank in range(shape.ranks_per_node[0]))


def _telling(shape: TeamShape) -> tuple[TeamShape, ...]:
    """Return the ranks that can be the slowest: all of the first node, or the leaders of nodes of unequal length."""
    if shape.uniform:
        return _first_node(shape)
    return _leaders(shape)


@lru_cache(maxsize=4)
def _leaders(shape: TeamShape) -> tuple[TeamShape, ...]:
    counts = shape.ranks_per_node
    firsts = {count: sum(counts[:node]) for node, count in enumerate(counts)}
    return tuple(shape.seen_from(rank) for rank in sorted(firsts.values()))


def _with_chunks(aggregator: Aggregator, chunks: int | None) -> Aggregator:
    return (
        aggregator if chunks is None or not isinstance(aggregator, Hierarchical) else replace(aggregator, chunks=chunks)
    )


def _steps(stages: tuple[Stages, ...]) -> Iterable[Step]:
    return chain.from_iterable(chain(*stages))


def _is_inter(step: Step) -> bool:
    return isinstance(step, Call) and step.level == "inter"
