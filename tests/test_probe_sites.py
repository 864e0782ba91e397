# SPDX-License-Identifier: Apache-2.0
"""Sites found from the rates of pairs, on networks that are not there: trees of rates, noise, time that is over."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commopt.probe.matchings import across, alone, inside, pair, tournament
from commopt.probe.network import described, level_text, network_lines
from commopt.probe.network import settings as lines_to_set
from commopt.probe.pairs import predicted_s, rate_gbps
from commopt.probe.sites import FoundSites, find_sites, most_matchings
from tests.model_network import ModelNetwork, Part

WIDE = 1e6  # Gb/s, of what limits nothing
Division = frozenset[frozenset[int]]


def switch(nodes: int, uplink: float = WIDE, gbps: float = 1.0, us: float = 20.0) -> Part:
    """Nodes that are equally near, behind one uplink."""
    return Part(uplink, tuple(Part(gbps) for _ in range(nodes)), us)


def joined(*parts: Part) -> Part:
    return Part(WIDE, parts)


def network_of(root: Part, seed: int = 0, **how: float) -> ModelNetwork:
    order = [*range(root.count)]
    random.Random(seed).shuffle(order)
    return ModelNetwork(root, order, seed=seed, **how)  # type: ignore[arg-type]


def found_in(root: Part, seed: int = 0, **how: float) -> tuple[FoundSites, ModelNetwork]:
    network = network_of(root, seed, **how)
    found = find_sites(root.count, network.measure)
    assert found.matchings == len(network.matchings) <= most_matchings(root.count)
    return found, network


def divisions(paths: Sequence[tuple[int, ...]], depth: int) -> list[Division]:
    """Return the division of nodes 0, 1, ... at each depth, whatever its groups are called."""
    levels = []
    for level in range(1, depth + 1):
        groups: dict[tuple[int, ...], set[int]] = {}
        for node, path in enumerate(paths):
            groups.setdefault(path[:level], set()).add(node)
        levels.append(frozenset(map(frozenset, groups.values())))
    return levels


def is_true(found: FoundSites, network: ModelNetwork) -> bool:
    depth = max(map(len, network.paths.values())) - 1
    true = divisions([network.paths[node] for node in sorted(network.paths)], depth)
    return len(found.levels) == depth and divisions(found.paths, depth) == true


# ------------------------------------------------------------------------------ who meets whom


@pytest.mark.parametrize("nodes", [4, 5, 8, 9, 64])
def test_in_a_tournament_every_pair_meets_once_and_nobody_twice_at_a_time(nodes: int) -> None:
    for turn in range(2):
        matchings = list(tournament(nodes, turn))
        assert len(matchings) == nodes - 1 + nodes % 2
        assert sorted(pair for matching in matchings for pair in matching) == list(combinations(range(nodes), 2))
        for matching in matchings:
            assert len({node for pair in matching for node in pair}) == 2 * len(matching) == nodes - nodes % 2
    assert list(tournament(nodes, 0)) != list(tournament(nodes, 1))


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 9))
def test_pairs_across_and_inside_are_as_many_as_there_can_be(counts: list[int], turn: int) -> None:
    nodes = iter(random.Random(turn).sample(range(99), sum(counts)))
    groups = [tuple(next(nodes) for _ in range(count)) for count in counts]
    group_of = {node: place for place, group in enumerate(groups) for node in group}
    crossing, within, lone = across(groups, turn), inside(groups, turn), alone(groups, turn)
    for pairs in (crossing, within, lone):
        assert len({node for pair in pairs for node in pair}) == 2 * len(pairs)
    assert all(group_of[a] != group_of[b] for a, b in (*crossing, *lone))
    assert all(group_of[a] == group_of[b] for a, b in within)
    assert len(crossing) == min(sum(counts) // 2, sum(counts) - max(counts))
    assert len(within) == sum(count // 2 for count in counts)
    assert len(lone) == len(groups) // 2


# ------------------------------------------------------------------------------ trees of rates

SHARE = st.floats(3.0, 12.0)  # how many times more the nodes of a site can send than its uplink carries


@st.composite
def one_level(draw: st.DrawFn) -> Part:
    gbps, share = draw(st.floats(0.01, 400)), draw(SHARE)
    counts = draw(st.lists(st.integers(2, 6), min_size=2, max_size=6))
    return joined(*(switch(count, count * gbps / share, gbps) for count in counts))


@st.composite
def two_levels(draw: st.DrawFn) -> Part:
    count, racks, rack, site = draw(st.integers(2, 4)), draw(st.integers(2, 3)), draw(SHARE), draw(SHARE)
    uplink = count / rack
    sites = draw(st.integers(2, 3))
    return joined(*(Part(racks * uplink / site, (switch(count, uplink),) * racks) for _ in range(sites)))


@given(one_level() | two_levels(), st.integers(0, 99))
@example(joined(switch(6, 2.0), switch(6, 2.0), switch(3, 1.0)), 0)  # the first two look like one site beside the third
@example(joined(switch(6, 2.0), switch(6, 2.0)), 46)  # few matchings, whose pairs across are often few
@example(joined(switch(6, 2.0), switch(2, 2 / 3), switch(2, 2 / 3), switch(6, 2.0)), 57)
@settings(max_examples=40, deadline=None)
def test_the_tree_that_is_found_is_the_one_that_is_there(root: Part, seed: int) -> None:
    found, network = found_in(root, seed, noise=0.03, disturbed=0.0)
    assert is_true(found, network)
    assert found.complete
    for level in found.levels:
        assert level.inside_gbps > 1.5 * level.across_gbps
        assert level.alone_gbps > 0.8 * level.across_gbps


@given(st.lists(st.sampled_from([1.0, 10.0, 25.0]), min_size=4, max_size=20), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_in_a_network_without_sites_none_are_found(rates: list[float], seed: int) -> None:
    """Whatever cards its nodes have."""
    found, _ = found_in(joined(*map(Part, rates)), seed, noise=0.08, disturbed=0.02)
    assert found.levels == ()
    assert set(found.paths) == {()}
    assert found.complete


@pytest.mark.parametrize(
    "root",
    [
        joined(switch(3, 0.1), switch(3, 0.1)),
        joined(switch(4, 1.0), switch(4, 1.0)),
        joined(switch(3, 1.0), switch(3, 1.0)),
        joined(*(switch(4, 1.0) for _ in range(8))),
        joined(*(Part(0.5, (switch(4, 1.0),) * 4) for _ in range(2))),
    ],
    ids=["two sites", "4 : 1", "3 : 1, odd", "8 racks", "sites of racks"],
)
def test_sites_are_found_beside_other_traffic(root: Part) -> None:
    """One transfer in twelve is two to five times slower, and all others differ by a tenth."""
    found = [is_true(*found_in(root, seed, noise=0.1, disturbed=0.08)) for seed in range(8)]
    assert sum(found) >= 7


def test_racks_whose_uplink_carries_one_node_look_fast_to_a_pair_alone() -> None:
    found, network = found_in(joined(switch(4, 1.0), switch(4, 1.0)), noise=0.02, disturbed=0.0)
    a, b = (next(node for node, path in network.paths.items() if path[0] == rack) for rack in (0, 1))
    assert network.shares((pair(a, b),)) == {pair(a, b): 1.0}
    (level,) = found.levels
    assert (level.name, level.counts, level.shared) == ("site", (4, 4), True)
    assert level.inside_gbps == pytest.approx(1.0, rel=0.1)
    assert level.across_gbps == pytest.approx(0.25, rel=0.1)
    assert level.alone_gbps == pytest.approx(1.0, rel=0.1)


def test_a_slow_node_is_no_site() -> None:
    for seed in range(5):
        found, network = found_in(joined(Part(0.1), *(Part(1.0) for _ in range(7))), seed)
        assert found.levels == ()
        assert found.slow == (network.order[0],)
    found, network = found_in(joined(Part(0.1, (Part(1.0),)), switch(3)))
    assert (found.levels, found.slow) == ((), (network.order[0],))


def test_a_slow_node_of_a_site_does_not_hide_the_site() -> None:
    slow = Part(0.08, (Part(0.02), Part(1.0), Part(1.0), Part(1.0)))
    found, network = found_in(joined(slow, switch(4, 0.08)), noise=0.02, disturbed=0.0)
    fast = [node for node in range(8) if node != network.order[0]]
    assert found.slow == (network.order[0],)
    assert len({found.paths[node] for node in fast}) == 2
    assert all(
        (found.paths[a] == found.paths[b]) == (network.paths[a][0] == network.paths[b][0])
        for a, b in combinations(fast, 2)
    )


def test_sites_that_are_only_far_are_found_by_latency() -> None:
    found, network = found_in(joined(switch(3, us=4000.0), switch(3, us=4000.0)), disturbed=0.0)
    assert is_true(found, network)
    (level,) = found.levels
    assert level.across_us > 50 * level.inside_us
    assert "latency" in level_text(level)
    near, _ = found_in(joined(switch(3, us=400.0), switch(3, us=400.0)), disturbed=0.0)
    assert near.levels == (), "less than a millisecond makes nobody far"


# ------------------------------------------------------------------------------ time


@pytest.mark.parametrize(
    "root",
    [
        switch(64),
        joined(switch(32, 8.0), switch(32, 8.0)),
        joined(*(switch(4, 1.0) for _ in range(16))),
        joined(*(Part(0.8, (switch(4, 1.0),) * 4) for _ in range(4))),
    ],
    ids=["none", "2 sites", "16 racks", "4 sites of 4 racks"],
)
def test_64_nodes_take_less_than_20_seconds(root: Part) -> None:
    assert predicted_s(most_matchings(64)) < 20
    found, network = found_in(root, disturbed=0.0)
    assert found.matchings >= 63
    assert predicted_s(found.matchings) < 20
    assert found.complete
    assert is_true(found, network) or (not found.levels and root == switch(64))


def test_fewer_than_four_nodes_have_no_sites_and_nothing_is_measured() -> None:
    for nodes in (1, 2, 3):
        found, network = found_in(switch(nodes))
        assert (found.paths, network.matchings) == (((),) * nodes, [])


@pytest.mark.parametrize("most", [0, 3, 30, 33])
def test_where_time_is_over_it_is_said_and_nothing_is_made_up(most: int) -> None:
    network = network_of(joined(switch(3, 0.1), switch(3, 0.1)))
    network.most = most
    found = find_sites(6, network.measure)
    assert (found.complete, found.levels) == (False, ())
    text = described(found, tuple("abcdef"), 1.0, 1.0)
    assert f"after {most} matchings of pairs; " in text.unmeasured
    assert "not all was looked into" in next(network_lines(text))


def test_equal_rates_give_equal_answers() -> None:
    root = joined(*(switch(4, 1.0) for _ in range(4)))
    assert found_in(root, 3)[0] == found_in(root, 3)[0]


def test_the_rate_of_a_pair_is_that_of_its_long_messages_but_for_the_first_and_the_disturbed() -> None:
    begins = [(1000, 0.05), (2000, 0.05)]
    assert rate_gbps([*begins, *[(1_000_000, 0.02)] * 6, (1_000_000, 0.09)]) == pytest.approx(0.4)
    assert rate_gbps([(1_000_000, 0.5)]) == pytest.approx(0.016)


# ------------------------------------------------------------------------------ text


def test_what_was_found_is_said_with_the_lines_to_set() -> None:
    root = joined(*(Part(0.2, (switch(2, 0.6),) * 2) for _ in range(2)))
    network = ModelNetwork(root, range(8), noise=0.02, disturbed=0.0)
    found = described(find_sites(8, network.measure), tuple("abcdefgh"), 3.0, 20.0)
    assert [level.name for level in found.levels] == ["site", "rack"]
    assert list(lines_to_set(found)) == [
        "export COMMOPT_SITE=site0/rack0   # on a, b",
        "export COMMOPT_SITE=site0/rack1   # on c, d",
        "export COMMOPT_SITE=site1/rack0   # on e, f",
        "export COMMOPT_SITE=site1/rack1   # on g, h",
    ]
    said = list(network_lines(found))
    assert said[0].startswith("Sites: 2 sites of 4 nodes: ")
    assert said[1].startswith("Sites: 4 racks of 2 nodes: ")
    assert said[-1] == "Nobody told these sites. Set this on the hosts, and probe again:"
    uniform = described(find_sites(4, network_of(switch(4)).measure), tuple("abcd"), 3.0, 20.0)
    assert next(network_lines(uniform)).startswith("Sites: none found; all nodes are equally near (")
    assert list(lines_to_set(uniform)) == []
