# SPDX-License-Identifier: Apache-2.0
"""Links from line rates: the closed forms, the right curve at every level, and the rates of ports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commopt.cost import PRIMITIVES, LinkCost, Links, Speeds, nominal_links, ring, tree_us
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape, WireModel
from tests.closed_forms import ring_over_nodes_us, ring_us

SPEEDS = Speeds(nic_gbps=80, intra_gb_per_s=50, nics=4, inter_latency_us=20, intra_latency_us=2)
MIB = 2**20
FAST = LinkCost(2, 1e-5)
SLOW = LinkCost(20, 1e-3)


@pytest.mark.parametrize("primitive", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_a_ring_carries_what_the_wire_model_counts(primitive: str) -> None:
    for ranks in (2, 3, 8, 64):
        sent = [getattr(WireModel(rank, range(ranks)), primitive)(MIB) for rank in range(ranks)]
        mean = sum(each.inter for each in sent) / ranks
        assert ring(primitive, ranks).volume * MIB == pytest.approx(mean, rel=1e-5)


def test_rings_and_binomial_trees() -> None:
    for ranks in (2, 5, 16):
        both = ring("reduce_scatter", ranks).time_us(MIB, SLOW) + ring("all_gather", ranks).time_us(MIB / ranks, SLOW)
        assert ring("all_reduce", ranks).time_us(MIB, SLOW) == pytest.approx(both) == ring_us(MIB, ranks, SLOW)
    assert ring_over_nodes_us(MIB, 4, 1, FAST, SLOW) == pytest.approx(ring_us(MIB, 4, SLOW))
    assert ring_over_nodes_us(MIB, 1, 4, FAST, SLOW) == pytest.approx(ring_us(MIB, 4, FAST))
    assert [ring("broadcast", ranks).steps for ranks in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 3, 3, 4]
    with pytest.raises(ValueError, match="'scan' is none of all_reduce"):
        ring("scan", 2)


def test_trees_win_on_latency_and_lose_on_bandwidth() -> None:
    latency, bandwidth = LinkCost(1, 0), LinkCost(0, 1)
    assert tree_us(MIB, 32, 1, latency, latency) == 10
    assert tree_us(MIB, 32, 8, latency, latency) < ring_us(MIB, 256, latency)
    assert tree_us(MIB, 32, 1, bandwidth, bandwidth) > ring_us(MIB, 32, bandwidth)
    assert tree_us(MIB, 1, 8, bandwidth, LinkCost(0, 9)) == pytest.approx(2 * MIB / 0.78)


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


def test_the_world_is_a_ring_through_all_nodes() -> None:
    ring_us = ring_over_nodes_us(MIB, 2, 4, SPEEDS.intra, SPEEDS.node)
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


def test_one_rank_has_a_port_and_all_ranks_have_all_of_them() -> None:
    assert SPEEDS.inter(1).beta_us_per_byte == SPEEDS.inter(4).beta_us_per_byte == pytest.approx(8e-3 / 20)
    assert SPEEDS.inter(8).beta_us_per_byte == pytest.approx(8e-3 / 10)
    assert SPEEDS.node.beta_us_per_byte == pytest.approx(8e-3 / 80)
