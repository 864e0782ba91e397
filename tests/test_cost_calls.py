# SPDX-License-Identifier: Apache-2.0
"""What aggregators say they do, on clusters that need no process group, and the bytes that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from unittest.mock import patch

import pytest
import torch

from commopt import Cast, Communicator, Compressed, Flat, Hierarchical, Layout, PowerSGD, Quantize
from commopt.aggregate import Action, Aggregator, Buffer, Call, LocalWork, call
from commopt.errors import ConfigurationError
from commopt.groups import Membership, Team, TeamShape, WireBytes
from tests.catalogue import LAYOUTS, aggregators
from tests.overheard import overheard
from tests.ranks import run

NUMEL = 3 * 2**14
LAYOUT = Layout.anonymous(NUMEL)
S = 4 * NUMEL
MODEL = Layout.of_parameters([("a.weight", (300, 200)), ("a.bias", 300), ("b.weight", (64, 32, 3, 3)), ("c", (7, 5))])
NCCL = {"cuda": "nccl"}
SHAPES = [(1,), (4,), (1, 1), (1, 1, 1), (2, 2), (2, 2, 2), (4, 4), (2, 1), (3, 1, 2)]


def calls(aggregator: Aggregator, nodes: Sequence[int], rank: int = 0, layout: Layout = LAYOUT) -> tuple[Action, ...]:
    return aggregator.calls(Buffer(layout, torch.float32), TeamShape.of(nodes, rank))


def summary(steps: Sequence[Action]) -> list[tuple[str, str, int]]:
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


# --------------------------------------------------------------------------------------------------- calls


def test_the_forms_of_hierarchical() -> None:
    inside = ("inter", "all_reduce", S // 2)
    gather = ("intra", "all_gather", S // 2)
    sharded = [("intra", "reduce_scatter", S), inside, gather]
    assert summary(calls(Hierarchical(form="reduce_scatter"), (2, 2))) == sharded
    leader = [("intra", "reduce", S), ("inter", "all_reduce", S), ("intra", "broadcast", S)]
    assert summary(calls(Hierarchical(form="leader"), (2, 2))) == leader
    assert summary(calls(Hierarchical(form="leader"), (2, 2), rank=1)) == [leader[0], leader[2]]
    assert summary(calls(Hierarchical(), (2, 2))) == leader
    assert summary(Hierarchical().calls(Buffer(LAYOUT, torch.float32), TeamShape.of((2, 2), 0, NCCL))) == sharded


def test_compression_is_work_before_between_and_after() -> None:
    row, name = Cast().payload_nbytes(NUMEL // 4), repr(Cast())
    assert calls(Compressed(Cast()), (4,)) == (
        LocalWork("encode", name, S),
        Call("world", "all_to_all", 4 * row),
        LocalWork("recode", name, S),
        Call("world", "all_gather", row),
        LocalWork("decode", name, S),
    )
    whole = Cast().payload_nbytes(NUMEL)
    pair = (LocalWork("encode", name, S), Call("world", "all_gather", whole), LocalWork("decode", name, 2 * S))
    assert calls(Compressed(Cast()), (2,)) == pair


def test_there_is_work_before_every_message_of_factors() -> None:
    steps = calls(PowerSGD(2), (2,), layout=MODEL)
    rows, cols, dense = 300 + 64, 200 + 32 * 9, 300 + 7 * 5
    first = Call("world", "all_reduce", 4 * (2 * rows + dense))
    factor, refresh = (LocalWork(kind, "PowerSGD(2)", 4 * (300 * 200 + 64 * 32 * 9)) for kind in ("factor", "refresh"))
    assert steps == (factor, first, refresh, Call("world", "all_reduce", 8 * cols))


def test_factors_cross_in_half_their_bytes_between_few_nodes_over_gloo() -> None:
    rows, cols, dense = 300 + 64, 200 + 32 * 9, 300 + 7 * 5
    gathered = [("world", "all_gather", 4 * rows + 4 * dense), ("world", "all_gather", 4 * cols)]
    summed = [("world", "all_reduce", 4 * (2 * rows + dense)), ("world", "all_reduce", 8 * cols)]
    for count, sent in ((2, gathered), (4, gathered), (5, summed)):
        assert summary(calls(PowerSGD(2), (1,) * count, layout=MODEL)) == sent
    assert summary(calls(PowerSGD(2), (2, 2), layout=MODEL)) == summed
    team = TeamShape.of((1, 1), 0, NCCL)
    assert summary(PowerSGD(2).calls(Buffer(MODEL, torch.float32), team)) == summed
    leaders = calls(Hierarchical(PowerSGD(2)), (2, 2), layout=MODEL)
    inside = [("intra", "reduce", summed[0][2]), ("inter", "all_gather", gathered[0][2])]
    assert summary(leaders)[:3] == [*inside, ("intra", "broadcast", summed[0][2])]
    other = calls(Hierarchical(PowerSGD(2)), (2, 2), rank=1, layout=MODEL)
    assert [each for each in leaders if each not in other] == [each for each in leaders if "inter" in str(each)]


def test_a_buffer_that_does_not_divide_is_copied() -> None:
    steps = calls(Hierarchical(form="reduce_scatter"), (3, 3), layout=Layout.anonymous(1000))
    assert [each for each in steps if isinstance(each, LocalWork)] == [LocalWork("copy", "", 4000)] * 2
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
        for numel, dtype in ((NUMEL, torch.float32), (1001, torch.float32), (1001, torch.bfloat16)):
            made: list[Call] = []

            def listen(team: Team, primitive: str, nbytes: int, roots: list[int], into: list[Call] = made) -> None:
                into.extend(call(team, primitive, nbytes, *roots))

            with patch.object(Membership, "compare_call"), overheard(listen):
                communicator.all_reduce(torch.ones(numel, dtype=dtype), aggregator=aggregator)
            steps = aggregator.calls(Buffer(Layout.anonymous(numel), dtype), team)
            for level in ("world", "intra", "inter"):
                promised = [each for each in steps if isinstance(each, Call) and each.level == level]
                if promised != [each for each in made if each.level == level]:
                    differences.append(
                        f"rank {rank}, {aggregator}, {numel} x {dtype}: {promised} promised, {made} made"
                    )
    return differences


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_calls_are_what_is_called(layout: str) -> None:
    world_size, nodes = LAYOUTS[layout]
    differences = [each for mine in run(compare, world_size, nodes=nodes) for each in mine]
    assert not differences, "\n".join(differences)
