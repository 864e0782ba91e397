"""One training step on a cluster: gradients become ready, buckets are sent, and the optimizer waits for the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean
from typing import Literal

import torch

from commopt.aggregate import Aggregator
from commopt.bucketing.prices import prices_from_links
from commopt.bucketing.strategies import aggregator_of, require_strategies, strategies_for
from commopt.cost import Cost, Links, Pricing
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.plan import Bucket, Key, Plan, PriceTable, Unit
from commopt.simulate.buckets import ddp_buckets
from commopt.simulate.events import Message, run
from commopt.simulate.planning import planned_buckets
from commopt.simulate.stragglers import Stragglers
from commopt.simulate.workload import Workload, dtype_named

Buckets = Literal["ddp", "planned"] | Sequence[Bucket]

OVERHEAD_US = 100.0
"""What a bucket costs beside its message: the host's time in hooks and launches."""


@dataclass(frozen=True)
class Outcome:
    """What a step takes: step_us = compute_us + waiting_us + exposed_us.

    waiting_us: how much later the slowest rank's last gradient is ready than that of a usual rank, on average.
    exposed_us: from then until the last bucket has arrived. communication_us: how long the lane is busy.
    inter_bytes_per_node: payload that the first node sends to others. notes: what the figures leave out or assume.
    """

    step_us: float
    compute_us: float
    waiting_us: float
    exposed_us: float
    communication_us: float
    inter_bytes_per_node: int
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = ()


def simulate_step(
    workload: Workload,
    aggregator: Aggregator,
    shape: TeamShape,
    links: Links,
    *,
    buckets: Buckets = "ddp",
    overhead_us: float = OVERHEAD_US,
    stragglers: Stragglers | None = None,
    lanes: int | None = None,
) -> Outcome:
    """Return what one step takes, after all warm-up.

    buckets: DDP's own, the planner's, or these; their strategies are named as in plans. stragglers: with them the
    expectation. lanes: as for `cost`. Raises ConfigurationError where the aggregator cannot run on the cluster, the
    links lack a collective, or buckets and workload are not of the same parameters.
    """
    return Simulation(workload.layout, aggregator, shape, links, overhead_us=overhead_us, lanes=lanes).step(
        workload, buckets, stragglers
    )


class Simulation:
    """Steps of one model with one aggregator on one cluster; what a message costs is worked out once."""

    def __init__(
        self,
        layout: Layout,
        aggregator: Aggregator,
        shape: TeamShape,
        links: Links,
        *,
        overhead_us: float = OVERHEAD_US,
        lanes: int | None = None,
    ) -> None:
        if not (isfinite(overhead_us) and overhead_us >= 0):
            raise ConfigurationError(f"overhead_us={overhead_us!r} must be a finite number, 0 or more")
        aggregator.check(shape)
        self._layout, self._shape, self._links = layout, shape, links
        self._pieces = {piece.name: piece for piece in layout.pieces}
        self._strategies = strategies_for(aggregator, shape)
        self._overhead_us = overhead_us
        self._lanes = 1 if lanes is None else lanes
        self._pricings: dict[tuple[Key, torch.dtype], Pricing] = {}
        self._prices: dict[torch.dtype, Mapping[Key, PriceTable]] = {}
        self._sent: dict[tuple[Bucket, str], tuple[Cost, int]] = {}

    def step(self, workload: Workload, buckets: Buckets = "ddp", stragglers: Stragglers | None = None) -> Outcome:
        """Return what a step of `workload` takes, whose parameters are those of the layout."""
        if self._shape.size == 1:
            alone_us = workload.compute_us
            return Outcome(alone_us, alone_us, 0.0, 0.0, 0.0, 0, ())
        factors = (Stragglers(0.0) if stragglers is None else stragglers).slowest(self._shape.size)
        chosen = self._buckets(workload, buckets, fmean(factors))
        homes = {name: unit for unit in workload.units for name in unit.names}
        dtypes = [homes[bucket.names[0]].dtype for bucket in chosen]
        sent = [self._sending(bucket, dtype) for bucket, dtype in zip(chosen, dtypes, strict=True)]
        ready_us = [max(homes[name].ready_us for name in bucket.names) for bucket in chosen]
        ends_us = []
        for factor in factors:
            messages = [
                Message(factor * ready, self._overhead_us, cost.chunks)
                for ready, (cost, _) in zip(ready_us, sent, strict=True)
            ]
            last_us = run(messages, self._lanes)[-1].end_us
            ends_us.append(max(last_us, factor * workload.compute_us))
        compute_us, slowest_us, step_us = workload.compute_us, fmean(factors) * workload.compute_us, fmean(ends_us)
        return Outcome(
            step_us=step_us,
            compute_us=compute_us,
            waiting_us=slowest_us - compute_us,
            exposed_us=step_us - slowest_us,
            communication_us=sum(self._overhead_us + cost.total_us for cost, _ in sent),
            inter_bytes_per_node=sum(nbytes for _, nbytes in sent),
            buckets=chosen,
            notes=tuple(dict.fromkeys(note for cost, _ in sent for note in cost.notes)),
        )

    def _buckets(self, workload: Workload, wanted: Buckets, factor: float) -> tuple[Bucket, ...]:
        if wanted == "ddp":
            strategy = next(iter(self._strategies))
            return tuple(Bucket.of(members, strategy) for members in ddp_buckets(workload.units))
        if wanted == "planned":
            # What a hook measures, and plans with, are the times of the slowest rank.
            units = [replace(unit, ready_us=factor * unit.ready_us) for unit in workload.units]
            return planned_buckets(units, self._prices_for(_main_dtype(units)), self._overhead_us)
        if isinstance(wanted, str):
            raise ConfigurationError(f"buckets={wanted!r} must be 'ddp', 'planned', or buckets")
        given = Plan(tuple(wanted))
        given.require_names(name for unit in workload.units for name in unit.names)
        require_strategies(given, self._strategies)
        return given.buckets

    def _prices_for(self, dtype: torch.dtype) -> Mapping[Key, PriceTable]:
        if dtype not in self._prices:
            self._prices[dtype] = prices_from_links(
                self._strategies, self._layout, dtype, self._shape, self._links, self._lanes
            )
        return self._prices[dtype]

    def _sending(self, bucket: Bucket, dtype: str) -> tuple[Cost, int]:
        """Return what the message of a bucket costs, and how much of it leaves a node."""
        if (bucket, dtype) not in self._sent:
            pricing = self._pricing(bucket, dtype_named(dtype))
            layout = Layout(tuple(self._pieces[name] for name in bucket.names))
            self._sent[bucket, dtype] = pricing.cost(layout), pricing.inter_nbytes(layout)
        return self._sent[bucket, dtype]

    def _pricing(self, bucket: Bucket, dtype: torch.dtype) -> Pricing:
        key = ((bucket.strategy, bucket.chunks), dtype)
        if key not in self._pricings:
            aggregator = aggregator_of(bucket, self._strategies)
            self._pricings[key] = Pricing(aggregator, dtype, self._shape, self._links, lanes=self._lanes)
        return self._pricings[key]


def _main_dtype(units: Sequence[Unit]) -> torch.dtype:
    """Return the dtype of most bytes."""
    nbytes: dict[str, int] = {}
    for unit in units:
        nbytes[unit.dtype] = nbytes.get(unit.dtype, 0) + unit.nbytes
    return dtype_named(max(nbytes, key=lambda dtype: nbytes[dtype]))
