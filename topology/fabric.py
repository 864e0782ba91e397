"""The machines of a cluster together: rails, the slowest way between nodes, and what is not alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from topology.cluster import Cluster
from topology.model import Nic, Topology
from topology.queries import node_nic_gbps, nvlink_kind, rail_nics


@dataclass(frozen=True)
class Rail:
    """The ports that stand at one place on every node; equal ranks of all nodes talk over them."""

    index: int
    nics: tuple[Nic, ...]
    """One per node, in node order."""

    @property
    def gbps(self) -> float | None:
        """The slowest port's speed in Gb/s, None when one is unknown."""
        return _slowest([nic.speed_gbps for nic in self.nics])


@dataclass(frozen=True)
class Fabric:
    """Which ranks share a node, and what each node is."""

    cluster: Cluster
    machines: tuple[Topology, ...]
    """One per node, in the order of `cluster.nodes`."""

    def __post_init__(self) -> None:
        if len(self.machines) != len(self.cluster.nodes):
            raise ValueError(
                f"{len(self.machines)} machines for {len(self.cluster.nodes)} nodes; pass one for each node"
            )

    @classmethod
    def from_ranks(cls, cluster: Cluster, seen: Sequence[Topology]) -> Fabric:
        """Return the fabric from what every rank sees of its machine; of a node the first rank's counts.

        Raises ValueError when `seen` is not one per rank.
        """
        if len(seen) != cluster.world_size:
            raise ValueError(f"{len(seen)} topologies for {cluster.world_size} ranks; gather one from every rank")
        return cls(cluster, tuple(seen[node[0]] for node in cluster.nodes))

    @property
    def rails(self) -> tuple[Rail, ...]:
        """The ports that all nodes have at the same place; those that only some nodes have are no rails."""
        ports = [[machine.nics[place] for place in rail_nics(machine)] for machine in self.machines]
        return tuple(Rail(index, nics) for index, nics in enumerate(zip(*ports, strict=False)))

    @property
    def node_gbps(self) -> tuple[float | None, ...]:
        """What each node can send at once, in Gb/s."""
        return tuple(node_nic_gbps(machine) for machine in self.machines)

    @property
    def slowest_gbps(self) -> float | None:
        """What the slowest node can send, which is what a collective over all nodes gets; None when one is unknown."""
        return _slowest(self.node_gbps)

    @property
    def differences(self) -> dict[str, str]:
        """What is not the same on all nodes, and which nodes have what: the slowest sets the pace of all."""
        values = {what: [of(machine) for machine in self.machines] for what, of in _COMPARED.items()}
        values["ranks"] = [str(len(node)) for node in self.cluster.nodes]
        return {what: self._by_value(of_nodes) for what, of_nodes in values.items() if len(set(of_nodes)) > 1}

    @property
    def launcher_order(self) -> str:
        """How the launcher numbered the ranks, in words."""
        if self.cluster.node_contiguous:
            return "node by node"
        return f"interleaved over the nodes ({', '.join(map(str, self.cluster.nodes))})"

    def _by_value(self, values: Sequence[str]) -> str:
        nodes: dict[str, list[str]] = {}
        for index, (name, value) in enumerate(zip(self.cluster.names, values, strict=True)):
            nodes.setdefault(value, []).append(f"node {index} ({name})")
        return "; ".join(f"{value} on {', '.join(names)}" for value, names in nodes.items())


def _slowest(speeds: Sequence[float | None]) -> float | None:
    known = [speed for speed in speeds if speed is not None]
    return min(known) if known and len(known) == len(speeds) else None


def _speeds(machine: Topology) -> str:
    speeds = [machine.nics[place].speed_gbps for place in rail_nics(machine)]
    return " + ".join("?" if speed is None else f"{speed:g}" for speed in speeds) or "none"


_COMPARED: dict[str, Callable[[Topology], str]] = {
    "GPUs": lambda machine: str(len(machine.gpus)),
    "GPU models": lambda machine: (
        ", ".join(sorted({gpu.name or f"sm {gpu.sm or '?'}" for gpu in machine.gpus})) or "none"
    ),
    "NVLink": nvlink_kind,
    "NIC speeds in Gb/s": _speeds,
}
