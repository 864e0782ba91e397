"""One model on more and more nodes by several strategies: step time, throughput, efficiency, and the batch it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from commopt.aggregate import Aggregator
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.hooks import PRESETS, build_preset
from commopt.simulate.cluster import ClusterSpec
from commopt.simulate.step import OVERHEAD_US, Outcome, Simulation, Stragglers
from commopt.simulate.workload import Workload

LARGEST_BATCH = 2**16
LOSSLESS = ("flat", "hierarchical")
LOSSY = (
    "hierarchical_bf16",
    "quantized",
    "quantized:bits=4",
    "onebit",
    "powersgd",
    "dgc",
    "hierarchical_quantized",
    "hierarchical_quantized:bits=4",
    "hierarchical_onebit",
    "hierarchical_powersgd",
    "hierarchical_dgc",
)
DEFAULT = ("stock", "lossless", "hierarchical_bf16", "hierarchical_quantized", "hierarchical_powersgd", "lossy")

BucketSource = Literal["ddp", "planned"]


@dataclass(frozen=True)
class Candidate:
    """A preset with its options, in DDP's buckets or in the planner's."""

    preset: str
    buckets: BucketSource

    def build(self) -> Aggregator:
        """Return the aggregator; raises ConfigurationError for a preset that does not exist or does not average."""
        aggregator = build_preset(self.preset)
        if aggregator.tunes:
            raise ConfigurationError(
                f"{self.preset} chooses on live steps, which a simulation has none of; compare 'lossless' and 'lossy'"
            )
        return aggregator

    def __str__(self) -> str:
        return STOCK if self == _STOCK else self.preset


STOCK = "stock"
_STOCK = Candidate("flat", "ddp")


@dataclass(frozen=True)
class Strategy:
    """The fastest of some candidates."""

    name: str
    candidates: tuple[Candidate, ...]


def strategy(name: str, buckets: BucketSource = "planned") -> Strategy:
    """Return the strategy of that name: "stock", "lossless", "lossy", or a preset like "powersgd:matrix_rank=2".

    stock: what DDP does without a hook, its own buckets in one all_reduce over all ranks each. lossless: the best that
    is exact. lossy: the best there is. Raises ConfigurationError for any other name.
    """
    exact = (_STOCK, *(Candidate(preset, buckets) for preset in LOSSLESS))
    groups = {
        STOCK: (_STOCK,),
        "lossless": exact,
        "lossy": (*exact, *(Candidate(preset, buckets) for preset in LOSSY)),
    }
    if name in groups:
        return Strategy(name, groups[name])
    if name.split(":")[0] not in PRESETS:
        raise ConfigurationError(f"strategy {name!r} is unknown; there are {', '.join([*groups, *sorted(PRESETS)])}")
    candidate = Candidate(name, buckets)
    candidate.build()
    return Strategy(name, (candidate,))


@dataclass(frozen=True)
class ScalingPoint:
    """One strategy on one number of nodes.

    chosen: which candidate of the strategy was the fastest. batch: of a rank. samples_per_s: of all ranks, 0 when the
    batch is unknown. gpu_efficiency, node_efficiency: against one GPU, and against one node with the same strategy; of
    equal batches per rank (weak scaling), or of equal batches in all (strong scaling).
    """

    strategy: str
    chosen: str
    nodes: int
    ranks: int
    batch: int
    outcome: Outcome
    samples_per_s: float
    gpu_efficiency: float
    node_efficiency: float

    @property
    def exposed_share(self) -> float:
        """The part of a step in which nothing but communication goes on."""
        return self.outcome.exposed_us / self.outcome.step_us


class Scaling:
    """A model, its workload by the batch of a rank, on a cluster of any number of nodes; nothing is simulated twice."""

    def __init__(
        self,
        workload: Callable[[int], Workload],
        cluster: ClusterSpec,
        *,
        overhead_us: float = OVERHEAD_US,
        stragglers: Stragglers | None = None,
    ) -> None:
        self._workload, self._cluster = lru_cache(maxsize=64)(workload), cluster
        self._overhead_us, self._stragglers = overhead_us, stragglers
        self._shapes: dict[int, TeamShape] = {}
        self._simulations: dict[tuple[int, str], Simulation] = {}
        self._outcomes: dict[tuple[int, Candidate, int], Outcome] = {}

    def weak(self, nodes: Iterable[int], strategies: Sequence[Strategy], batch: int) -> list[ScalingPoint]:
        """Return a point for each number of nodes and each strategy; every rank has `batch` samples."""
        return [self._point(count, each, lambda _: batch) for count in nodes for each in strategies]

    def strong(self, nodes: Iterable[int], strategies: Sequence[Strategy], total: int) -> list[ScalingPoint]:
        """Return a point for each number of nodes and each strategy; all ranks share `total` samples.

        Raises ConfigurationError where they cannot do so equally.
        """
        return [self._point(count, each, lambda ranks: _share(total, ranks)) for count in nodes for each in strategies]

    def smallest_batch(self, nodes: int, strategy: Strategy, efficiency: float) -> int | None:
        """Return the fewest samples per rank with which a step is at least so efficient against one GPU.

        By bisection: a larger batch is not less efficient. None where 65536 are not enough.
        """
        if not 0 < efficiency < 1:
            raise ConfigurationError(f"efficiency {efficiency!r} must be between 0 and 1, for example 0.9")

        def enough(batch: int) -> bool:
            return efficiency * self._fastest(nodes, strategy, batch)[1].step_us <= self._workload(batch).compute_us

        if not enough(LARGEST_BATCH):
            return None
        too_few, found = 0, LARGEST_BATCH
        while found - too_few > 1:
            middle = (too_few + found) // 2
            too_few, found = (too_few, middle) if enough(middle) else (middle, found)
        return found

    def _point(self, nodes: int, strategy: Strategy, batch_of: Callable[[int], int]) -> ScalingPoint:
        per_node = self._cluster.gpus_per_node
        ranks = nodes * per_node
        batch, on_node, alone = (batch_of(count) for count in (ranks, per_node, 1))
        chosen, outcome = self._fastest(nodes, strategy, batch)
        node_us = self._fastest(1, strategy, on_node)[1].step_us
        return ScalingPoint(
            strategy=strategy.name,
            chosen=str(chosen),
            nodes=nodes,
            ranks=ranks,
            batch=self._workload(batch).samples,
            outcome=outcome,
            samples_per_s=ranks * self._workload(batch).samples / outcome.step_us * 1e6,
            gpu_efficiency=_ratio(batch, alone) * self._workload(alone).compute_us / outcome.step_us,
            node_efficiency=_ratio(batch, on_node) * node_us / outcome.step_us,
        )

    def _fastest(self, nodes: int, strategy: Strategy, batch: int) -> tuple[Candidate, Outcome]:
        outcomes = {candidate: self._outcome(nodes, candidate, batch) for candidate in strategy.candidates}
        return min(outcomes.items(), key=lambda item: item[1].step_us)

    def _outcome(self, nodes: int, candidate: Candidate, batch: int) -> Outcome:
        key = (nodes, candidate, batch)
        if key not in self._outcomes:
            simulation = self._simulation(nodes, candidate, self._workload(batch).layout)
            self._outcomes[key] = simulation.step(self._workload(batch), candidate.buckets, self._stragglers)
        return self._outcomes[key]

    def _simulation(self, nodes: int, candidate: Candidate, layout: Layout) -> Simulation:
        key = (nodes, candidate.preset)
        if key not in self._simulations:
            shape = self._shapes.setdefault(nodes, self._cluster.shape(nodes))
            aggregator = candidate.build()
            links = self._cluster.links_for(shape, [aggregator])
            self._simulations[key] = Simulation(layout, aggregator, shape, links, overhead_us=self._overhead_us)
        return self._simulations[key]


def _ratio(batch: int, other: int) -> float:
    """Return 1 for equal batches, which may be unknown."""
    return 1.0 if batch == other else batch / other


def _share(total: int, ranks: int) -> int:
    if total < 1 or total % ranks:
        raise ConfigurationError(
            f"{total} samples cannot be shared equally by {ranks} GPUs; pass a batch that is a multiple of {ranks}"
        )
    return total // ranks
