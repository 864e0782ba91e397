"""A cluster of so many equal nodes as the simulator sees it: its shape, its links, and what work takes on its GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from commopt.aggregate import Aggregator
from commopt.cost import Links
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from commopt.simulate.gpus import Gpu
from commopt.simulate.network import Network
from commopt.simulate.work import gpu_work

INTRA_GB_PER_S: Mapping[str, float] = {
    "pcie3": 10.0,
    "pcie4": 20.0,
    "pcie5": 40.0,
    "nvlink": 200.0,
    "nvlink2": 120.0,
    "nvlink3": 200.0,
    "nvlink4": 350.0,
}
"""What collectives achieve inside a node, by assumption: about 80 % of what the links are sold as."""

_GPUS = {"cpu": "gloo", "cuda": "nccl"}
_CPUS = {"cpu": "gloo"}


@dataclass(frozen=True)
class Cluster:
    """Nodes of `gpus_per_node` GPUs; links: the network's nominal ones, or those that were measured."""

    gpus_per_node: int
    gpu: Gpu
    links: Network | Links

    def __post_init__(self) -> None:
        if not isinstance(self.gpus_per_node, int) or isinstance(self.gpus_per_node, bool) or self.gpus_per_node < 1:
            raise ConfigurationError(f"gpus_per_node {self.gpus_per_node!r} must be a whole number, 1 or more")

    def shape(self, nodes: int) -> TeamShape:
        """Return the shape of so many nodes."""
        if nodes < 1:
            raise ConfigurationError(f"{nodes} nodes make no cluster; it needs 1 or more")
        measured_on_cpus = isinstance(self.links, Links) and self.links.header.backend == "gloo"
        return TeamShape.of((self.gpus_per_node,) * nodes, backends=_CPUS if measured_on_cpus else _GPUS)

    def links_for(self, shape: TeamShape, aggregators: Iterable[Aggregator]) -> Links:
        """Return the links of that shape; what work takes is estimated where it was not measured."""
        links = self.links.links(shape) if isinstance(self.links, Network) else self.links
        estimated = gpu_work(self.gpu, aggregators, rows=max(shape.node_count, 2))
        return replace(links, work={**estimated, **links.work})
