"""What an aggregator's own work takes on a model's gradients: its all_reduce over teams that send nothing.

The probe times encoding, decoding and factoring by themselves, on one buffer or on square matrices. A model's gradients
are hundreds of tensors of many shapes, some dense beside compressed ones, with residuals that are put in their places:
that takes longer, by a factor that depends on the model and not on the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist
from torch import Tensor

from bench.prediction.links import Probed
from bench.prediction.sharing import Processors
from commopt.aggregate import Aggregator
from commopt.cost import Links, cost
from commopt.feedback import Account, Layout, Ledger
from commopt.groups import TeamShape

_CALLS = 6
_US = 1e6


class Mute(TeamShape):
    """A team whose collectives take no time, because they do nothing but what leaves a rank's own part in place."""

    def all_reduce(self, buffer: Tensor, *, scale: float = 1.0) -> None:
        """Leave `buffer` as it is."""

    def reduce(self, buffer: Tensor, dst: int) -> None:
        """Leave `buffer` as it is."""

    def broadcast(self, buffer: Tensor, src: int) -> None:
        """Leave `buffer` as it is."""

    def all_gather(self, gathered: Tensor, own: Tensor) -> None:
        """Put `own` where it belongs."""
        gathered.view(self.size, -1)[self.rank].copy_(own)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Keep everything."""
        received.copy_(sent)

    def reduce_scatter(self, own: Tensor, buffer: Tensor) -> None:
        """Keep this rank's part."""
        own.copy_(buffer.view(self.size, -1)[self.rank])


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
    team = Mute.of(shape.ranks_per_node, dist.get_rank())
    buffers = [torch.randn(layout.numel) for layout in buckets]
    ledger, steps = Ledger(), count(aggregator.start_step)
    passed_s, busy_s = [], []
    for _ in range(_CALLS):
        step = next(steps)
        dist.barrier()
        begun_s, begun_cpu_s = perf_counter(), process_time()
        ledger.begin_step()
        for number, (layout, buffer) in enumerate(zip(buckets, buffers, strict=True)):
            account = Account(layout, step, number, ledger=ledger)
            aggregator.all_reduce(buffer, team, 1.0 / shape.size, account)  # type: ignore[arg-type]  # as good as one
            ledger.end_bucket([buffer], last=number + 1 == len(buckets))
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
