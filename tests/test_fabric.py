"""The machines of a cluster together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from topology import Cluster, Fabric
from topology.model import Gpu, Nic, NvLinks, Topology


def port(name: str, gbps: float | None = 100.0, gdr: bool | None = None, virtual: bool = False) -> Nic:
    busid = None if virtual else f"0000:{name[-2:]}:00.0"
    return Nic(name, busid, 1, 0, gbps, gdr=gdr, virtual=virtual)


def machine(*nics: Nic, gpus: int = 2) -> Topology:
    links = tuple(NvLinks(gpu, None, 18, kind="switch") for gpu in range(gpus))
    return Topology("test", tuple(Gpu(index, None, 0, sm=90) for index in range(gpus)), nics, nvlinks=links)


TWO = machine(port("mlx5_10", gdr=True), port("docker0", 10_000.0, virtual=True), port("mlx5_11", gdr=True))


def test_rails_are_the_ports_at_one_place_on_every_node() -> None:
    one = machine(port("mlx5_12", 50.0, gdr=True), port("eno13", 1.0))
    fabric = Fabric(Cluster.from_ranks_per_node(6, 2), (TWO, one, TWO))
    assert [[nic.name for nic in rail.nics] for rail in fabric.rails] == [["mlx5_10", "mlx5_12", "mlx5_10"]]
    assert fabric.rails[0].gbps == 50.0
    assert fabric.node_gbps == (200.0, 50.0, 200.0)
    assert fabric.slowest_gbps == 50.0


def test_the_slowest_way_is_unknown_when_one_node_is() -> None:
    fabric = Fabric(Cluster.from_ranks_per_node(4, 2), (TWO, machine(port("eth14", None))))
    assert fabric.rails[0].gbps is None
    assert fabric.slowest_gbps is None


def test_nodes_that_are_not_alike_are_named() -> None:
    other = replace(machine(port("mlx5_12", 50.0), gpus=1), nvlinks=())
    fabric = Fabric(Cluster(((0, 1), (2,)), ("a", "a")), (TWO, other))
    assert fabric.differences == {
        "ranks": "2 on node 0 (a); 1 on node 1 (a)",
        "GPUs": "2 on node 0 (a); 1 on node 1 (a)",
        "NVLink": "switch on node 0 (a); none on node 1 (a)",
        "NIC speeds in Gb/s": "100 + 100 on node 0 (a); 50 on node 1 (a)",
    }
    assert Fabric(Cluster.from_ranks_per_node(4, 2), (TWO, TWO)).differences == {}


def test_every_rank_reports_and_each_node_counts_once() -> None:
    cluster = Cluster(((0, 2), (1, 3)), ("a", "b"))
    other = machine(port("eth14", 25.0))
    fabric = Fabric.from_ranks(cluster, [TWO, other, TWO, other])
    assert fabric.machines == (TWO, other)
    assert fabric.launcher_order == "interleaved over the nodes ((0, 2), (1, 3))"
    assert Fabric.from_ranks(Cluster.from_ranks_per_node(2, 1), [TWO, TWO]).launcher_order == "node by node"


def test_wrong_numbers_are_refused() -> None:
    cluster = Cluster.from_ranks_per_node(4, 2)
    with pytest.raises(ValueError, match="1 machines for 2 nodes"):
        Fabric(cluster, (TWO,))
    with pytest.raises(ValueError, match="2 topologies for 4 ranks"):
        Fabric.from_ranks(cluster, [TWO, TWO])
