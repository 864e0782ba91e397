# SPDX-License-Identifier: Apache-2.0
"""A step predicted from its profile without communication, from probed links and the aggregator's own work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist

from bench.compute_only import LoneRank
from bench.evidence.prediction.probe import Probed, Processors, delayed
from commopt.aggregate import Aggregator
from commopt.cost import Links, cost
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.simulate import Bucket, SimulatedStep, Workload, simulate_step

_CALLS = 6
_US = 1e6


def with_own_work(
    probed: Probed, aggregator: Aggregator, buckets: Sequence[Layout], shape: TeamShape, processors: Processors
) -> Probed:
    """Return `probed` with all work multiplied so that it adds up to the aggregator's own on these buckets; collective.

    As in training, all ranks are at it at once; where they share processors, it takes no less than what they keep these
    busy for.
    """
    if aggregator.lossless:
        return probed
    passed_us, busy_us = _measured(aggregator, buckets, shape)
    passed_us = max(passed_us, processors.least_us(busy_us, shape.size))
    return replace(
        probed,
        time=_scaled(probed.time, aggregator, buckets, shape, passed_us),
        processor=_scaled(probed.processor, aggregator, buckets, shape, busy_us),
    )


def _measured(aggregator: Aggregator, buckets: Sequence[Layout], shape: TeamShape) -> tuple[float, float]:
    """Return for how long all buckets keep the slowest rank, and a core of an average one."""
    alone = LoneRank(aggregator, buckets, shape.ranks_per_node, dist.get_rank())
    buffers = [torch.randn(layout.numel) for layout in buckets]
    passed_s, busy_s = [], []
    for _ in range(_CALLS):
        dist.barrier()
        begun_s, begun_cpu_s = perf_counter(), process_time()
        for number, buffer in enumerate(buffers):
            alone.reduce(number, buffer)
        passed_s.append(perf_counter() - begun_s)
        busy_s.append(process_time() - begun_cpu_s)
    slowest = torch.tensor([median(passed_s[2:])], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = torch.tensor([median(busy_s[2:]) / shape.size], dtype=torch.float64)
    dist.all_reduce(mean)
    return _US * float(slowest), _US * float(mean)


def _scaled(links: Links, aggregator: Aggregator, buckets: Sequence[Layout], shape: TeamShape, own_us: float) -> Links:
    priced_us = sum(cost(aggregator, layout, torch.float32, shape, links).compress_us for layout in buckets)
    if priced_us == 0:  # one node sends nothing between nodes, and so encodes nothing
        return links
    factor = own_us / priced_us
    note = f"{factor:.2f} times the probe's, as on this model"
    return replace(links, work={key: curve.scaled(factor, factor, note) for key, curve in links.work.items()})


@dataclass(frozen=True)
class Predicted:
    """A step beside communication on the same processors, and the same as if each rank had others for it."""

    shared: SimulatedStep
    apart: SimulatedStep


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
