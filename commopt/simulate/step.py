# SPDX-License-Identifier: Apache-2.0
"""One training step on a cluster: gradients become ready, buckets are sent, and the optimizer waits for the last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import exp, expm1, inf, isfinite, log
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple

import torch

from commopt.aggregate import Aggregator, LocalSGD
from commopt.cost import Cost, Links, PriceTable, Pricing
from commopt.document import require_time
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.feedback.parameter_buckets import fragments_of, parameter_buckets
from commopt.groups import TeamShape
from commopt.schedule import SPARE, Costs, Unit, best_plan
from commopt.schedule.simulation import finish_times_us, largest_sum, mean_step_us
from commopt.simulate.workload import Workload, dtype_named

Buckets = Literal["ddp", "planned"] | Sequence[Sequence[str]]

OVERHEAD_US = 100.0
"""The cost of a bucket beside its message: the host's time in hooks and launches."""
USUAL_SPREAD = 0.02
"""Of the ranks' times of computation: the standard deviation of the logarithm."""

_MIB = 2**20
_STRATA = 32


class Bucket(NamedTuple):
    """Parameters whose gradients are sent together, and their bytes."""

    names: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class SimulatedStep:
    """The times of a step: step_us = compute_us + waiting_us + exposed_us. With a LocalSGD all are means over a period.

    step_us: from one reduction to the next.
    compute_us: until a usual rank's last gradient is ready.
    waiting_us: how much later the slowest rank's last gradient is ready, on average.
    exposed_us: from then until the last bucket has arrived; with a LocalSGD also the waits for its rounds.
    communication_us: for how long the lane is busy.
    inter_bytes_per_node: payload that the first node sends to others.
    buckets: that were sent.
    notes: assumptions and omissions of the figures.
    peak_inter_bytes_per_node: payload in the step that sends most.
    """

    step_us: float
    compute_us: float
    waiting_us: float
    exposed_us: float
    communication_us: float
    inter_bytes_per_node: int
    buckets: tuple[Bucket, ...]
    notes: tuple[str, ...] = ()
    peak_inter_bytes_per_node: int = 0


@dataclass(frozen=True)
class Stragglers:
    """In each step each rank's computation takes exp(sigma Z - sigma^2 / 2) times its mean, Z normal, all independent.

    The mean of that is 1 and, for small sigma, its standard deviation sigma: 0.02 is 2 %.
    """

    sigma: float

    def __post_init__(self) -> None:
        if not (isfinite(self.sigma) and 0 <= self.sigma <= 1):
            raise ConfigurationError(f"Stragglers(sigma={self.sigma!r}) must be between 0 and 1, for example 0.02")

    def slowest(self, ranks: int) -> tuple[float, ...]:
        """Return equally likely factors of the slowest of `ranks` ranks, in increasing order.

        They are the middles of 32 strata of its distribution, F(x)^ranks: no chance is involved.
        """
        if not self.sigma:
            return (1.0,)
        normal = NormalDist()
        # 1 - u^(1/P), without losing the digits that count where P is large
        tails = (-expm1(log((stratum + 0.5) / _STRATA) / ranks) for stratum in range(_STRATA))
        return tuple(exp(-self.sigma * normal.inv_cdf(tail) - self.sigma**2 / 2) for tail in tails)


def simulate_step(
    workload: Workload,
    aggregator: Aggregator,
    shape: TeamShape,
    links: Links,
    *,
    buckets: Buckets = "ddp",
    overhead_us: float = OVERHEAD_US,
    stragglers: Stragglers | None = None,
) -> SimulatedStep:
    """Return the times of a step, after all warm-up.

    buckets: DDP's own, the planner's, or groups of parameter names.
    stragglers: with them, the result is the expectation.

    Raises ConfigurationError where the aggregator cannot run on the cluster, the links lack a collective, or buckets
    and workload are not of the same parameters.
    """
    return Simulation(workload.layout, aggregator, shape, links, overhead_us).step(workload, buckets, stragglers)


class Simulation:
    """Steps of one model with one aggregator on one cluster; prices of messages are worked out once."""

    def __init__(
        self, layout: Layout, aggregator: Aggregator, shape: TeamShape, links: Links, overhead_us: float = OVERHEAD_US
    ) -> None:
        require_time(overhead_us, "overhead_us")
        if isinstance(aggregator, LocalSGD) and shape.node_count == 1:
            aggregator = aggregator.gradients  # nobody to exchange parameters with
        self._average = aggregator if isinstance(aggregator, LocalSGD) else None
        aggregator.check(shape)
        self._layout = layout
        self._aggregator = aggregator
        self._shape = shape
        self._overhead_us = overhead_us
        self._pieces = {piece.name: piece for piece in layout.pieces}
        self._pricing = cache(lambda dtype, by=aggregator: Pricing(by, dtype_named(dtype), shape, links))
        self._prices = cache(self._price_table)
        self._cost = cache(self._cost_of)

    def step(self, workload: Workload, buckets: Buckets = "ddp", stragglers: Stragglers | None = None) -> SimulatedStep:
        """Return the times of a step of `workload`, whose parameters are those of the layout."""
        if self._shape.size == 1:
            alone_us = workload.compute_us
            return SimulatedStep(alone_us, alone_us, 0.0, 0.0, 0.0, 0, ())
        average = self._average
        # The ranks that wait for each other in each step: with a LocalSGD those of a node.
        together = self._shape.size if average is None else max(self._shape.ranks_per_node)
        factors = (Stragglers(0.0) if stragglers is None else stragglers).slowest(together)
        chosen = self._buckets(workload, buckets, fmean(factors))
        units = {name: unit for unit in workload.units for name in unit.names}
        sent = [self._cost(bucket, units[bucket.names[0]].dtype) for bucket in chosen]
        ready_us = [max(units[name].ready_us for name in bucket.names) for bucket in chosen]
        lane_us = [self._overhead_us + cost.total_us for cost, _ in sent]
        compute_us, slowest_us = workload.compute_us, fmean(factors) * workload.compute_us
        own_nbytes = sum(nbytes for _, nbytes in sent)
        rounds = [] if average is None else self._rounds(average, units)
        rounds_us = [sum(self._overhead_us + cost.total_us for cost, _ in buckets) for buckets in rounds]
        rounds_nbytes = [sum(nbytes for _, nbytes in buckets) for buckets in rounds]

        def reduced_us(factor: float) -> float:
            ready = [factor * each for each in ready_us]
            if average is None:
                return max([factor * compute_us, *finish_times_us(ready, lane_us)])
            optimizer_us = factor * workload.optimizer_us
            return mean_step_us(average, rounds_us, ready, lane_us, factor * compute_us, optimizer_us)

        step_us = fmean(map(reduced_us, factors))
        period = 1 if average is None else average.period
        return SimulatedStep(
            step_us=step_us,
            compute_us=compute_us,
            waiting_us=slowest_us - compute_us,
            exposed_us=step_us - slowest_us,
            communication_us=sum(lane_us) + sum(rounds_us) / period,
            inter_bytes_per_node=own_nbytes + round(sum(rounds_nbytes) / period),
            buckets=chosen,
            notes=tuple(dict.fromkeys(note for cost, _ in chain(sent, *rounds) for note in cost.notes)),
            peak_inter_bytes_per_node=own_nbytes + (0 if average is None else largest_sum(average, rounds_nbytes)),
        )

    def _rounds(self, average: LocalSGD, units: Mapping[str, Unit]) -> list[list[tuple[Cost, int]]]:
        """Return, for each fragment, the costs of its buckets and the bytes of each that leave a node."""
        tensors = {  # in the order of forward, as a module has them
            piece.name: torch.empty(piece.shape, dtype=dtype_named(units[piece.name].dtype), device="meta")
            for piece in reversed(self._layout.pieces)
        }
        return [
            [
                (pricing.cost(bucket.layout), pricing.inter_nbytes(bucket.layout))
                for bucket in parameter_buckets({name: tensors[name] for name in names}, {})
                for pricing in [self._pricing(str(bucket.dtype), average.parameters)]
            ]
            for names in fragments_of(tensors, average.fragments)
        ]

    def _buckets(self, workload: Workload, wanted: Buckets, factor: float) -> tuple[Bucket, ...]:
        groups: Iterable[Sequence[str]]
        if wanted == "ddp":
            groups = [[name for unit in members for name in unit.names] for members in ddp_buckets(workload.units)]
        elif wanted == "planned":
            # A hook measures the times of the slowest rank, and plans with them.
            units = [replace(unit, ready_us=factor * unit.ready_us) for unit in workload.units]
            groups = best_plan(units, self._costs(workload.dtype), spare=SPARE).groups
        elif isinstance(wanted, str):
            raise ConfigurationError(f"buckets={wanted!r} must be 'ddp', 'planned', or groups of parameter names")
        else:
            groups = wanted
        nbytes = {name: unit.nbytes for unit in workload.units for name in unit.names}
        found = [tuple(names) for names in groups]
        if sorted(chain(*found)) != sorted(nbytes):
            raise ConfigurationError(
                "buckets and workload are not of the same parameters; name each parameter in one bucket"
            )
        return tuple(Bucket(names, sum(nbytes[name] for name in names)) for names in found)

    def _costs(self, dtype: torch.dtype) -> Costs:
        """Return the costs that an adaptive hook plans with when its prices are right, for gradients of `dtype`."""
        return Costs({repr(self._aggregator): self._prices(str(dtype))}, self._overhead_us)

    def _price_table(self, dtype: str) -> PriceTable:
        largest = self._layout.numel * dtype_named(dtype).itemsize
        return PriceTable.of(self._pricing(dtype).by_nbytes(self._layout), largest)

    def _cost_of(self, bucket: Bucket, dtype: str) -> tuple[Cost, int]:
        """Return the cost of a bucket's message, and the bytes of it that leave a node."""
        layout = Layout(tuple(self._pieces[name] for name in bucket.names))
        return self._pricing(dtype).cost(layout), self._pricing(dtype).inter_nbytes(layout)


def ddp_buckets(units: Sequence[Unit], cap_mb: float = 25.0, first_mb: float = 1.0) -> tuple[tuple[Unit, ...], ...]:
    """Return which gradients DDP sends together from its second step on, in the order of their launch.

    units: in the order of backward. A bucket closes with the gradient that takes it to its limit or beyond; the first
    of each dtype is limited to `first_mb` MiB, the others to `cap_mb`. What stays open at the end follows, dtype by
    dtype. As torch's compute_bucket_assignment_by_size.
    """
    for name, value in (("cap_mb", cap_mb), ("first_mb", first_mb)):
        if not 0 < value < inf:
            raise ConfigurationError(f"ddp_buckets({name}={value!r}) must be a finite number above 0, in MiB")
    limits_nbytes = (int(first_mb * _MIB), int(cap_mb * _MIB))
    closed: list[tuple[Unit, ...]] = []
    opened: dict[str, list[Unit]] = {}
    begun: set[str] = set()  # dtypes whose first bucket is closed
    for unit in units:
        members = opened.setdefault(unit.dtype, [])
        members.append(unit)
        if sum(member.nbytes for member in members) >= limits_nbytes[unit.dtype in begun]:
            closed.append(tuple(opened.pop(unit.dtype)))
            begun.add(unit.dtype)
    return (*closed, *map(tuple, opened.values()))
