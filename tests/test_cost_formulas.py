"""The closed forms, among themselves and against the limits they must have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commopt.cost import formulas
from commopt.cost.formulas import PRIMITIVES, Link, StageTimes, best_chunks, overlapped_us, pipelined_us, ring
from commopt.groups import WireModel

S = 64 * 2**20
FAST = Link(2, 1e-5)
SLOW = Link(20, 1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("primitive", [name for name in PRIMITIVES if name not in ("reduce", "broadcast")])
def test_a_ring_carries_what_the_wire_model_counts(primitive: str, ranks: int) -> None:
    sent = [getattr(WireModel(rank, range(ranks)), primitive)(S) for rank in range(ranks)]
    assert ring(primitive, ranks).volume * S == pytest.approx(sum(each.inter for each in sent) / ranks, rel=1e-6)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    for ranks in (2, 5, 16):
        both = ring("reduce_scatter", ranks).time_us(S, SLOW) + ring("all_gather", ranks).time_us(S / ranks, SLOW)
        assert formulas.ring_us(S, ranks, SLOW) == pytest.approx(both)


def test_a_binomial_tree_has_as_many_rounds_as_doublings() -> None:
    assert [ring("broadcast", ranks).steps for ranks in (2, 3, 4, 5, 8, 9)] == [1, 2, 2, 3, 3, 4]


def test_unknown_primitives_have_no_ring() -> None:
    with pytest.raises(ValueError, match="'scan' is none of all_reduce"):
        ring("scan", 2)


def test_a_ring_over_nodes_of_one_rank_is_a_ring() -> None:
    assert formulas.ring_over_nodes_us(S, 4, 1, FAST, SLOW) == pytest.approx(formulas.ring_us(S, 4, SLOW))
    assert formulas.ring_over_nodes_us(S, 1, 4, FAST, SLOW) == pytest.approx(formulas.ring_us(S, 4, FAST))


def test_halving_and_doubling_has_fewer_steps_for_the_same_bytes() -> None:
    assert formulas.halving_doubling_us(S, 16, Link(0, 1)) == pytest.approx(formulas.ring_us(S, 16, Link(0, 1)))
    assert formulas.halving_doubling_us(S, 16, Link(1, 0)) == 8
    assert formulas.halving_doubling_us(0, 17, Link(1, 0)) == 10
    assert formulas.halving_doubling_us(S, 17, Link(0, 1)) == pytest.approx(2 * S * 15 / 16 + 2 * S)


def test_trees_win_on_latency_and_lose_on_bandwidth() -> None:
    latency, bandwidth = Link(1, 0), Link(0, 1)
    assert formulas.tree_us(S, 32, 1, latency, latency) == 10
    assert formulas.tree_us(S, 32, 8, latency, latency) < formulas.ring_us(S, 256, latency)
    assert formulas.tree_us(S, 32, 1, bandwidth, bandwidth) > formulas.ring_us(S, 32, bandwidth)
    assert formulas.tree_us(S, 1, 8, bandwidth, Link(0, 9)) == pytest.approx(2 * S / 0.78)
    assert formulas.one_shot_us(S, 8, latency) == 3
    assert formulas.one_shot_us(S, 8, bandwidth) == 7 * S


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 8), (3, 5)])
def test_the_forms_of_a_hierarchy(nodes: int, per_node: int) -> None:
    shared = Link(SLOW.alpha_us, per_node * SLOW.beta_us_per_byte)  # one port for the node
    n, m = nodes, per_node
    expected = 2 * (m - 1) * 2 + 2 * (m - 1) / m * S * 1e-5 + 2 * (n - 1) * 20 + 2 * (n - 1) / n * S * 1e-3
    assert formulas.sharded_us(S, n, m, FAST, shared) == pytest.approx(expected)
    slower = formulas.all_reduced_us(S, n, m, FAST, shared)
    assert slower - expected == pytest.approx(ring("reduce_scatter", m).time_us(S, FAST))
    rounds = ring("broadcast", m).steps
    leader = (2 * (m - 1) + rounds) * 2 + (2 * (m - 1) / m + rounds) * S * 1e-5 + formulas.ring_us(S, n, SLOW)
    assert formulas.leader_us(S, n, m, FAST, SLOW) == pytest.approx(leader)


def test_each_level_of_blueconnect_sees_less() -> None:
    beta = Link(0, 1)
    three = formulas.levels_us(S, [(4, beta), (2, beta), (8, beta)])
    assert three == pytest.approx(S * (2 * 3 / 4 + (2 * 1 / 2) / 4 + (2 * 7 / 8) / 8))
    assert three == pytest.approx(formulas.ring_us(S, 64, beta))  # on equal links nothing is gained but latency
    assert formulas.levels_us(0, [(4, Link(1, 0)), (2, Link(1, 0)), (8, Link(1, 0))]) == 2 * (3 + 1 + 7)


def test_hierarchy_spares_the_network_as_many_bytes_as_it_should() -> None:
    nothing = Link(0, 0)
    for nodes, per_node, saved in ((2, 8, 1.875), (4, 8, 31 / 24), (32, 8, 255 / 248)):
        shared = Link(0, per_node * 1.0)
        flat = formulas.ring_over_nodes_us(S, nodes, per_node, nothing, Link(0, 1))
        assert flat / formulas.sharded_us(S, nodes, per_node, nothing, shared) == pytest.approx(saved)


# ------------------------------------------------------------------------------------------------- chunks

TIMES = st.floats(0, 1e4)


def test_one_chunk_is_the_sum_of_its_stages() -> None:
    stage = StageTimes(3, 10, 4)
    assert pipelined_us(stage, 1) == overlapped_us([stage]) == 17
    assert overlapped_us([]) == 0


def test_where_the_network_is_the_bottleneck_only_the_ends_show() -> None:
    stage = StageTimes(3, 10, 4)
    assert pipelined_us(stage, 5) == overlapped_us([stage] * 5) == 3 + 50 + 4


def test_chunks_take_the_way_they_go() -> None:
    # up(1) 0-8, up(2) 8-16, down(1) 18-26 (it is across at 18), up(3) 26-34, across(3) 34-44, down(3) 44-52.
    assert overlapped_us([StageTimes(8, 10, 8)] * 3) == 52


def test_where_the_node_is_the_bottleneck_the_network_hides() -> None:
    stage = StageTimes(10, 3, 10)
    assert pipelined_us(stage, 5) == overlapped_us([stage] * 5) == 100


@settings(max_examples=80, deadline=None)
@given(up=TIMES, across=TIMES, down=TIMES, chunks=st.integers(1, 16))
def test_two_lanes_are_between_the_bound_and_one_lane(up: float, across: float, down: float, chunks: int) -> None:
    stage = StageTimes(up, across, down)
    real = overlapped_us([stage] * chunks)
    assert pipelined_us(stage, chunks) <= real * (1 + 1e-9)
    assert real <= chunks * sum(stage) * (1 + 1e-9)
    if across >= up + down:
        assert real == pytest.approx(pipelined_us(stage, chunks))


def test_chunks_must_gain_three_percent() -> None:
    assert best_chunks(lambda chunks: 100 / chunks) == 16
    assert best_chunks(lambda chunks: 100 / chunks, most=4) == 4
    assert best_chunks(lambda chunks: 100 - 0.1 * chunks) == 1
    assert best_chunks({1: 100.0, 2: 90.0, 3: 88.0, 4: 87.9}.__getitem__, most=4) == 2


def test_nothing_is_gained_by_chunks_over_nvlink_and_25_gbit_per_s() -> None:
    """cut into k, stages keep their latency; a fast node leaves nothing to hide."""

    def stage(chunks: int) -> StageTimes:
        up = ring("reduce_scatter", 8).time_us(25e6 / chunks, Link(3, 1e-3 / 200))
        down = ring("all_gather", 8).time_us(25e6 / 8 / chunks, Link(3, 1e-3 / 200))
        across = formulas.ring_us(25e6 / 8 / chunks, 4, Link(25, 8 * 8e-3 / 25))
        return StageTimes(up, across, down)

    assert best_chunks(lambda chunks: pipelined_us(stage(chunks), chunks)) == 1
