"""One model on more and more nodes: step time, throughput, efficiency, and the batch that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.simulate.cluster import Cluster
from commopt.simulate.step import OVERHEAD_US, Outcome, Simulation
from commopt.simulate.stragglers import Stragglers
from commopt.simulate.strategies import Candidate, Strategy
from commopt.simulate.workload import Workload

LARGEST_BATCH = 2**16


@dataclass(frozen=True)
class Row:
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
    """A model on a cluster of any number of nodes; what was simulated once is not simulated again.

    workload: by the batch of a rank. lanes: as for `simulate_step`.
    """

    def __init__(
        self,
        workload: Callable[[int], Workload],
        cluster: Cluster,
        *,
        overhead_us: float = OVERHEAD_US,
        stragglers: Stragglers | None = None,
        lanes: int | None = None,
    ) -> None:
        self._workload, self._cluster = lru_cache(maxsize=64)(workload), cluster
        self._overhead_us, self._stragglers, self._lanes = overhead_us, stragglers, lanes
        self._shapes: dict[int, TeamShape] = {}
        self._simulations: dict[tuple[int, str], Simulation] = {}
        self._outcomes: dict[tuple[int, Candidate, int], Outcome] = {}

    def weak(self, nodes: Iterable[int], strategies: Sequence[Strategy], batch: int) -> list[Row]:
        """Return a row for each number of nodes and each strategy; every rank has `batch` samples."""
        return [self._row(count, each, lambda _: batch) for count in nodes for each in strategies]

    def strong(self, nodes: Iterable[int], strategies: Sequence[Strategy], total: int) -> list[Row]:
        """Return a row for each number of nodes and each strategy; all ranks share `total` samples.

        Raises ConfigurationError where they cannot do so equally.
        """
        return [self._row(count, each, lambda ranks: _share(total, ranks)) for count in nodes for each in strategies]

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

    def _row(self, nodes: int, strategy: Strategy, batch_of: Callable[[int], int]) -> Row:
        per_node = self._cluster.gpus_per_node
        ranks = nodes * per_node
        batch, on_node, alone = (batch_of(count) for count in (ranks, per_node, 1))
        chosen, outcome = self._fastest(nodes, strategy, batch)
        node_us = self._fastest(1, strategy, on_node)[1].step_us
        return Row(
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
            self._simulations[key] = Simulation(
                layout, aggregator, shape, links, overhead_us=self._overhead_us, lanes=self._lanes
            )
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
