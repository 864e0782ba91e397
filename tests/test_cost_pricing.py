# SPDX-License-Identifier: Apache-2.0
"""The price of an aggregator: the closed forms where these hold, and every aggregator on every shape of cluster."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
import torch

from commopt import Cast, Compressed, Flat, Hierarchical, Layout, PowerSGD, Quantize
from commopt.aggregate import Aggregator
from commopt.cost import (
    PRIMITIVES,
    Curve,
    LinkCost,
    LinkKey,
    Links,
    LinksHeader,
    Pricing,
    Speeds,
    WorkKey,
    cost,
    nominal_links,
    price,
)
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from tests.catalogue import aggregators
from tests.closed_forms import leader_us, ring_over_nodes_us, sharded_us

NUMEL = 3 * 2**18
S = 4 * NUMEL
SPEEDS = Speeds(nic_gbps=10, intra_gb_per_s=5, inter_latency_us=20, intra_latency_us=2)
INTRA = SPEEDS.intra
MODEL = Layout.of_parameters([("a", (512, 512)), ("b", 512), ("c", (512, 2048)), ("d", 2048)])
SHAPES = [(1,), (4,), (1, 1), (1, 1, 1), (2, 2), (2, 2, 2), (4, 4), (2, 1), (3, 1, 2)]


def cost_us(aggregator: Aggregator, layout: Layout | int, shape: TeamShape, links: Links) -> float:
    return cost(aggregator, layout, torch.float32, shape, links).total_us


def priced(aggregator: Aggregator, nodes: tuple[int, ...]) -> float:
    shape = TeamShape.of(nodes)
    return cost_us(aggregator, NUMEL, shape, nominal_links(shape, SPEEDS))


def with_work(links: Links, work: Mapping[WorkKey, Curve]) -> Links:
    return Links(links.header, links.curves, work, links.nominal)


@pytest.mark.parametrize("nodes", [(2,), (8,), (1, 1), (1, 1, 1, 1), (2, 2), (4, 4, 4)])
def test_flat_is_a_ring_over_nodes(nodes: tuple[int, ...]) -> None:
    expected = ring_over_nodes_us(S, len(nodes), nodes[0], INTRA, SPEEDS.node)
    assert priced(Flat(), nodes) == pytest.approx(expected)
    if len(nodes) == 1 or nodes[0] == 1:
        assert priced(Hierarchical(), nodes) == priced(Flat(), nodes)


@pytest.mark.parametrize("nodes", [(2, 2), (4, 4, 4), (8, 8)])
def test_forms_of_hierarchical_cost_what_the_formulas_say(nodes: tuple[int, ...]) -> None:
    n, m = len(nodes), nodes[0]
    alone, shared = SPEEDS.inter(1), SPEEDS.inter(m)
    expected = {
        "reduce_scatter": sharded_us(S, n, m, INTRA, shared),
        "leader": leader_us(S, n, m, INTRA, alone),
    }
    for form, time_us in expected.items():
        assert priced(Hierarchical(form=form), nodes) == pytest.approx(time_us), form  # type: ignore[arg-type]


def test_the_slowest_node_counts_where_they_are_unequal() -> None:
    for nodes in ((3, 1, 2), (1, 2, 3), (2, 3, 1)):
        assert priced(Hierarchical(), nodes) == pytest.approx(leader_us(S, 3, 3, INTRA, SPEEDS.inter(1)))


def test_every_rank_of_a_cluster_gives_the_same_price() -> None:
    for nodes in ((2, 1), (2, 2)):
        links = nominal_links(TeamShape.of(nodes), SPEEDS)
        for aggregator in (Hierarchical(), Hierarchical(inter=PowerSGD(2))):
            shapes = [TeamShape.of(nodes, rank) for rank in range(sum(nodes))]
            prices = {cost_us(aggregator, MODEL, shape, links) for shape in shapes}
            assert len(prices) == 1


def test_parts_are_told_apart() -> None:
    shape = TeamShape.of((2, 2))
    links = nominal_links(shape, SPEEDS)
    names = [repr(Quantize(8))]
    work = {WorkKey(kind, name): Curve.linear(7, 1e-4) for kind in ("encode", "decode", "recode") for name in names}
    found = cost(Hierarchical(inter=Compressed(Quantize(8))), NUMEL, torch.float32, shape, with_work(links, work))
    shard = S // 2
    assert found.compress_us == pytest.approx(2 * 7 + 3 * shard * 1e-4)  # both ranks' rows are decoded
    spread = sharded_us(S, 2, 2, INTRA, LinkCost(0, 0))
    assert found.intra_us == pytest.approx(spread)
    row = Quantize(8).payload_nbytes(NUMEL // 2)
    assert found.inter_us == pytest.approx(20 + row * SPEEDS.inter(2).beta_us_per_byte)
    assert found.total_us == pytest.approx(found.compress_us + found.intra_us + found.inter_us)
    assert found.notes == ()


def test_work_without_figures_is_free_and_said() -> None:
    shape = TeamShape.of((1, 1))
    found = cost(Compressed(Quantize(4)), NUMEL, torch.float32, shape, nominal_links(shape, SPEEDS))
    assert found.compress_us == 0
    says = "by Quantize(bits=4): not measured, counted as nothing"
    assert found.notes == (f"encode {says}", f"decode {says}")


def test_estimates_and_reaches_are_noted() -> None:
    small = Curve.fit([(1024, 10.0), (2048, 11.0)])
    links = Links(LinksHeader(), {LinkKey("world", "all_reduce", 2): small})
    found = cost(Flat(), NUMEL, torch.float32, TeamShape.of((4,)), links)
    assert found.notes == (
        "all_reduce at level world: for 4 ranks from 2",
        f"all_reduce at level world: {S} bytes are far beyond the largest measured",
    )
    with pytest.raises(ConfigurationError, match="only for world all_reduce"):
        cost(Hierarchical(), NUMEL, torch.float32, TeamShape.of((2, 2)), links)


def test_what_cannot_run_has_no_price() -> None:
    with pytest.raises(ConfigurationError, match="equally many ranks"):
        priced(Hierarchical(form="reduce_scatter"), (2, 1))


def test_ranks_that_share_a_port_are_priced_as_they_run() -> None:
    """Of the curves of one and of all groups at once, each form takes the one it runs as."""
    keys = {
        LinkKey(level, primitive, 2, groups): Curve.linear(0, groups * 1.0 if level == "inter" else 0.0)
        for level in ("intra", "inter")
        for primitive in PRIMITIVES
        for groups in (1, 2)
    }
    links, shape = Links(LinksHeader(), keys), TeamShape.of((2, 2))
    assert cost_us(Hierarchical(form="leader"), NUMEL, shape, links) == S
    assert cost_us(Hierarchical(form="reduce_scatter"), NUMEL, shape, links) == 2 * S // 2


# ------------------------------------------------------------------------------------------------ registry


def test_every_aggregator_has_a_price_on_every_shape() -> None:
    for aggregator, nodes in product(aggregators(), SHAPES):
        shape = TeamShape.of(nodes)
        try:
            aggregator.check(shape)
        except ConfigurationError:
            continue
        links = nominal_links(shape, SPEEDS)
        for layout in (NUMEL, MODEL):
            found = cost(aggregator, layout, torch.float32, shape, links)
            assert (found.total_us > 0) == (sum(nodes) > 1)
            assert (found.inter_us > 0) == (len(nodes) > 1)
            assert found.total_us == pytest.approx(found.intra_us + found.inter_us)
            assert all("not measured" in note for note in found.notes)
        ranks = [TeamShape.of(nodes, rank) for rank in range(nodes[0])]
        sent = sum(aggregator.wire_bytes(MODEL, torch.float32, rank).inter for rank in ranks)
        assert Pricing(aggregator, torch.float32, shape, links).inter_nbytes(MODEL) == sent


# -------------------------------------------------------------------------------------------------- prices


def test_a_price_is_the_cost_of_so_many_bytes() -> None:
    shape = TeamShape.of((2, 2))
    links = nominal_links(shape, SPEEDS)
    of_bytes = price(Hierarchical(), shape, links, MODEL)
    for nbytes in (4, 4096, 10**6):
        assert of_bytes(nbytes) == cost_us(Hierarchical(), nbytes // 4, shape, links)
    assert of_bytes(1) == of_bytes(4)
    half = price(Hierarchical(), shape, links, dtype=torch.bfloat16)
    assert half(10**6) == pytest.approx(of_bytes(10**6))


@pytest.mark.parametrize("aggregator", [PowerSGD(2), Hierarchical(inter=PowerSGD(2)), Compressed(Cast(), dense=("a",))])
def test_where_names_matter_a_bucket_is_a_share_of_the_model(aggregator: Aggregator) -> None:
    shape = TeamShape.of((2, 2))
    links = nominal_links(shape, SPEEDS)
    of_bytes = price(aggregator, shape, links, MODEL)
    whole = cost_us(aggregator, MODEL, shape, links)
    assert of_bytes(4 * MODEL.numel) == pytest.approx(whole)
    latency = of_bytes(4)
    assert latency < 0.9 * whole
    assert of_bytes(2 * MODEL.numel) == pytest.approx((whole + latency) / 2, rel=1e-3)
    assert of_bytes(4 * MODEL.numel) != pytest.approx(price(aggregator, shape, links)(4 * MODEL.numel), rel=0.05)


def test_nodes_that_are_at_it_at_once_are_priced_so() -> None:
    keys = {
        LinkKey(level, primitive, 2, groups): Curve.linear(3.0 + 2 * groups if level == "intra" else 0.0, 0)
        for level in ("intra", "inter")
        for primitive in PRIMITIVES
        for groups in (1, 2)
    }
    prices = [cost_us(Hierarchical(), NUMEL, TeamShape.of(n), Links(LinksHeader(), keys)) for n in ((2, 2), (2, 1))]
    assert prices == [2 * 7, 2 * 5]
