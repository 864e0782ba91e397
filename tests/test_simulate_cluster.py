# SPDX-License-Identifier: Apache-2.0
"""Clusters: rates, connections, trees, and what work takes on a GPU."""

from __future__ import annotations

from math import inf

import pytest
import torch

from commopt import Cast, Compressed, Flat, Hierarchical, Layout, PowerSGD, Quantize
from commopt.compress import DGC
from commopt.cost import (
    Curve,
    LinkCost,
    LinkKey,
    Links,
    LinksHeader,
    Speeds,
    WorkKey,
    cost,
    nominal_links,
    tree_us,
)
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from commopt.simulate import ClusterSpec, NetworkSpec, gpu
from commopt.simulate.cluster import LAUNCH_US, MEMORY_EFFICIENCY, gpu_work
from tests.closed_forms import ring_over_nodes_us, sharded_us

GPUS = {"cpu": "gloo", "cuda": "nccl"}
SHAPE = TeamShape.of((8,) * 4, backends=GPUS)
PLAIN = NetworkSpec(25, 200, efficiency=1.0, trees=False)
NUMEL = 2**22
S = 4 * NUMEL


def test_without_limits_links_are_the_nominal_ones() -> None:
    assert PLAIN.links(SHAPE) == nominal_links(SHAPE, Speeds(25, 200))
    two_ports = NetworkSpec(25, 200, nics=2, efficiency=0.8, trees=False).links(SHAPE)
    assert two_ports == nominal_links(SHAPE, Speeds(40, 200, nics=2))


def test_connections_limit_a_ring_and_eight_of_them_less() -> None:
    """Two connections of 5 Gb/s: a flat ring gets 10 Gb/s of 25, the eight rings of a sharded hierarchy all of them."""
    links = NetworkSpec(25, 200, efficiency=1.0, socket_gbps=5, connections=2, trees=False).links(SHAPE)
    intra = LinkCost(3, 1 / 200e3)
    flat = cost(Flat(), NUMEL, torch.float32, SHAPE, links).total_us
    assert flat == pytest.approx(ring_over_nodes_us(S, 4, 8, intra, LinkCost(15, 8e-3 / 10)))
    sharded = cost(Hierarchical(form="reduce_scatter"), NUMEL, torch.float32, SHAPE, links).total_us
    assert sharded == pytest.approx(sharded_us(S, 4, 8, intra, LinkCost(15, 8 * 8e-3 / 25)))


@pytest.mark.parametrize(
    ("key", "gbps"),
    [
        (LinkKey("world", "all_reduce", 32), 4.0),
        (LinkKey("inter", "all_reduce", 4, 1), 4.0),
        (LinkKey("inter", "all_reduce", 4, 4), 16.0),
        (LinkKey("inter", "all_reduce", 4, 8), 25.0),
        (LinkKey("inter", "all_to_all", 4, 1), 12.0),
        (LinkKey("world", "all_to_all", 32), 25.0),
    ],
)
def test_rates_by_hand(key: LinkKey, gbps: float) -> None:
    assert NetworkSpec(25, 200, efficiency=1.0, socket_gbps=4, connections=1).node_gbps(key) == gbps


def test_trees_take_over_where_they_are_faster() -> None:
    links = NetworkSpec(25, 200, efficiency=1.0).links(SHAPE)
    intra, node = LinkCost(3, 1 / 200e3), LinkCost(15, 8e-3 / 25)
    curve = links.curve("world", "all_reduce", 32)
    for nbytes in (8, 2**16, 2**18, 2**20, 2**24):
        tree, ring = tree_us(nbytes, 4, 8, intra, node), ring_over_nodes_us(nbytes, 4, 8, intra, node)
        assert curve.time_us(nbytes) == pytest.approx(min(tree, ring))
    assert tree_us(8, 4, 8, intra, node) < ring_over_nodes_us(8, 4, 8, intra, node)
    assert links.curve("world", "all_gather", 32) == PLAIN.links(SHAPE).curve("world", "all_gather", 32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nic_gbps": 0}, "nic_gbps 0 must be a finite number above 0"),
        ({"nic_gbps": inf}, "nic_gbps inf"),
        ({"efficiency": 1.2}, "efficiency 1.2 must be above 0 and at most 1"),
        ({"socket_gbps": 0}, "socket_gbps 0 must be above 0"),
        ({"connections": 0}, "connections is 0; it must be a whole number"),
        ({"nics": 1.5}, "nics is 1.5; it must be a whole number"),
        ({"intra_gb_per_s": -1}, "intra_gb_per_s=-1"),
        ({"inter_latency_us": -1}, "inter_latency_us=-1"),
    ],
)
def test_networks_that_cannot_be(options: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        NetworkSpec(**{"nic_gbps": 25, "intra_gb_per_s": 200} | options)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- work


def test_work_is_bytes_over_bandwidth() -> None:
    """8 bits in one pass: value, old and new residual of 4 bytes each, a byte and 1/128 of an entry of 4."""
    card = gpu("h200")
    found = gpu_work(card, [Compressed(Quantize(8))], rows=4)
    moved = 4 + 8 + 1 + 4 / 512
    expected_us = LAUNCH_US + NUMEL * moved / (MEMORY_EFFICIENCY * card.memory_gb_per_s * 1e3)
    assert found[WorkKey("encode", repr(Quantize(8)))].time_us(S) == pytest.approx(expected_us, rel=1e-3)


@pytest.mark.parametrize(
    "aggregator",
    [
        Compressed(Quantize(4)),
        Hierarchical(inter=Compressed(Cast(torch.bfloat16), feedback=None)),
        Hierarchical(inter=Compressed(DGC(density=0.01, warmup=((10, 0.1),)))),
        Hierarchical(inter=PowerSGD(2)),
        Compressed(Quantize(8), dense=("*.bias",)),
    ],
    ids=repr,
)
def test_all_work_of_an_aggregator_has_a_price(aggregator: Compressed | Hierarchical) -> None:
    layout = Layout.of_parameters([("a.weight", (512, 512)), ("a.bias", (512,)), ("b.weight", (64, 4096))])
    links = ClusterSpec(8, gpu("a100"), PLAIN).links_for(SHAPE, [aggregator])
    found = cost(aggregator, layout, torch.float32, SHAPE, links)
    assert found.notes == ()
    assert found.compress_us > 0


def test_selecting_reads_its_values_once_more() -> None:
    """Values and residual in, p out, and p read for the candidates: 4 times 4 bytes."""
    card, compressor = gpu("a100"), DGC(density=0.001)
    found = gpu_work(card, [Compressed(compressor)], rows=4)[WorkKey("encode", repr(compressor))]
    wire = compressor.payload_nbytes(2**20) / 2**20
    moved_us = NUMEL * (16 + wire) / (MEMORY_EFFICIENCY * card.memory_gb_per_s * 1e3)
    assert found.time_us(S) == pytest.approx(9 * LAUNCH_US + moved_us)


def test_measured_work_comes_before_estimates() -> None:
    measured = nominal_links(SHAPE, Speeds(25, 200))
    key = WorkKey("encode", repr(Quantize(8)))
    measured = Links(LinksHeader(backend="gloo"), measured.curves, {key: Curve.linear(1, 2)})
    cluster = ClusterSpec(8, gpu("a100"), measured)
    links = cluster.links_for(SHAPE, [Compressed(Quantize(8))])
    assert links.work[key] == Curve.linear(1, 2)
    assert WorkKey("decode", repr(Quantize(8))) in links.work
    assert cluster.shape(2).backend(torch.device("cpu")) == "gloo"
    assert cluster.shape(2).default_device.type == "cpu"


def test_clusters_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="gpus_per_node is 0; it must be"):
        ClusterSpec(0, gpu("a100"), PLAIN)
    with pytest.raises(ConfigurationError, match="0 nodes make no cluster"):
        ClusterSpec(8, gpu("a100"), PLAIN).shape(0)
