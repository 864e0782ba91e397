"""A step predicted from its profile without communication and from probed links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from bench.prediction.links import Probed
from bench.prediction.sharing import delayed
from commopt.aggregate import Aggregator
from commopt.cost import Links, cost
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.simulate import Bucket, Outcome, Workload, simulate_step


@dataclass(frozen=True)
class Predicted:
    """A step beside communication on the same processors, and the same as if each rank had others for it."""

    shared: Outcome
    apart: Outcome


def predict(workload: Workload, aggregator: Aggregator, shape: TeamShape, probed: Probed, load: float) -> Predicted:
    """Return what a step with DDP's own buckets takes; `load` as in `sharing.Processors`."""
    apart = simulate_step(workload, aggregator, shape, probed.time, buckets="ddp")
    lane_us = _lane_us(workload, aggregator, shape, probed.time, apart.buckets)
    busy_us = _lane_us(workload, aggregator, shape, probed.processor, apart.buckets)
    beside = replace(workload, units=delayed(workload.units, apart.buckets, lane_us, busy_us, load))
    groups = [bucket.names for bucket in apart.buckets]
    return Predicted(simulate_step(beside, aggregator, shape, probed.time, buckets=groups), apart)


def _lane_us(
    workload: Workload, aggregator: Aggregator, shape: TeamShape, links: Links, buckets: tuple[Bucket, ...]
) -> list[float]:
    pieces: Mapping[str, tuple[int, ...]] = {piece.name: piece.shape for piece in workload.layout.pieces}
    layouts = [Layout.of_parameters((name, pieces[name]) for name in bucket.names) for bucket in buckets]
    return [cost(aggregator, layout, torch.float32, shape, links).total_us for layout in layouts]
