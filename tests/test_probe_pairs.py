# SPDX-License-Identifier: Apache-2.0
"""Pairs of nodes measured on ranks: all ranks get the same, and time that is over ends it on all at once."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from commopt.cluster import EmulatedCluster, EmulatedSites
from commopt.groups import join
from commopt.probe.matchings import Pair, tournament
from commopt.probe.nearness import PairRate
from commopt.probe.network import find_network, looks_for_sites
from commopt.probe.pairs import PairProber
from tests.ranks import run
from topology.network import Network

Results = list[dict[Pair, PairRate]]


def measure(rank: int, world_size: int, budget_s: float) -> Results:
    with patch("commopt.probe.pairs.WINDOW_S", 0.01):
        return PairProber(join(), budget_s).measure(list(tournament(4, 0)))


@pytest.mark.parametrize("nodes", [(1, 1, 1, 1), (2, 1, 1, 2)])
def test_all_ranks_know_what_every_pair_of_nodes_reached(nodes: tuple[int, ...]) -> None:
    everyone = run(measure, sum(nodes), 60.0, nodes=nodes)
    assert all(results == everyone[0] for results in everyone)
    assert [set(result) for result in everyone[0]] == [set(matching) for matching in tournament(4, 0)]
    assert all(seen.gbps > 0 and seen.latency_us > 0 for result in everyone[0] for seen in result.values())


def test_when_time_is_over_no_rank_begins_another_matching() -> None:
    assert run(measure, 5, -1.0, nodes=(2, 1, 1, 1)) == [[]] * 5


def look(rank: int, world_size: int) -> tuple[bool, Network | None]:
    membership = join()
    looks = looks_for_sites(membership)
    with patch("commopt.probe.pairs.WINDOW_S", 0.01):
        return looks, find_network(membership, 60.0) if looks else None


def test_sites_are_looked_for_where_nobody_told_them() -> None:
    found = run(look, 4, nodes=(1, 1, 1, 1))
    assert all(looks and network == found[0][1] for looks, network in found)
    network = found[0][1]
    assert network is not None
    assert (len(network.nodes), network.unmeasured) == (4, "")
    assert run(look, 4, nodes=(1, 1, 1, 1), sites=("a", "a", "b", "b")) == [(False, None)] * 4
    assert run(look, 3, nodes=(1, 1, 1)) == [(False, None)] * 3


@pytest.mark.cluster
@pytest.mark.slow
def test_the_probe_finds_emulated_sites_and_none_where_there_are_none() -> None:
    for sites, told in ((EmulatedSites((3, 3), "20mbit"), 2), (None, 0)):
        with EmulatedCluster(6, 1, "200mbit", sites=sites) as cluster:
            result = cluster.run(["-m", "commopt", "probe", "--only", "sites"], timeout_s=120)
        assert result.returncode == 0, result.stderr
        lines = [line.strip() for line in result.stdout.splitlines() if "COMMOPT_SITE=" in line]
        assert len(lines) == told, result.stdout
        for site, line in enumerate(lines):
            hosts = line.split("# on ")[1].split(", ")
            assert line.startswith(f"export COMMOPT_SITE=site{site} ")
            assert [host[-5:] for host in hosts] == [f"node{node}" for node in range(3 * site, 3 * site + 3)]
