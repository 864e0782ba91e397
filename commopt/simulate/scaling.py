# SPDX-License-Identifier: Apache-2.0
"""One model on more and more nodes by several strategies: step time, throughput and efficiency."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from commopt.aggregate import Aggregator, LocalSGD
from commopt.errors import ConfigurationError, did_you_mean
from commopt.feedback import Layout
from commopt.groups.sites import SITE_VARIABLE
from commopt.hooks import PRESETS, build_preset
from commopt.hooks.presets import LOCAL_PRESETS
from commopt.simulate.cluster import ClusterSpec
from commopt.simulate.step import OVERHEAD_US, SimulatedStep, Simulation, Stragglers
from commopt.simulate.workload import Workload

LOSSLESS = ("flat", "hierarchical")
LOSSY = (  # by their error, the smallest first
    "hierarchical_bf16",
    "hierarchical_quantized",
    "quantized",
    "hierarchical_quantized:bits=4",
    "quantized:bits=4",
    "hierarchical_powersgd",
    "powersgd",
)
FLAGGED = ("onebit", "dgc", "hierarchical_onebit", "hierarchical_dgc")
"""Presets that learned worse than stock DDP where that was measured, with SGD or AdamW, by default or with as little as
they send of a large model (docs/evidence/convergence.md). No group has them: none is called the fastest."""
DEFAULT = ("stock", "lossless", "hierarchical_bf16", "hierarchical_quantized", "hierarchical_powersgd", "lossy")

_SEARCHED_GPUS = 4096
"""Of the largest cluster in which compression may yet be lost to racks."""

BucketSource = Literal["ddp", "planned"]


@dataclass(frozen=True)
class PresetChoice:
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
_STOCK = PresetChoice("flat", "ddp")


@dataclass(frozen=True)
class Strategy:
    """A row of the table: the fastest of some choices."""

    name: str
    choices: tuple[PresetChoice, ...]


def strategy(name: str, buckets: BucketSource = "planned") -> Strategy:
    """Return the strategy of that name: "stock", "lossless", "lossy", or a preset like "powersgd:matrix_rank=2".

    stock: DDP without a hook, each of its own buckets in one all_reduce over all ranks.
    lossless: the best exact one.
    lossy: the best of these and of LOSSY.

    Raises ConfigurationError for any other name.
    """
    exact = (_STOCK, *(PresetChoice(preset, buckets) for preset in LOSSLESS))
    groups = {
        STOCK: (_STOCK,),
        "lossless": exact,
        "lossy": (*exact, *(PresetChoice(preset, buckets) for preset in LOSSY)),
    }
    if name in groups:
        return Strategy(name, groups[name])
    known = PRESETS | LOCAL_PRESETS
    if name.split(":")[0] not in known:
        names = [*groups, *sorted(known)]
        meant = did_you_mean(name.split(":")[0], names) or ";"
        raise ConfigurationError(f"strategy {name!r} is unknown{meant} there are {', '.join(names)}")
    choice = PresetChoice(name, buckets)
    choice.build()
    return Strategy(name, (choice,))


@dataclass(frozen=True)
class ScalingPoint:
    """One strategy on one number of nodes.

    strategy: its name.
    chosen: the fastest of its choices.
    nodes: their number.
    ranks: their number.
    batch: of a rank.
    outcome: the times of a step.
    samples_per_s: of all ranks; 0 when the batch is unknown.
    gpu_efficiency: against one GPU with the same batch.
    node_efficiency: against one node with the same strategy and the same batch for each rank.
    uplink_bytes_per_rack: payload that the largest rack sends to others in a step; 0 where there is one rack.
    """

    strategy: str
    chosen: str
    nodes: int
    ranks: int
    batch: int
    outcome: SimulatedStep
    samples_per_s: float
    gpu_efficiency: float
    node_efficiency: float
    uplink_bytes_per_rack: int = 0

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
        self._workload = lru_cache(maxsize=64)(workload)
        self._cluster = cluster
        self._overhead_us = overhead_us
        self._stragglers = stragglers
        self._shape = cache(cluster.shape)
        self._simulation = cache(self._simulation_of)
        self._step = cache(self._step_of)

    def weak(self, nodes: Iterable[int], strategies: Sequence[Strategy], batch: int) -> list[ScalingPoint]:
        """Return a point for each number of nodes and each strategy; every rank has `batch` samples."""
        return [self._point(count, each, batch) for count in nodes for each in strategies]

    def _point(self, nodes: int, strategy: Strategy, batch: int) -> ScalingPoint:
        ranks, workload = nodes * self._cluster.gpus_per_node, self._workload(batch)
        chosen, outcome = self._fastest(nodes, strategy, batch)
        return ScalingPoint(
            strategy=strategy.name,
            chosen=str(chosen),
            nodes=nodes,
            ranks=ranks,
            batch=workload.samples,
            outcome=outcome,
            samples_per_s=ranks * workload.samples / outcome.step_us * 1e6,
            gpu_efficiency=workload.compute_us / outcome.step_us,
            node_efficiency=self._fastest(1, strategy, batch)[1].step_us / outcome.step_us,
            uplink_bytes_per_rack=self._uplink_bytes(nodes, chosen, workload),
        )

    def lost_to_racks(self, strategies: Sequence[Strategy], batch: int) -> list[str]:
        """Say of each preset that compresses from how many nodes on it sends as much out of a rack as stock DDP."""
        racks, workload = self._cluster.in_racks, self._workload(batch)
        lines = []
        for preset in dict.fromkeys(each.choices[0] for each in strategies if len(each.choices) == 1):
            aggregator, most_nodes = preset.build(), _SEARCHED_GPUS // self._cluster.gpus_per_node
            if aggregator.lossless:
                continue
            nodes = racks.saves_none_from(aggregator, workload.layout, workload.dtype, self._shape, most_nodes)
            if nodes is not None:
                lines.append(
                    f"racks: from {nodes} nodes on, {nodes // racks.count} in each, {preset} sends as many bytes over "
                    f"an uplink as stock: exchanges cross it once for each node of the rack, a ring once"
                    f"{self._told(preset, aggregator, nodes, workload)}"
                )
        return lines

    def _told(self, preset: PresetChoice, aggregator: Aggregator, nodes: int, workload: Workload) -> str:
        """Say what a rack sends to others when ranks are told their racks, where that is less."""
        shape = self._cluster.shape(nodes, told=True)
        told = self._cluster.in_racks.told_bytes(aggregator, workload.layout, workload.dtype, shape)
        untold = self._uplink_bytes(nodes, preset, workload)
        if isinstance(aggregator, LocalSGD) or told >= untold:
            return ""
        return f". With {SITE_VARIABLE} told it sends {told / 1e6:.1f} MB a step there, in place of {untold / 1e6:.1f}"

    def _uplink_bytes(self, nodes: int, choice: PresetChoice, workload: Workload) -> int:
        return self._cluster.in_racks.uplink_bytes(choice.build(), workload.layout, workload.dtype, self._shape(nodes))

    def _fastest(self, nodes: int, strategy: Strategy, batch: int) -> tuple[PresetChoice, SimulatedStep]:
        steps = {choice: self._step(nodes, choice, batch) for choice in strategy.choices}
        return min(steps.items(), key=lambda item: item[1].step_us)

    def _step_of(self, nodes: int, choice: PresetChoice, batch: int) -> SimulatedStep:
        workload = self._workload(batch)
        simulation = self._simulation(nodes, choice, workload.layout)
        return simulation.step(workload, choice.buckets, self._stragglers)

    def _simulation_of(self, nodes: int, choice: PresetChoice, layout: Layout) -> Simulation:
        shape, aggregator = self._shape(nodes), choice.build()
        links = self._cluster.links_for(shape, [aggregator])
        return Simulation(layout, aggregator, shape, links, self._overhead_us)
