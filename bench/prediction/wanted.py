"""Which measurements a price needs: the collectives and the work of aggregators, and their largest messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from commopt.aggregate import Aggregator, Call
from commopt.cost import LinkKey, WorkKey
from commopt.feedback import Layout
from commopt.groups import TeamShape


@dataclass(frozen=True)
class Wanted:
    """By what is to be measured, the largest message or most work in bytes, as a curve counts them."""

    links: dict[LinkKey, int]
    work: dict[WorkKey, int]


def wanted(aggregators: Iterable[Aggregator], buffers: Iterable[Layout], shape: TeamShape) -> Wanted:
    """Return what the prices of these float32 buffers rest on, on a cluster of this shape."""
    links: Counter[LinkKey] = Counter()
    work: Counter[WorkKey] = Counter()
    seen = [shape.seen_from(rank) for rank in range(shape.size)]
    layouts = list(buffers)
    for aggregator in aggregators:
        for layout in layouts:
            steps = [aggregator.calls(layout, torch.float32, each) for each in seen]
            across = sum(
                any(isinstance(step, Call) and step.level == "inter" for step in own)
                for own in steps[: shape.ranks_per_node[0]]
            )
            for own, each in zip(steps, seen, strict=True):
                for step in own:
                    if not isinstance(step, Call):
                        key = WorkKey(step.kind, step.what)
                        work[key] = max(work[key], step.nbytes)
                        continue
                    ranks = each.at(step.level).size
                    at_once = {"inter": across if shape.uniform else 1, "intra": shape.ranks_per_node.count(ranks)}
                    link = LinkKey(step.level, step.primitive, ranks, at_once.get(step.level, 1))
                    links[link] = max(links[link], step.nbytes)
    return Wanted(dict(links), dict(work))
