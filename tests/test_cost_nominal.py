"""Links from line rates: the right curve at every level, and speeds taken from what the machines are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commopt.cost import LinkKey, Links, Speeds, formulas, nominal_links
from commopt.cost.formulas import PRIMITIVES
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from topology import Cluster, Fabric
from topology.model import Gpu, Nic, NvLinks, Topology

SPEEDS = Speeds(nic_gbps=80, intra_gb_per_s=50, nics=4, inter_latency_us=20, intra_latency_us=2)
MIB = 2**20


def links_of(*nodes: int) -> Links:
    return nominal_links(TeamShape.of(nodes), SPEEDS)


def keys_of(*nodes: int) -> set[tuple[str, int, int]]:
    found = links_of(*nodes).curves
    assert {key.primitive for key in found} == set(PRIMITIVES)
    return {(key.level, key.ranks, key.groups) for key in found}


def test_every_level_that_a_shape_has() -> None:
    assert keys_of(4) == {("world", 4, 1)}
    assert keys_of(1, 1, 1) == {("world", 3, 1)}
    assert keys_of(2, 2, 2) == {("world", 6, 1), ("intra", 2, 1), ("intra", 2, 3), ("inter", 3, 1), ("inter", 3, 2)}
    assert keys_of(3, 1, 3) == {("world", 7, 1), ("intra", 3, 1), ("intra", 3, 2), ("inter", 3, 1)}
    assert not links_of(1).curves


def test_they_say_what_they_are() -> None:
    links = links_of(2, 2)
    assert links.nominal
    assert links.header.nodes == (2, 2)
    assert not links.work


def test_one_rank_has_a_port_and_all_ranks_have_all_of_them() -> None:
    assert SPEEDS.inter(1).beta_us_per_byte == SPEEDS.inter(4).beta_us_per_byte == pytest.approx(8e-3 / 20)
    assert SPEEDS.inter(8).beta_us_per_byte == pytest.approx(8e-3 / 10)
    assert SPEEDS.node.beta_us_per_byte == pytest.approx(8e-3 / 80)


def test_levels_follow_the_ring() -> None:
    links = links_of(4, 4)
    assert links.curve("intra", "all_gather", 4, 2).time_us(MIB) == pytest.approx(3 * (2 + MIB / 50e3))
    assert links.curve("inter", "all_reduce", 2, 4).time_us(MIB) == pytest.approx(2 * 20 + MIB * 8e-3 / 20)


def test_the_world_is_a_ring_through_all_nodes() -> None:
    ring_us = formulas.ring_over_nodes_us(MIB, 2, 4, SPEEDS.intra, SPEEDS.node)
    links = links_of(4, 4)
    assert links.curve("world", "all_reduce", 8).time_us(MIB) == pytest.approx(ring_us)
    halves = [
        links.curve("world", primitive, 8).time_us(nbytes)
        for primitive, nbytes in (("reduce_scatter", MIB), ("all_gather", MIB / 8))
    ]
    assert sum(halves) == pytest.approx(ring_us)


def test_an_exchange_of_all_with_all_leaves_the_node_from_every_rank() -> None:
    at_once = links_of(4, 4).curve("world", "all_to_all", 8).segments[0]
    assert at_once.beta_us_per_byte == pytest.approx(4 * 4 / 8 * 8e-3 / 80)
    uneven = links_of(3, 1).curve("world", "all_to_all", 4).segments[0]
    assert uneven.beta_us_per_byte == pytest.approx(3 * 1 / 4 * 8e-3 / 80)
    busiest = links_of(3, 1, 1).curve("world", "all_to_all", 5).segments[0]
    assert busiest.beta_us_per_byte == pytest.approx(3 * 2 / 5 * 8e-3 / 80)


@pytest.mark.parametrize("name", ["nic_gbps", "intra_gb_per_s", "nics", "inter_latency_us", "intra_latency_us"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_speeds_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        replace(SPEEDS, **{name: value})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- machines


def machine(gpus: int, gbps: float | None, links: int = 18) -> Topology:
    nics = tuple(Nic(f"mlx5_{port}", f"0000:1{port}:00.0", 1, 0, gbps, gdr=True) for port in range(2))
    nvlinks = tuple(NvLinks(gpu, None, links, kind="switch") for gpu in range(gpus))
    return Topology("test", tuple(Gpu(index, None, 0, sm=90) for index in range(gpus)), nics, nvlinks=nvlinks)


def fabric(*machines: Topology) -> Fabric:
    return Fabric(Cluster.from_ranks_per_node(4 * len(machines), 4), machines)


def test_speeds_are_those_of_the_slowest_machine() -> None:
    speeds = Speeds.of_fabric(fabric(machine(4, 400.0), machine(4, 100.0, links=6)))
    assert (speeds.nic_gbps, speeds.nics) == (200.0, 2)
    assert speeds.intra_gb_per_s == 6 * 200 / 8


def test_a_ring_of_gpus_is_as_fast_as_its_slowest_neighbours() -> None:
    # 0 -2- 1 -4- 2 -2- 3 -4- 0, and 1 link across
    pairs = {(0, 1): 2, (1, 2): 4, (2, 3): 2, (3, 0): 4, (0, 2): 1, (1, 3): 1}
    both_ways = {pair: links for (a, b), links in pairs.items() for pair in ((a, b), (b, a))}
    nvlinks = tuple(NvLinks(a, b, links) for (a, b), links in both_ways.items())
    meshed = replace(machine(4, 100.0), nvlinks=nvlinks)
    assert Speeds.of_fabric(fabric(meshed)).intra_gb_per_s == 2 * 200 / 8
    strange = replace(meshed, gpus=(*meshed.gpus[:3], replace(meshed.gpus[3], sm=None)))
    with pytest.raises(ConfigurationError, match="pass intra_gb_per_s="):
        Speeds.of_fabric(fabric(strange))


def test_unknown_speeds_are_asked_for() -> None:
    unknown = fabric(machine(4, None))
    with pytest.raises(ConfigurationError, match="pass nic_gbps="):
        Speeds.of_fabric(unknown)
    without_gpus = fabric(machine(0, 25.0))
    with pytest.raises(ConfigurationError, match="pass intra_gb_per_s="):
        Speeds.of_fabric(without_gpus)
    assert Speeds.of_fabric(unknown, nic_gbps=10).nic_gbps == 10
    without_ports = fabric(replace(machine(4, None), nics=()))
    assert Speeds.of_fabric(without_ports, nic_gbps=10).nics == 1
    given = Speeds.of_fabric(without_gpus, intra_gb_per_s=8)
    assert (given.nic_gbps, given.intra_gb_per_s) == (50, 8)


def test_keys_are_those_of_the_probe() -> None:
    assert LinkKey("inter", "all_reduce", 2, 4) in links_of(4, 4).curves
