"""What the simulator asks of `commopt.cost` beyond a price: the stages of chunks, and what leaves a node."""

from __future__ import annotations

import pytest
import torch

from commopt import Flat, Hierarchical, Layout
from commopt.aggregate import Aggregator
from commopt.cost import Pricing, Speeds, cost, nominal_links
from commopt.cost.formulas import overlapped_us
from commopt.errors import ConfigurationError
from commopt.groups import TeamShape
from tests.catalogue import aggregators

MODEL = Layout.of_parameters([("a", (512, 512)), ("b", 512), ("c", (512, 2048)), ("d", 2048)])
SHAPES = [(1,), (4,), (1, 1, 1), (2, 2), (4, 4), (2, 1), (3, 1, 2)]


def priced(aggregator: Aggregator, nodes: tuple[int, ...], lanes: int = 1) -> tuple[TeamShape, Pricing]:
    shape = TeamShape.of(nodes)
    links = nominal_links(shape, Speeds(nic_gbps=10, intra_gb_per_s=5))
    return shape, Pricing(aggregator, torch.float32, shape, links, lanes=lanes)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("nodes", SHAPES, ids=str)
def test_stages_add_up_to_the_price(nodes: tuple[int, ...], lanes: int) -> None:
    for aggregator in (Flat(), Hierarchical()):
        _, pricing = priced(aggregator, nodes, lanes)
        found = pricing.cost(MODEL)
        expected = overlapped_us(found.chunks) if lanes == 2 else sum(map(sum, found.chunks))
        assert found.total_us == pytest.approx(expected)
        assert found.compress_us + found.intra_us + found.inter_us == pytest.approx(sum(map(sum, found.chunks)))


@pytest.mark.parametrize("nodes", SHAPES, ids=str)
def test_a_node_sends_what_its_ranks_say(nodes: tuple[int, ...]) -> None:
    shape = TeamShape.of(nodes)
    checked = 0
    for aggregator in aggregators():
        try:
            aggregator.check(shape)
        except ConfigurationError:
            continue
        _, pricing = priced(aggregator, nodes)
        ranks = [TeamShape.of(nodes, rank) for rank in range(nodes[0])]
        expected = sum(aggregator.wire_bytes(MODEL, torch.float32, rank).inter for rank in ranks)
        assert pricing.inter_nbytes(MODEL) == expected
        checked += 1
    assert checked > 5


def test_two_equal_clusters_do_not_share_what_is_remembered_of_one() -> None:
    """Shapes are told apart by identity; a larger one later gets its own ranks."""
    costs = []
    for nodes in ((2, 2), (2, 2), (4, 4)):
        shape, pricing = priced(Hierarchical(), nodes)
        links = nominal_links(shape, Speeds(nic_gbps=10, intra_gb_per_s=5))
        assert (
            pricing.cost(MODEL).total_us == cost(Hierarchical(), MODEL, torch.float32, shape, links, lanes=1).total_us
        )
        costs.append(pricing.cost(MODEL).total_us)
    assert costs[0] == costs[1] < costs[2]
