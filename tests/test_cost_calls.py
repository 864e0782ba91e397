"""What aggregators say they do, on clusters that need no process group, and the bytes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil
from unittest.mock import patch

import pytest
import torch

from commopt import Cast, Communicator, Compressed, Flat, Hierarchical, Layout, PowerSGD, Quantize
from commopt.aggregate import Aggregator, Call, Step, Work, call
from commopt.errors import ConfigurationError
from commopt.groups import Team, TeamShape, WireBytes
from tests.catalogue import LAYOUTS, aggregators
from tests.overheard import overheard
from tests.ranks import run

NUMEL = 3 * 2**14
LAYOUT = Layout.anonymous(NUMEL)
S = 4 * NUMEL
MODEL = Layout.of_parameters([("a.weight", (300, 200)), ("a.bias", 300), ("b.weight", (64, 32, 3, 3)), ("c", (7, 5))])
NCCL = {"cuda": "nccl"}
SHAPES = [(1,), (4,), (1, 1), (1, 1, 1), (2, 2), (2, 2, 2), (4, 4), (2, 1), (3, 1, 2)]


def calls(aggregator: Aggregator, nodes: Sequence[int], rank: int = 0, layout: Layout = LAYOUT) -> tuple[Step, ...]:
    return aggregator.calls(layout, torch.float32, TeamShape.of(nodes, rank))


def summary(steps: Sequence[Step]) -> list[tuple[str, str, int]]:
    return [(each.level, each.primitive, each.nbytes) for each in steps if isinstance(each, Call)]


def totals(aggregator: Aggregator, nodes: Sequence[int], layout: Layout = LAYOUT) -> WireBytes:
    sent = WireBytes()
    for rank in range(sum(nodes)):
        sent += aggregator.wire_bytes(layout, torch.float32, TeamShape.of(nodes, rank))
    return sent


# -------------------------------------------------------------------------------------------------- shapes


def test_a_shape_has_the_levels_that_a_team_would_have() -> None:
    shape = TeamShape.of((3, 2), rank=3)
    assert (shape.size, shape.node_count, shape.uniform, shape.ranks_per_node) == (5, 2, False, (3, 2))
    assert shape.intra is not None
    assert shape.inter is not None
    assert (shape.level, shape.intra.level, shape.inter.level) == ("world", "intra", "inter")
    assert (shape.intra.size, shape.intra.rank) == (2, 0)
    assert (shape.inter.size, shape.inter.rank) == (2, 1)
    assert TeamShape.of((3, 2), rank=1).inter is None
    assert TeamShape.of((2, 2, 2), rank=5).at("inter").rank == 2
    assert shape.at("intra") is shape.intra
    assert shape.at("world") is shape


def test_shapes_of_one_level_and_shapes_that_cannot_be() -> None:
    for nodes in ((1,), (4,), (1, 1, 1)):
        shape = TeamShape.of(nodes)
        assert shape.intra is None
        assert shape.inter is None
        with pytest.raises(ConfigurationError, match="no level 'intra'"):
            shape.at("intra")
    wrong: list[tuple[tuple[int, ...], int]] = [((), 0), ((2, 0), 0), ((2, 2), 4), ((2,), -1)]
    for counts, rank in wrong:
        with pytest.raises(ConfigurationError, match="every node needs a rank"):
            TeamShape.of(counts, rank)


def test_a_shape_knows_its_backends() -> None:
    assert TeamShape.of((2, 2)).default_device.type == "cpu"
    shape = TeamShape.of((2, 2), 0, NCCL)
    assert shape.default_device.type == "cuda"
    assert shape.backend(torch.device("cuda")) == "nccl"
    with pytest.raises(ConfigurationError, match="a cpu tensor cannot travel"):
        shape.backend(torch.device("cpu"))


# --------------------------------------------------------------------------------------------------- calls


def test_flat_is_one_all_reduce() -> None:
    assert calls(Flat(), (2, 2)) == (Call("world", "all_reduce", S),)


def test_the_forms_of_hierarchical() -> None:
    inside = ("inter", "all_reduce", S // 2)
    gather = ("intra", "all_gather", S // 2)
    sharded = [("intra", "reduce_scatter", S), inside, gather]
    assert summary(calls(Hierarchical(form="reduce_scatter"), (2, 2))) == sharded
    leader = [("intra", "reduce", S), ("inter", "all_reduce", S), ("intra", "broadcast", S)]
    assert summary(calls(Hierarchical(form="leader"), (2, 2))) == leader
    assert summary(calls(Hierarchical(form="leader"), (2, 2), rank=1)) == [leader[0], leader[2]]
    assert summary(calls(Hierarchical(), (2, 2))) == leader
    assert summary(Hierarchical().calls(LAYOUT, torch.float32, TeamShape.of((2, 2), 0, NCCL))) == sharded


def test_leaders_of_small_nodes_have_nobody_to_call_at_home() -> None:
    assert summary(calls(Hierarchical(), (2, 1), rank=2)) == [("inter", "all_reduce", S)]
    assert totals(Hierarchical(), (2, 1)) == WireBytes(2 * S + S // 2, 2 * S)


def test_one_level_runs_by_itself() -> None:
    assert calls(Hierarchical(intra=Compressed(Cast())), (4,)) == calls(Compressed(Cast()), (4,))
    assert calls(Hierarchical(inter=Compressed(Cast())), (1, 1)) == calls(Compressed(Cast()), (1, 1))


def test_compression_is_work_before_between_and_after() -> None:
    row, name = Cast().payload_nbytes(NUMEL // 4), repr(Cast())
    assert calls(Compressed(Cast()), (4,)) == (
        Work("encode", name, S),
        Call("world", "all_to_all", 4 * row),
        Work("recode", name, S),
        Call("world", "all_gather", row),
        Work("decode", name, S),
    )
    whole = Cast().payload_nbytes(NUMEL)
    pair = (Work("encode", name, S), Call("world", "all_gather", whole), Work("decode", name, 2 * S))
    assert calls(Compressed(Cast()), (2,)) == pair


def test_compression_inside_a_node_decodes_shares_and_encodes_their_sums() -> None:
    steps = calls(Hierarchical(intra=Compressed(Quantize(8))), (2, 2))
    kinds = [each.kind if isinstance(each, Work) else each.primitive for each in steps]
    assert kinds == ["encode", "all_to_all", "decode", "all_reduce", "encode", "all_gather", "decode"]
    assert [each.nbytes for each in steps if isinstance(each, Work)] == [S, S, S // 2, S]


@pytest.mark.parametrize("alternating", [True, False])
def test_there_is_work_before_every_message_of_factors(alternating: bool) -> None:
    steps = calls(PowerSGD(2, alternating=alternating), (1, 1), layout=MODEL)
    rows, cols, dense = 300 + 64, 200 + 32 * 9, 300 + 7 * 5
    first = Call("world", "all_reduce", 4 * (2 * rows + dense))
    factor, refresh = (Work(kind, "PowerSGD(2)", 4 * (300 * 200 + 64 * 32 * 9)) for kind in ("factor", "refresh"))
    second = () if alternating else (refresh, Call("world", "all_reduce", 8 * cols))
    assert steps == (factor, first, *second)


def test_a_buffer_that_does_not_divide_is_copied() -> None:
    steps = calls(Hierarchical(form="reduce_scatter"), (3, 3), layout=Layout.anonymous(1000))
    assert [each for each in steps if isinstance(each, Work)] == [Work("copy", "", 4000)] * 2
    assert summary(steps)[0] == ("intra", "reduce_scatter", 4 * 1002)


def test_every_aggregator_has_calls_on_every_shape() -> None:
    for aggregator, nodes in product(aggregators(), SHAPES):
        try:
            aggregator.check(TeamShape.of(nodes))
        except ConfigurationError:
            continue
        for layout in (LAYOUT, MODEL):
            per_rank = [calls(aggregator, nodes, rank, layout) for rank in range(sum(nodes))]
            for rank, steps in enumerate(per_rank):
                team = TeamShape.of(nodes, rank)
                assert all(each.nbytes > 0 for each in steps)
                assert all(team.at(each.level).size > 1 for each in steps if isinstance(each, Call))
            called = [any(isinstance(each, Call) for each in steps) for steps in per_rank]
            assert all(called) if sum(nodes) > 1 else per_rank == [()]
        assert calls(aggregator, nodes, 0, Layout(())) == ()


def test_first_and_last_node_of_4096_ranks_know_what_they_send() -> None:
    shape = TeamShape.of((8,) * 512)
    sent = [Flat().wire_bytes(LAYOUT, torch.float32, shape.seen_from(rank)) for rank in (0, 7, 4088, 4095)]
    assert [each.inter > 0 for each in sent] == [
        False,
        True,
        False,
        True,
    ]  # only the last rank of a node borders on one
    assert sent[1].inter == pytest.approx(2 * 4095 / 4096 * S, rel=1e-3)
    for aggregator in (Hierarchical(), Hierarchical(inter=Compressed(Quantize(4))), Hierarchical(inter=PowerSGD(2))):
        assert all(aggregator.wire_bytes(LAYOUT, torch.float32, shape.seen_from(rank)).inter for rank in (0, 4088))


# --------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("nodes", [(4,), (1, 1), (2, 2), (4, 4, 4)])
def test_bytes_are_those_of_the_closed_forms(nodes: tuple[int, ...]) -> None:
    n, m = len(nodes), nodes[0]
    ranks = n * m
    flat = totals(Flat(), nodes)
    assert flat.intra + flat.inter == 2 * (ranks - 1) * S
    assert flat.inter == (n * 2 * (ranks - 1) * S // ranks if n > 1 else 0)
    if n == 1 or m == 1:
        assert totals(Hierarchical(), nodes) == flat
        return
    sharded = totals(Hierarchical(form="reduce_scatter"), nodes)
    assert sharded == WireBytes(2 * n * (m - 1) * S, 2 * (n - 1) * S)
    # reduce: (m-1) S and the blocks of all but the root, broadcast: (m-1) S
    leader = totals(Hierarchical(form="leader"), nodes)
    assert leader == WireBytes(n * (2 * (m - 1) * S + (m - 1) * S // m), 2 * (n - 1) * S)
    quantized = totals(Hierarchical(inter=Compressed(Quantize(8))), nodes)
    rows = n if n > 2 else 1
    row = Quantize(8).payload_nbytes(ceil(NUMEL // m / rows / 512) * 512)
    assert quantized.inter == m * n * (n - 1) * row * (2 if n > 2 else 1)


# ------------------------------------------------------------------------------------- against what really happens


def compare(rank: int, world_size: int) -> list[str]:
    communicator = Communicator()
    team = communicator._membership.team
    differences = []
    for aggregator in aggregators():
        try:
            aggregator.check(team)
        except ConfigurationError:
            continue
        for numel in (NUMEL, 1001):
            made: list[Call] = []

            def listen(team: Team, primitive: str, nbytes: int, roots: list[int], into: list[Call] = made) -> None:
                into.extend(call(team, primitive, nbytes, *roots))

            with patch.object(Communicator, "_compare"), overheard(listen):
                communicator.all_reduce(torch.ones(numel), aggregator=aggregator)
            steps = aggregator.calls(Layout.anonymous(numel), torch.float32, team)
            for level in ("world", "intra", "inter"):
                promised = [each for each in steps if isinstance(each, Call) and each.level == level]
                if promised != [each for each in made if each.level == level]:
                    differences.append(f"rank {rank}, {aggregator}, {numel}: {promised} promised, {made} made")
    return differences


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_calls_are_what_is_called(layout: str) -> None:
    world_size, nodes = LAYOUTS[layout]
    differences = [each for mine in run(compare, world_size, nodes=nodes) for each in mine]
    assert not differences, "\n".join(differences)
