# SPDX-License-Identifier: Apache-2.0
"""Networks with sites: exact sums by level, residuals that no level loses, and the bytes that cross each border."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import commopt
from commopt import (
    Adam,
    Aggregator,
    Communicator,
    Compressed,
    ConfigurationError,
    Feedback,
    Flat,
    Hierarchical,
    Layout,
    LocalSGD,
    OneBit,
    PowerSGD,
    Quantize,
)
from commopt.aggregate import Buffer, Call, call
from commopt.cost import Curve, LinkKey, Links, LinksHeader, Speeds, cost, nominal_links
from commopt.groups import Membership, Team, TeamShape
from commopt.groups.sites import read_site
from commopt.probe.operations import groups_of
from tests.feedback_training import Training, total
from tests.overheard import overheard
from tests.ranks import run
from tests.sharded_training import Made, attached, hsdp_mesh, local, plain_steps
from tests.test_auto import go_through_all
from tests.test_feedback_conservation import MIDDLE, check, keep_books
from tests.test_feedback_state import assert_same, books_after, go_on, move
from tests.test_zeros import train
from topology import Cluster

T = TypeVar("T")


class Network(NamedTuple):
    """The ranks of each node, and the site of each node."""

    nodes: tuple[int, ...]
    sites: tuple[str, ...]


NETWORKS = {
    "2 x 2 x 2": Network((2, 2, 2, 2), ("a", "a", "b", "b")),
    "(2+1) x (2+1+3)": Network((2, 1, 2, 1, 3), ("a", "a", "b", "b", "b")),
    "3 + 2": Network((1, 1, 1, 1, 1), ("a", "a", "a", "b", "b")),
    "racks": Network((1,) * 6, ("a/1", "a/1", "a/2", "a/2", "b/1", "b/1")),
    "scattered": Network((1, 1, 1, 1), ("a", "b", "a", "b")),
}
NUMELS = (1, 7, 1023, 40_001)


def run_in(network: str, function: Callable[..., T], *args: object, **options: Any) -> list[T]:
    """Return what a function returns on each rank of a network whose sites are told."""
    nodes, sites = NETWORKS[network]
    return run(function, sum(nodes), *args, nodes=nodes, sites=sites, **options)


def inputs(world_size: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(world_size)]


def average(rank: int, world_size: int, aggregators: Sequence[Aggregator], poisoned: int | None = None) -> list[Tensor]:
    comm = Communicator()
    found = []
    for aggregator in aggregators:
        for numel in NUMELS:
            buffer = inputs(world_size, numel)[rank].float()
            if rank == poisoned:
                buffer[-1] = torch.nan
            comm.all_reduce(buffer, aggregator=aggregator)
            found.append(buffer)
    return found


# ------------------------------------------------------------------------------------------- averages


@pytest.mark.parametrize("network", NETWORKS)
def test_exact_averages_are_those_of_float64(network: str) -> None:
    world_size = sum(NETWORKS[network].nodes)
    exact = [torch.stack(inputs(world_size, numel)).mean(0) for numel in NUMELS]
    results = run_in(network, average, [Hierarchical(), Hierarchical(inter=Hierarchical()), Flat()])
    for result in results:
        for got, first, expected in zip(result, results[0], 3 * exact, strict=True):
            assert torch.equal(got, first)
            torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("network", ["2 x 2 x 2", "(2+1) x (2+1+3)", "racks"])
def test_a_value_that_is_no_number_reaches_every_rank(network: str) -> None:
    tried = [Hierarchical(), Hierarchical(Compressed(Quantize(4))), Hierarchical(PowerSGD())]
    for result in run_in(network, average, tried, 1):
        assert not any(buffer.isfinite().all() for buffer in result)


# ------------------------------------------------------------------------------------------- residuals


@pytest.mark.parametrize(
    ("network", "strategy", "dtype"),
    [
        ("2 x 2 x 2", "inter 4 bits", "float32"),
        ("2 x 2 x 2", "inter onebit mean", "bfloat16"),
        ("2 x 2 x 2", "inter rank 2", "float32"),
        ("(2+1) x (2+1+3)", "inter 8 bits", "bfloat16"),
        ("(2+1) x (2+1+3)", "inter top 5%", "float32"),
        ("(2+1) x (2+1+3)", "inter rank 2", "float32"),
        ("3 + 2", "inter 4 bits", "bfloat16"),
        ("racks", "inter 4 bits", "float32"),
        ("racks", "inter rank 2", "bfloat16"),
    ],
)
def test_no_level_loses_a_residual(network: str, strategy: str, dtype: str) -> None:
    check(run_in(network, keep_books, strategy, dtype, MIDDLE))


def train_with_short_residuals(rank: int, world_size: int, aggregator: Aggregator) -> str:
    training = Training(rank, world_size, aggregator)
    for _ in range(4):
        training.step()
    return training.digest()


@pytest.mark.parametrize("network", ["2 x 2 x 2", "(2+1) x (2+1+3)", "racks"])
@pytest.mark.parametrize("inside", ["nearest", "stochastic", None])
def test_residuals_rounded_at_random_leave_all_ranks_with_the_same(network: str, inside: str | None) -> None:
    feedback = Feedback(dtype=torch.bfloat16)
    intra = None if inside is None else Compressed(Quantize(8, 64, rounding=inside), feedback)  # type: ignore[arg-type]
    aggregator = Hierarchical(Compressed(Quantize(4, 64), feedback), intra=intra)
    assert len(set(run_in(network, train_with_short_residuals, aggregator))) == 1


def poisoned(rank: int, world_size: int) -> tuple[list[bool], float, int]:
    """Let the last rank's gradient be no number in the third of four steps; return which averages were numbers."""
    ddp = DistributedDataParallel(nn.Linear(64, 32, bias=False))
    state = commopt.attach(ddp, Hierarchical(Compressed(Quantize(4))))
    finite = []
    for number in range(4):
        values = torch.linspace(0.1, 1.0, 64).unsqueeze(0) * (rank + 1)
        if number == 2 and rank == world_size - 1:
            values[0, 5] = float("nan")
        ddp.zero_grad()
        ddp(values).sum().backward()
        gradient = ddp.module.weight.grad
        finite.append(bool(gradient.isfinite().all()))
    found = state.stats()
    return finite, found["residual_norm"], found["dropped_commits"]


@pytest.mark.parametrize("network", ["2 x 2 x 2", "3 + 2"])
def test_what_is_no_number_changes_no_residual_on_any_level(network: str) -> None:
    for finite, residual_norm, dropped in run_in(network, poisoned):
        assert finite == [True, True, False, True]
        assert isfinite(residual_norm)
        assert dropped == 1


def test_a_loss_scale_that_grows_loses_nothing_either() -> None:
    check(run_in("2 x 2 x 2", keep_books, "inter 4 bits", "bfloat16", MIDDLE, 1.5))


@pytest.mark.parametrize("preset", ["hierarchical_onebit", "hierarchical_quantized:bits=4", "hierarchical_powersgd"])
def test_what_nobody_touches_stays_zero(preset: str) -> None:
    for result in run_in("(2+1) x (2+1+3)", train, preset, torch.float32, True):
        assert not any(result.wrong.values()), result.wrong


@pytest.mark.slow
def test_auto_switches_between_all_ways_and_loses_nothing() -> None:
    replicas, reasons, owed, largest = zip(*run_in("scattered", go_through_all, 60, timeout_s=300), strict=True)
    assert len(set(replicas)) == 1
    assert reasons[0][-1] == "done", reasons[0]
    assert any("Hierarchical" in reason for reason in reasons[0])
    assert max(owed) <= 0.02 * max(largest)


def paths_of(rank: int, world_size: int, aggregator: Aggregator) -> set[str]:
    training = Training(rank, world_size, aggregator)
    for _ in range(3):
        training.step()
    return {role.partition("/")[0] for role in training.comm.state_dict()["residuals"]}


def test_a_residual_is_at_the_level_that_compresses() -> None:
    four_bits = Compressed(Quantize(4, 64))

    def paths(found: Sequence[set[str]]) -> set[str]:
        return set[str]().union(*found)

    assert paths(run(paths_of, 8, Hierarchical(four_bits), nodes=(2, 2, 2, 2))) == {"inter"}
    told = run_in("2 x 2 x 2", paths_of, Hierarchical(four_bits))
    assert paths(told) == {"inter.intra", "inter.inter"}
    same = Hierarchical(inter=Hierarchical(intra=Compressed(Quantize(8)), inter=four_bits))
    assert run_in("2 x 2 x 2", paths_of, same) == told
    exact = Hierarchical(inter=Hierarchical(inter=four_bits))
    assert paths(run_in("2 x 2 x 2", paths_of, exact)) == {"inter.inter"}
    racks = {"inter.intra", "inter.inter.intra", "inter.inter.inter"}
    assert paths(run_in("racks", paths_of, Hierarchical(four_bits))) == racks


@pytest.mark.parametrize("strategy", ["inter 4 bits", "inter rank 2"])
def test_a_checkpoint_of_two_levels_loads_into_three_and_back(tmp_path: Path, strategy: str) -> None:
    nodes, names = NETWORKS["2 x 2 x 2"]
    for before, after in ((None, names), (names, None)):
        folder = tmp_path / str(before)
        folder.mkdir()
        kept = run(books_after, 8, strategy, str(folder), nodes=nodes, sites=before)
        left = total([books.residual for books in kept])
        assert max(float(values.abs().max()) for values in left.values()) > 1e-3
        results = run(move, 8, strategy, str(folder), nodes=nodes, sites=after)
        for books in ([first for _, first, _ in results], [last for _, _, last in results]):
            owed, residual = total([each.owed for each in books]), total([each.residual for each in books])
            for name, values in left.items():
                expected, found = values + owed[name], books[0].told[name] + residual[name]
                torch.testing.assert_close(expected, found, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("strategy", ["inter 4 bits", "inter rank 2"])
@pytest.mark.parametrize("network", ["(2+1) x (2+1+3)", "racks"])
def test_resuming_in_a_network_with_sites_changes_no_bit(tmp_path: Path, network: str, strategy: str) -> None:
    arguments = (go_on, strategy, str(tmp_path), 4, False, "")
    whole = run_in(network, *arguments, "whole")
    assert len({digest for digest, _ in whole}) == 1
    assert_same(whole, run_in(network, *arguments, "resumed"))


# ------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(("network", "share"), [("2 x 2 x 2", 0.27), ("3 + 2", 0.55)])
def test_inside_a_site_8_bits_travel_up_and_down(network: str, share: float) -> None:
    """Of three nodes two are leaders; rows of the third stay empty, and travel."""
    four_bits = Compressed(Quantize(4))
    compressed = run_in(network, count_bytes, Hierarchical(four_bits), 1_000_000)
    exact = run_in(network, count_bytes, Hierarchical(inter=Hierarchical(inter=four_bits)), 1_000_000)
    for mine, other in zip(compressed, exact, strict=True):
        assert mine["inter.intra"] <= share * other["inter.intra"]
        assert mine["inter.inter"] == pytest.approx(other["inter.inter"], rel=0.01)


def count_bytes(rank: int, world_size: int, aggregator: Aggregator, numel: int) -> dict[str, int]:
    model = nn.Linear(numel // 1000, 1000, bias=False)
    ddp = DistributedDataParallel(model)
    state = commopt.attach(ddp, aggregator)
    steps = 3
    for _ in range(steps):
        ddp(torch.ones(1, numel // 1000)).sum().backward()
    found = state.stats()
    assert found["steps"] == steps
    return {level: found[f"{level}_bytes"] / steps for level in ("intra", "inter", "inter.intra", "inter.inter")}


@pytest.mark.parametrize(("bits", "aggregator"), [(32, Hierarchical()), (8, Hierarchical(Compressed(Quantize(8))))])
def test_a_border_is_crossed_by_no_more_than_the_formula_says(bits: int, aggregator: Aggregator) -> None:
    """2 M (S-1) / S bytes leave each of S sites, for M bytes in the form that is sent; two sites exchange all."""
    numel, sites = 1_000_000, 2
    for network in ("2 x 2 x 2", "3 + 2", "(2+1) x (2+1+3)"):
        nodes, names = NETWORKS[network]
        sent = run_in(network, count_bytes, aggregator, numel)
        leaving = dict.fromkeys(names, 0.0)
        for rank, node in enumerate(node for node, count in enumerate(nodes) for _ in range(count)):
            assert sent[rank]["inter"] == sent[rank]["inter.intra"] + sent[rank]["inter.inter"]
            leaving[names[node]] += sent[rank]["inter.inter"]
        for nbytes in leaving.values():
            assert nbytes == pytest.approx(2 * numel * bits / 8 * (sites - 1) / sites, rel=0.05)


def test_without_sites_no_level_of_theirs_is_counted() -> None:
    def keys(found: Sequence[set[str]]) -> set[str]:
        return {key for each in found for key in each if key.endswith("_bytes")}

    assert keys(run(stats_keys, 2, nodes=(1, 1))) == keys(run(stats_keys, 2, nodes=(1, 1), sites=("a", "a")))
    assert "inter.inter_bytes" not in keys(run(stats_keys, 2, nodes=(1, 1)))


def stats_keys(rank: int, world_size: int) -> set[str]:
    return set(commopt.attach(DistributedDataParallel(nn.Linear(2, 2)), Hierarchical()).stats())


# ------------------------------------------------------------------------------------------- who says it


def join(rank: int, world_size: int, site: Any = None) -> str:
    """Return the cluster, or the error."""
    try:
        given = site[rank] if isinstance(site, tuple) else site
        return str(Communicator(site=given).cluster)
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize(
    ("env", "site", "expected"),
    [
        ({}, ("a", "a", "b", "b"), "4 nodes x 1 rank(s) in 2 sites of 2 + 2 nodes"),
        ({"COMMOPT_SITE": "all"}, None, "4 nodes x 1 rank(s)"),
        ({"COMMOPT_SITE": "x"}, ("a", "b", "b", "b"), "4 nodes x 1 rank(s) in 2 sites of 1 + 3 nodes"),
        ({}, ("a", "", "b", "b"), "site='' has a level without a name"),
        ({}, ("a", None, "b", None), "rank 1, 3 has no site, and rank 0 is in site 'a'"),
        ({}, ("a", "a/1", "b", "b"), "give every rank equally many levels"),
        ({}, ("a", "a//1", "b", "b"), "site='a//1' has a level without a name"),
        ({}, ("a", 3, "b", "b"), "site 3 is a int; pass a text"),
    ],
)
def test_every_rank_learns_of_all_sites_or_raises(env: dict[str, str], site: object, expected: str) -> None:
    found = run(join, 4, site, nodes=(1, 1, 1, 1), env=env)
    assert any(expected in each for each in found)
    if "nodes x" in expected:
        assert set(found) == {expected}
    else:
        assert not any("nodes x" in each for each in found)


def test_a_site_that_splits_a_node_is_an_error_on_every_rank() -> None:
    found = run(join, 4, ("a", "b", "b", "b"), nodes=(2, 2))
    assert len(set(found)) == 1
    assert "ranks 0 and 1 are on node emulated-node-0 and in sites 'a' and 'b'; a site holds whole nodes" in found[0]


@pytest.mark.parametrize(
    ("address", "pattern", "site"),
    [
        ("spine.leaf0.n0", "switch.switch.node", "spine/leaf0"),
        ("n0", "node", ""),
        ("leaf.n0.cluster", "switch.node", ""),
        ("", "", ""),
    ],
)
def test_slurm_names_the_switches_above_a_node(address: str, pattern: str, site: str) -> None:
    told = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert read_site(None, told) == site
    assert read_site(None, {**told, "COMMOPT_SITE": "here"}) == "here"
    assert read_site(None, told, emulated=True) == ""


def join_with_switches(rank: int, world_size: int, switches: Sequence[str]) -> str:
    depth = switches[rank].count(".")
    told = {"SLURM_TOPOLOGY_ADDR": switches[rank], "SLURM_TOPOLOGY_ADDR_PATTERN": depth * "switch." + "node"}
    with patch.dict("os.environ", told):
        return join(rank, world_size)


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        (("s.a.n0", "s.a.n1", "s.b.n2", "s.b.n3"), "4 nodes x 1 rank(s) in 2 sites of 2 + 2 nodes"),
        (("s.a.n0", "s.a.n1", "b.n2", "b.n3"), "4 nodes x 1 rank(s)"),
    ],
)
def test_switches_that_make_no_sites_are_left_out(switches: Sequence[str], expected: str) -> None:
    assert set(run(join_with_switches, 4, switches, nodes=(1, 1, 1, 1))) == {expected}


def test_a_level_that_divides_nothing_is_left_out() -> None:
    nodes = Cluster(tuple((rank,) for rank in range(4)), tuple("abcd"))
    assert nodes.in_sites(["s/1", "s/1", "s/2", "s/2"]).site_levels == ((0, 0, 1, 1),)
    assert nodes.in_sites(["1/a", "1/b", "2/c", "2/d"]).site_levels == ((0, 0, 1, 1),)
    assert nodes.in_sites(["a", "b", "a", "b"]).nodes == ((0,), (2,), (1,), (3,))
    assert nodes.in_sites(["", "", "", ""]) == nodes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"intra": Flat()}, r"must be a Compressed\(...\) without adam and packed"),
        ({"intra": Compressed(OneBit())}, "is too weak to encode twice"),
        ({"intra": Compressed(Quantize(4))}, "does not keep zeros; use Quantize"),
        ({"intra": Compressed(Quantize(8)), "inter": PowerSGD()}, "PowerSGD needs exact sums inside nodes"),
        ({"intra": Compressed(Quantize(8)), "form": "leader"}, "has one form of its own; leave form"),
    ],
)
def test_compression_inside_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Hierarchical(**options)


def test_a_mean_of_nodes_is_not_taken_of_sites() -> None:
    with pytest.raises(ConfigurationError, match="needs what each node made of its own"):
        Hierarchical(inter=Hierarchical(inter=Compressed(OneBit(), adam=Adam())))


# ------------------------------------------------------------------------------------------- prices


def site_links(shape: TeamShape) -> Links:
    """Return links of 1 us a message of any length inside nodes and sites, and of 1 us a byte between sites."""
    keys = [
        LinkKey(level, primitive, ranks, groups)
        for level in ("intra", "inter.intra", "inter.inter")
        for primitive in ("reduce", "reduce_scatter", "all_reduce", "all_gather", "broadcast", "all_to_all")
        for ranks in (2, 3)
        for groups in (1, 2, 4)
    ]
    slow = {key: Curve.linear(0.0, float(key.groups)) for key in keys if key.level == "inter.inter"}
    return Links(LinksHeader(nodes=shape.ranks_per_node), {key: Curve.linear(1.0, 0.0) for key in keys} | slow)


def test_a_price_is_the_sum_over_the_levels() -> None:
    shape = TeamShape.of((2, 2, 2, 2), sites=((0, 0, 1, 1),))
    numel = 1_000_000  # over gloo a leader of each node, and both nodes of a site
    found = cost(Hierarchical(), numel, torch.float32, shape, site_links(shape))
    assert found.intra_us == pytest.approx(2)
    assert found.inter_us == pytest.approx(2 + 2 * 4 * numel / 2)  # two groups cross at once, with half of it each
    quantized = cost(Hierarchical(Compressed(Quantize(8))), numel, torch.float32, shape, site_links(shape))
    row = Quantize(8).payload_nbytes(numel // 4)  # all four ranks of a site have a shard
    assert quantized.inter_us == pytest.approx(2 + 4 * row, rel=0.01)  # rows have headers


@pytest.mark.parametrize("sites", [((0, 0, 0, 1, 1),), ((0, 0, 1, 1, 2), (0, 0, 0, 0, 1))])
def test_every_rank_gives_the_same_price(sites: tuple[tuple[int, ...], ...]) -> None:
    nodes = (2, 1, 2, 1, 3)
    shapes = [TeamShape.of(nodes, rank, sites=sites) for rank in range(sum(nodes))]
    links = nominal_links(shapes[0], Speeds(1.0, 10.0))
    for aggregator in (Hierarchical(), Hierarchical(Compressed(Quantize(8)))):
        prices = {cost(aggregator, 100_000, torch.float32, shape, links).total_us for shape in shapes}
        assert len(prices) == 1


def compare_calls(rank: int, world_size: int) -> list[str]:
    """Return where the calls that an aggregator describes are not those that it makes."""
    comm, differences = Communicator(), []
    team = comm._membership.team
    for aggregator in (Hierarchical(), Hierarchical(Compressed(Quantize(8))), Hierarchical(PowerSGD())):
        for numel in (1, 7, 40_001):
            made: list[Call] = []

            def listen(team: Team, primitive: str, nbytes: int, roots: list[int], into: list[Call] = made) -> None:
                into.extend(call(team, primitive, nbytes, *roots))

            with patch.object(Membership, "compare_call"), overheard(listen):
                comm.all_reduce(torch.ones(numel), aggregator=aggregator)
            actions = aggregator.calls(Buffer(Layout.anonymous(numel), torch.float32), team)
            if made != [each for each in actions if isinstance(each, Call)]:
                differences.append(f"rank {rank}, {aggregator}, {numel}: {actions} promised, {made} made")
    return differences


@pytest.mark.parametrize("network", ["2 x 2 x 2", "(2+1) x (2+1+3)", "racks"])
def test_calls_are_what_is_called(network: str) -> None:
    differences = [each for mine in run_in(network, compare_calls) for each in mine]
    assert not differences, "\n".join(differences)


def probed(rank: int, world_size: int) -> list[tuple[LinkKey, bool]]:
    return [(group.key("all_reduce"), group.team is not None) for group in groups_of(Communicator()._membership.team)]


def test_every_level_is_timed_by_groups_that_are_complete() -> None:
    for network in ("2 x 2 x 2", "(2+1) x (2+1+3)", "racks"):
        found = run_in(network, probed)
        keys = [key for key, _ in found[0]]
        assert all([key for key, _ in mine] == keys for mine in found)
        assert {"inter.intra", "inter.inter"} <= {key.level for key in keys}
        for place, key in enumerate(keys):
            taking_part = sum(mine[place][1] for mine in found)
            assert taking_part >= key.ranks
            assert taking_part % key.ranks == 0
            assert taking_part == key.ranks or key.groups > 1 or key.level.endswith("intra")


# ------------------------------------------------------------------------------------------- FSDP2, local updates


def weights_of_replicas(rank: int, world_size: int, choice: Aggregator | None) -> list[Tensor]:
    net = Made(mesh=hsdp_mesh(4, 2))()
    with nullcontext() if choice is None else attached(net, choice):
        plain_steps(net, 3)
    return [values.clone() for values in local(net)]


def test_replicas_of_fsdp_in_sites_train_as_stock_ones() -> None:
    stock = run(weights_of_replicas, 8, None, nodes=(2, 2, 2, 2))
    exact, compressed = (
        run_in("2 x 2 x 2", weights_of_replicas, choice)
        for choice in (Hierarchical(), Hierarchical(Compressed(Quantize(8))))
    )
    for rank in range(8):
        for one, other, rough, replica in zip(
            stock[rank], exact[rank], compressed[rank], compressed[rank % 2], strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(one, rough, rtol=0.1, atol=0.1)
            assert torch.equal(rough, replica)


def cluster_of_replicas(rank: int, world_size: int, site: str | None) -> list[str]:
    """Return the sites that the state of a model has, and those of this rank's replicas."""
    with attached(Made(mesh=hsdp_mesh(4, 2))(), Hierarchical(), site=site and f"{site}{rank // 4}") as state:
        replicas = next(iter(state._registration.replicas.values())).client.membership.cluster
        return [str(state.cluster), str(replicas)]


def test_a_site_that_the_script_tells_counts_for_replicas_of_fsdp_too() -> None:
    nodes = NETWORKS["2 x 2 x 2"].nodes
    told = run(cluster_of_replicas, 8, "room", nodes=nodes)
    assert told == run_in("2 x 2 x 2", cluster_of_replicas, None)
    assert all("2 sites" in cluster for cluster in told[0])


def trained(rank: int, world_size: int, choice: Aggregator) -> list[Tensor]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    state = commopt.attach(ddp, choice)
    optimizer = state.optimizer(ddp.parameters(), lr=0.01) if choice.adam else torch.optim.SGD(ddp.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return [values.detach().clone() for values in ddp.parameters()]


@pytest.mark.parametrize(
    "choice",
    [Hierarchical(Compressed(OneBit(), adam=Adam())), LocalSGD(period=2), LocalSGD(period=2, compressor=OneBit())],
    ids=["adam", "local", "deltas"],
)
def test_what_nodes_make_of_their_own_is_not_added_up_in_sites(choice: Aggregator) -> None:
    told = run_in("2 x 2 x 2", trained, choice)
    untold = run(trained, 8, choice, nodes=(2, 2, 2, 2))
    for mine, other in zip(told, untold, strict=True):
        for one, two in zip(mine, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------------------------ one ring or site by site


def choose_a_way(rank: int, world_size: int, preset: str) -> tuple[list[str], str, bool]:
    """Train with sites and no word about plans; return reasons, the aggregator in the end, whether sums are exact."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02)
    state = commopt.attach(ddp, preset)
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
    for _ in range(40):
        ddp.zero_grad()
        ddp(inputs).square().mean().backward()
    averages = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
    ddp.zero_grad()
    ddp.module(inputs).square().mean().backward()
    close = True
    for average, parameter in zip(averages, ddp.parameters(), strict=True):
        assert parameter.grad is not None
        expected = parameter.grad.clone()
        torch.distributed.all_reduce(expected)
        close = close and torch.allclose(average, expected / world_size, atol=1e-6)
    return [each.reason for each in state.decisions], repr(state._registration.controller.aggregator), close


def test_with_sites_hierarchical_keeps_the_faster_of_two_exact_ways() -> None:
    found = run_in("scattered", choose_a_way, "hierarchical", env={"COMMOPT_PLAN": None})
    assert all(close for _, _, close in found)
    assert len({aggregator for _, aggregator, _ in found}) == 1
    assert found[0][1] in (repr(Hierarchical()), repr(Flat()))
    assert found[0][0], "nobody has measured"
