# SPDX-License-Identifier: Apache-2.0
"""The cluster of a simulation: GPUs by data sheet, the network by advertised rates and use, shapes and links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite

from commopt.aggregate import Aggregator, WorkKind
from commopt.compress import KernelCost
from commopt.cost import Curve, LineSegment, LinkKey, Links, Speeds, WorkKey, nominal_links, tree_us
from commopt.document import require_whole
from commopt.errors import ConfigurationError, did_you_mean
from commopt.groups import TeamShape
from commopt.simulate.racks import Racks

INTRA_GB_PER_S: Mapping[str, float] = {
    "pcie3": 10.0,
    "pcie4": 20.0,
    "pcie5": 40.0,
    "nvlink": 200.0,
    "nvlink2": 120.0,
    "nvlink3": 200.0,
    "nvlink4": 350.0,
}
"""Assumed rates of collectives inside a node: about 80 % of the advertised rates of the links."""


@dataclass(frozen=True)
class GpuSpec:
    """Peak rates of a GPU.

    name: in lower case.
    tflops: dense TFLOP/s by precision ("fp32", "tf32", "fp16", "bf16").
    memory_gb_per_s: of its memory.
    """

    name: str
    tflops: Mapping[str, float]
    memory_gb_per_s: float

    def peak_tflops(self, precision: str) -> float:
        """Return the peak; raises ConfigurationError for a precision it does not have."""
        if precision not in self.tflops:
            raise ConfigurationError(f"{self.name} has no figure for {precision!r}; there are {', '.join(self.tflops)}")
        return self.tflops[precision]


# NVIDIA's data sheets and architecture white papers; no sparsity, fp16 and bf16 on tensor cores that add in float32.
_TABLE = (
    GpuSpec("p100", {"fp32": 10.6}, 732),  # Tesla P100 SXM2
    GpuSpec("v100", {"fp32": 15.7, "fp16": 125}, 900),  # V100 SXM2
    GpuSpec("t4", {"fp32": 8.1, "fp16": 65}, 320),
    GpuSpec("a10", {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125}, 600),
    GpuSpec("a100", {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 2039),  # A100 SXM 80 GB
    GpuSpec("h100", {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989}, 3350),  # H100 SXM
    GpuSpec("h200", {"fp32": 67, "tf32": 494, "fp16": 989, "bf16": 989}, 4800),  # H200 SXM
    GpuSpec("rtx3090", {"fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71}, 936),  # GA102 white paper
    GpuSpec("rtx4090", {"fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2}, 1008),  # Ada white paper
)
GPUS: dict[str, GpuSpec] = {each.name: each for each in _TABLE}


def gpu(name: str) -> GpuSpec:
    """Return the GPU of that name; raises ConfigurationError when there is none."""
    if name not in GPUS:
        meant = did_you_mean(name, GPUS) or ";"
        raise ConfigurationError(f"GPU {name!r} is unknown{meant} there are {', '.join(GPUS)}")
    return GPUS[name]


# ------------------------------------------------------------------------------------------------ network


@dataclass(frozen=True)
class NetworkSpec:
    """Rates of a network, in one direction.

    nic_gbps: of one port, in Gb/s.
    intra_gb_per_s: from a GPU to another one of its node, as collectives achieve it.
    nics: ports of a node.
    efficiency: the share of the port's rate that payload gets.
    inter_latency_us: of a step of a collective between nodes.
    intra_latency_us: of a step inside a node.
    socket_gbps: the most that one TCP connection carries; infinite with RDMA.
    connections: of a ring, from one rank to the next on another node: NCCL's channels times the sockets of each.
    trees: whether all_reduce may go along a double tree where that is faster than the ring, as with NCCL from 2.4 on.
    racks: among which the nodes are divided; neighbours share one.
    oversubscription: the rate of all ports of a rack over that of its uplink to the others.
    """

    nic_gbps: float
    intra_gb_per_s: float
    nics: int = 1
    efficiency: float = 0.9
    inter_latency_us: float = 15.0
    intra_latency_us: float = 3.0
    socket_gbps: float = inf
    connections: int = 2
    trees: bool = True
    racks: int = 1
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ConfigurationError(f"efficiency {self.efficiency!r} must be above 0 and at most 1, for example 0.9")
        if not self.socket_gbps > 0:
            raise ConfigurationError(f"socket_gbps {self.socket_gbps!r} must be above 0, in Gb/s, for example 10")
        if not (isfinite(self.nic_gbps) and self.nic_gbps > 0):
            raise ConfigurationError(f"nic_gbps {self.nic_gbps!r} must be a finite number above 0, for example 25")
        require_whole(self.nics, 1, "nics")
        require_whole(self.connections, 1, "connections")
        self._speeds(self._line_gbps)  # which checks the others
        Racks(self.racks, self.oversubscription)  # so do racks

    @property
    def in_racks(self) -> Racks:
        """The racks, as data."""
        return Racks(self.racks, self.oversubscription)

    def links(self, shape: TeamShape) -> Links:
        """Return the nominal links of a cluster of this shape, each at the rate that its connections give; no work."""
        at_line = nominal_links(shape, self._speeds(self._line_gbps))
        rates_gbps = {key: self.node_gbps(key) for key in at_line.curves}
        at_rate = {gbps: nominal_links(shape, self._speeds(gbps)).curves for gbps in {*rates_gbps.values()}}
        curves = {key: self._over_uplinks(at_rate[gbps][key], key, shape) for key, gbps in rates_gbps.items()}
        if self.trees:
            for key, ring in curves.items():
                if key.primitive == "all_reduce" and key.level != "intra" and shape.node_count > 1:
                    curves[key] = _lower(self._over_uplinks(self._tree(key, shape), key, shape), ring)
        return Links(at_line.header, curves, nominal=True)

    def node_gbps(self, key: LinkKey) -> float:
        """Return the rate of a node during a collective: that of its ports or, if lower, of its connections."""
        rings = max(key.groups, self.nics) if key.level == "inter" else 1
        peers = key.ranks - 1 if key.primitive == "all_to_all" else 1
        return min(self._line_gbps, rings * peers * self.connections * self.socket_gbps)

    @property
    def _line_gbps(self) -> float:
        return self.nics * self.nic_gbps * self.efficiency

    def _speeds(self, node_gbps: float) -> Speeds:
        return Speeds(node_gbps, self.intra_gb_per_s, self.nics, self.inter_latency_us, self.intra_latency_us)

    def _over_uplinks(self, curve: Curve, key: LinkKey, shape: TeamShape) -> Curve:
        """Return a line that is no faster than the uplink of the largest rack, which a tree crosses as a ring does."""
        nodes = self.in_racks.nodes_in_one(shape.node_count)
        uplink = self._speeds(nodes * self._line_gbps / self.oversubscription).node
        (line,) = curve.segments
        beta = max(line.beta_us_per_byte, self.in_racks.crossing(key, shape) * uplink.beta_us_per_byte)
        return Curve.linear(line.alpha_us, beta)

    def _tree(self, key: LinkKey, shape: TeamShape) -> Curve:
        speeds = self._speeds(self.node_gbps(key))
        across = speeds.node if key.level == "world" else speeds.inter(key.groups)
        per_node = max(shape.ranks_per_node) if key.level == "world" else 1
        alpha_us, one_byte_us = (tree_us(nbytes, shape.node_count, per_node, speeds.intra, across) for nbytes in (0, 1))
        return Curve.linear(alpha_us, one_byte_us - alpha_us)


def _lower(one: Curve, other: Curve) -> Curve:
    """Return the lower of two straight lines, everywhere."""
    low, high = sorted((one.segments[0], other.segments[0]), key=lambda line: (line.alpha_us, line.beta_us_per_byte))
    gained = low.beta_us_per_byte - high.beta_us_per_byte
    if gained <= 0:
        return Curve((low,))
    crossing = (high.alpha_us - low.alpha_us) / gained
    moved = LineSegment(crossing, high.alpha_us, high.beta_us_per_byte)
    return Curve((low, moved)) if crossing > 0 else Curve((high,))


@dataclass(frozen=True)
class ClusterSpec:
    """Any number of equal nodes.

    gpus_per_node: GPUs on each.
    gpu: their kind.
    links: a network, or links that were measured.
    """

    gpus_per_node: int
    gpu: GpuSpec
    links: NetworkSpec | Links

    def __post_init__(self) -> None:
        require_whole(self.gpus_per_node, 1, "gpus_per_node")

    @property
    def in_racks(self) -> Racks:
        """Its racks: one where links were measured."""
        return self.links.in_racks if isinstance(self.links, NetworkSpec) else Racks()

    def shape(self, nodes: int, *, told: bool = False) -> TeamShape:
        """Return the shape of so many nodes; told: with its racks as sites."""
        if nodes < 1:
            raise ConfigurationError(f"{nodes} nodes make no cluster; it needs 1 or more")
        measured_on_cpus = isinstance(self.links, Links) and self.links.header.backend == "gloo"
        backends = {"cpu": "gloo"} if measured_on_cpus else {"cpu": "gloo", "cuda": "nccl"}
        inside = self.in_racks.nodes_in_one(nodes)
        sites = [[node // inside for node in range(nodes)]] if told and 1 < inside < nodes else []
        return TeamShape.of((self.gpus_per_node,) * nodes, backends=backends, sites=sites)

    def links_for(self, shape: TeamShape, aggregators: Iterable[Aggregator]) -> Links:
        """Return the links of that shape; the costs of work are estimated where they were not measured."""
        links = self.links.links(shape) if isinstance(self.links, NetworkSpec) else self.links
        estimated = gpu_work(self.gpu, aggregators, rows=max(shape.node_count, 2))
        return replace(links, work={**estimated, **links.work})


# ----------------------------------------------------------------------------------------- work on the GPU

MEMORY_EFFICIENCY = 0.7
"""The share of the memory's data sheet that a fused kernel reaches."""
LAUNCH_US = 5.0
"""From one kernel to the next."""

_VALUE = 4  # bytes; work is counted as float32


def gpu_work(gpu: GpuSpec, aggregators: Iterable[Aggregator], rows: int) -> dict[WorkKey, Curve]:
    """Return curves for all work of these aggregators after warm-up. rows: how many messages are added up."""
    passes: dict[tuple[WorkKind, str], KernelCost] = {("copy", ""): KernelCost(2 * _VALUE, 1)}
    for aggregator in aggregators:
        passes |= aggregator.kernel_costs(rows)
    us_per_byte = 1e-3 / (MEMORY_EFFICIENCY * gpu.memory_gb_per_s)
    return {
        WorkKey(*key): Curve.linear(each.kernels * LAUNCH_US, each.nbytes / _VALUE * us_per_byte)
        for key, each in passes.items()
    }
