# SPDX-License-Identifier: Apache-2.0
"""Networks with sites: exact sums by level, residuals that no level loses, and the bytes that cross each border."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
    Flat,
    Hierarchical,
    OneBit,
    PowerSGD,
    Quantize,
)
from commopt.groups.sites import read_site
from tests.feedback_training import Training, total
from tests.ranks import run
from tests.test_feedback_conservation import MIDDLE, check, keep_books
from tests.test_feedback_state import assert_same, books_after, go_on, move
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
    tried = [Hierarchical(), Hierarchical(Compressed(Quantize(8))), Hierarchical(PowerSGD())]
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


def paths_of(rank: int, world_size: int, aggregator: Aggregator) -> set[str]:
    training = Training(rank, world_size, aggregator)
    for _ in range(3):
        training.step()
    return {role.partition("/")[0] for role in training.comm.state_dict()["residuals"]}


def test_a_residual_is_at_the_level_that_compresses() -> None:
    four_bits = Compressed(Quantize(4, 64))
    told = run_in("2 x 2 x 2", paths_of, Hierarchical(four_bits))
    assert set().union(*told) == {"inter.inter"}
    assert run_in("2 x 2 x 2", paths_of, Hierarchical(inter=Hierarchical(inter=four_bits))) == told
    assert set().union(*run_in("racks", paths_of, Hierarchical(four_bits))) == {"inter.inter.inter"}
    assert set().union(*run(paths_of, 8, Hierarchical(four_bits), nodes=(2, 2, 2, 2))) == {"inter"}


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


def test_a_level_that_divides_nothing_is_left_out() -> None:
    nodes = Cluster(tuple((rank,) for rank in range(4)), tuple("abcd"))
    assert nodes.in_sites(["s/1", "s/1", "s/2", "s/2"]).site_levels == ((0, 0, 1, 1),)
    assert nodes.in_sites(["1/a", "1/b", "2/c", "2/d"]).site_levels == ((0, 0, 1, 1),)
    assert nodes.in_sites(["a", "b", "a", "b"]).nodes == ((0,), (2,), (1,), (3,))
    assert nodes.in_sites(["", "", "", ""]) == nodes


def test_a_mean_of_nodes_is_not_taken_of_sites() -> None:
    with pytest.raises(ConfigurationError, match="needs what each node made of its own"):
        Hierarchical(inter=Hierarchical(inter=Compressed(OneBit(), adam=Adam())))
