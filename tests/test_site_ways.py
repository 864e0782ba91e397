# SPDX-License-Identifier: Apache-2.0
"""Compression over told sites, level by level or between all nodes at once: the price decides, and nothing is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import commopt
from commopt import (
    DGC,
    Aggregator,
    Cast,
    Communicator,
    Compressed,
    ConfigurationError,
    Hierarchical,
    Layout,
    OneBit,
    PowerSGD,
    Quantize,
)
from commopt.aggregate import Buffer, Call, call
from commopt.cost import Curve, LinkKey, Links, cost, ring
from commopt.cost.links import PRIMITIVES
from commopt.groups import Membership, Team, TeamShape
from commopt.schedule.calibration import prices_from_links
from commopt.schedule.candidates import alternatives
from commopt.schedule.config import makes_plans
from commopt.schedule.costs import Costs
from commopt.schedule.plan import Plan, Unit
from commopt.schedule.planner import best_plan
from commopt.simulate.racks import crossing
from tests.feedback_training import Books, Training
from tests.overheard import overheard
from tests.ranks import run
from tests.test_feedback_conservation import check
from tests.test_levels import NETWORKS, choose_a_way, run_in

FOUR_BITS = Compressed(Quantize(4, 64))
PROBED = Links.load(Path(__file__).parents[1] / "bench/results/probe_200mbit.json")


def apart(inter: Aggregator) -> Hierarchical:
    """Return what sends between all nodes, whoever their site is."""
    return Hierarchical(inter, sites=False)


# ------------------------------------------------------------------------------------- as where nobody knows sites


def trained(rank: int, world_size: int, aggregator: Aggregator) -> tuple[str, set[str], int]:
    training = Training(rank, world_size, aggregator)
    for _ in range(4):
        training.step()
    residuals = {role.partition("/")[0] for role in training.comm.state_dict()["residuals"]}
    return training.digest(), residuals, training.comm.stats()["inter_bytes"]


@pytest.mark.parametrize("inter", [FOUR_BITS, Compressed(DGC(0.05)), PowerSGD(2, start_step=0)], ids=repr)
@pytest.mark.parametrize("network", ["2 x 2 x 2", "3 + 2"])
def test_without_levels_of_sites_bits_and_bytes_are_those_of_a_network_without_sites(
    network: str, inter: Aggregator
) -> None:
    nodes = NETWORKS[network].nodes
    found = run_in(network, trained, apart(inter))
    expected = run(trained, sum(nodes), Hierarchical(inter), nodes=nodes)
    if isinstance(inter, PowerSGD):  # factors are added up level by level all the same, in another order
        assert [residuals for _, residuals, _ in found] == [residuals for _, residuals, _ in expected]
    else:
        assert found == expected


def compare_calls(rank: int, world_size: int) -> list[str]:
    """Return where the calls that an aggregator describes are not those that it makes."""
    comm, differences = Communicator(), []
    team = comm._membership.team
    for aggregator in (apart(FOUR_BITS), apart(PowerSGD()), apart(Compressed(OneBit()))):
        made: list[Call] = []

        def listen(team: Team, primitive: str, nbytes: int, roots: list[int], into: list[Call] = made) -> None:
            into.extend(call(team, primitive, nbytes, *roots))

        with patch.object(Membership, "compare_call"), overheard(listen):
            comm.all_reduce(torch.ones(40_001), aggregator=aggregator)
        actions = aggregator.calls(Buffer(Layout.anonymous(40_001), torch.float32), team)
        if made != [each for each in actions if isinstance(each, Call)]:
            differences.append(f"rank {rank}, {aggregator}: {actions} promised, {made} made")
    return differences


@pytest.mark.parametrize("network", ["(2+1) x (2+1+3)", "racks"])
def test_calls_are_what_is_called(network: str) -> None:
    assert run_in(network, compare_calls) == [[]] * sum(NETWORKS[network].nodes)


def test_levels_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"sites=False.*leave one of the two"):
        Hierarchical(Hierarchical(), sites=False)
    assert repr(apart(FOUR_BITS)) == "Hierarchical(inter=Compressed(Quantize(bits=4, block=64)), sites=False)"


# ------------------------------------------------------------------------------------- from one way to the other


def change_ways(rank: int, world_size: int, inter: Aggregator) -> tuple[list[Books], str]:
    """Train, and go the other way from the fourth step on and after each third one; return the books of some steps."""
    training = Training(rank, world_size, Hierarchical(inter))
    controller = training.comm._registration.controller
    books = []
    for step in range(1, 14):
        if step > 3 and step % 3 == 1:
            way = apart(inter) if step % 2 == 0 else Hierarchical(inter)
            groups = [tuple(name for name, *_ in bucket) for bucket in training.comm.state_dict()["buckets"]]
            controller.follow(Plan(tuple(groups), repr(way), "test"))
            training.step()
            assert controller.aggregator == way
            books.append(training.books())
        else:
            training.step()
    return books, training.digest()


@pytest.mark.parametrize("network", ["2 x 2 x 2", "(2+1) x (2+1+3)", "3 + 2", "racks"])
def test_no_residual_is_lost_from_one_way_to_the_other(network: str) -> None:
    check(run_in(network, change_ways, FOUR_BITS))


def test_with_sites_a_preset_keeps_the_faster_of_two_ways() -> None:
    found = run_in("scattered", choose_a_way, "hierarchical_onebit", env={"COMMOPT_PLAN": None})
    assert len({aggregator for _, aggregator, _ in found}) == 1
    preset = commopt.build_preset("hierarchical_onebit")
    assert isinstance(preset, Hierarchical)
    assert found[0][1] in (repr(preset), repr(apart(preset.inter)))
    assert found[0][0], "nobody has measured"


def test_there_is_a_choice_only_where_told_sites_change_what_is_sent() -> None:
    sites = ((0, 0, 1, 1),)
    told, untold = TeamShape.of((1,) * 4, sites=sites), TeamShape.of((1,) * 4)
    on_gpus = TeamShape.of((1,) * 4, backends={"cpu": "gloo", "cuda": "nccl"}, sites=sites)
    quantized = Hierarchical(FOUR_BITS)
    assert list(alternatives(quantized, told).values()) == [quantized, apart(FOUR_BITS)]
    assert makes_plans(None, quantized, told)
    assert not makes_plans("ddp", quantized, told)
    factors = Hierarchical(PowerSGD())
    assert makes_plans(None, factors, on_gpus), "gradients are added up inside sites"
    for aggregator, shape in (
        (quantized, untold),
        (factors, told),
        (FOUR_BITS, told),
        (apart(FOUR_BITS), told),
        (Hierarchical(Hierarchical(FOUR_BITS)), told),  # asked for in this form
        (Hierarchical(Compressed(OneBit(), adam=commopt.Adam())), told),
    ):
        assert list(alternatives(aggregator, shape).values()) == [aggregator]
        assert not makes_plans(None, aggregator, shape)


# ------------------------------------------------------------------------------------- prices


def links_of(sites: int, nodes: int, mbit: float, site_mbit: float) -> Links:
    """Return the links of equal sites at 0.9 of their rates, 150 us a step; work as bench/results measured it."""
    ranks = sites * nodes
    curves: dict[LinkKey, Curve] = {}

    def us(mbit: float) -> float:
        return 8 / (0.9 * mbit)

    def add(level: str, primitive: str, count: int, groups: int, us_per_byte: float) -> None:
        steps = ring(primitive, count).steps
        curves[LinkKey(level, primitive, count, groups)] = Curve.linear(150.0 * steps, us_per_byte)

    for primitive in PRIMITIVES:
        leaving = crossing(primitive, ranks, nodes) * us(site_mbit)
        add("world", primitive, ranks, 1, max(ring(primitive, ranks).volume * us(mbit), leaving))
        add("inter.intra", primitive, nodes, sites, ring(primitive, nodes).volume * us(mbit))
        between = max(us(mbit), nodes * us(site_mbit))  # all nodes of a site send at once
        add("inter.inter", primitive, sites, nodes, ring(primitive, sites).volume * between)
    return Links(PROBED.header, curves, PROBED.work)


RACKS, THREE, FIVE = (2, 4, 200, 200), (2, 3, 500, 50), (2, 5, 500, 50)
MATRIX = (650, 500)
NUMEL = 4 * MATRIX[0] * MATRIX[1]


def told_shape(sites: int, nodes: int) -> TeamShape:
    return TeamShape.of((1,) * (sites * nodes), sites=([node // nodes for node in range(sites * nodes)],))


@pytest.mark.parametrize("network", [RACKS, THREE, FIVE], ids=str)
@pytest.mark.parametrize("inter", [Compressed(Quantize(8)), Compressed(Quantize(4)), Compressed(OneBit())], ids=repr)
def test_inside_a_site_8_bits_cost_less_than_16_and_than_exact_sums(
    inter: Compressed, network: tuple[int, int, float, float]
) -> None:
    shape, links = told_shape(*network[:2]), links_of(*network)

    def price(aggregator: Aggregator) -> float:
        return cost(aggregator, NUMEL, torch.float32, shape, links).total_us

    sixteen = Compressed(Cast(torch.bfloat16), feedback=None)
    inside = [price(Hierarchical(Hierarchical(inter, intra=each))) for each in (Compressed(Quantize(8)), sixteen, None)]
    assert price(Hierarchical(inter)) == inside[0]
    assert inside == sorted(inside)


def chosen(inter: Aggregator, network: Sequence[float]) -> Aggregator:
    """Return the way that the planner takes by prices, with four gradients that are there at once."""
    sites, nodes, mbit, site_mbit = network
    shape = told_shape(int(sites), int(nodes))
    ways = alternatives(Hierarchical(inter), shape)
    layout = Layout.of_parameters([(str(number), MATRIX) for number in range(4)])
    prices = prices_from_links(ways, layout, torch.float32, shape, links_of(int(sites), int(nodes), mbit, site_mbit))
    units = [Unit((str(number),), NUMEL, 0.0, "float32") for number in range(4)]
    return ways[best_plan(units, Costs(prices)).strategy]


@pytest.mark.parametrize(
    ("inter", "network", "by_site"),
    [
        *((Compressed(Quantize(8)), network, True) for network in (RACKS, THREE, FIVE)),
        *((Compressed(Cast(torch.bfloat16), feedback=None), network, True) for network in (RACKS, THREE, FIVE)),
        (Compressed(Quantize(4)), RACKS, False),
        *((Compressed(Quantize(4)), network, True) for network in (THREE, FIVE)),
        (Compressed(OneBit()), RACKS, False),
        *((Compressed(OneBit()), network, True) for network in (THREE, FIVE)),
        *((Compressed(DGC(0.01)), network, False) for network in (RACKS, THREE, FIVE)),
        *((Compressed(DGC(0.001)), network, False) for network in (RACKS, THREE, FIVE)),
    ],
    ids=repr,
)
def test_rates_and_bits_decide_whether_a_preset_goes_site_by_site(
    inter: Aggregator, network: tuple[int, int, float, float], by_site: bool
) -> None:
    assert chosen(inter, network) == (Hierarchical(inter) if by_site else apart(inter))
