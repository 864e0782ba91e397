# SPDX-License-Identifier: Apache-2.0
"""The collectives of commopt.sharded over a team, without FSDP: right answers, nothing lost, bytes as they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from commopt import (
    DGC,
    Adam,
    Auto,
    Cast,
    Compressed,
    Feedback,
    Flat,
    Hierarchical,
    LocalSGD,
    OneBit,
    PowerSGD,
    Quantize,
)
from commopt.aggregate import Action, Aggregator, Buffer, Call, context_for
from commopt.compress import Compressor
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext, ResidualStore, Scratch
from commopt.groups import Team, TeamShape, WireBytes, join
from commopt.sharded.all_gather import AllGather, Weights
from commopt.sharded.layouts import Part
from commopt.sharded.reduce_scatter import ReduceScatter
from commopt.sharded.shards import Parts, shard_of
from tests.overheard import overheard
from tests.ranks import run

WORLD = 4
NODES: dict[str, Any] = {
    "two of two": (2, 2),
    "one each": (1, 1, 1, 1),
    "interleaved": ((0, 2), (1, 3)),
    "one node": (4,),
}
# Uneven everywhere: a matrix and a vector of which some ranks have less, one that is on one rank only.
SHAPES = [("a.weight", (33, 170)), ("a.bias", (33,)), ("b.weight", (64, 64)), ("b.norm", (2,))]
STEPS = 6


def parts_of(rank: int, size: int = WORLD) -> Parts:
    parts = []
    for name, shape in SHAPES:
        padded = -(-shape[0] // size) * shape[1] if len(shape) > 1 else -(-shape[0] // size)
        parts.append(Part(name, shape, shape, 0, padded).of(rank, size))
    return tuple(parts)


def padded(whole: dict[str, Tensor], size: int = WORLD) -> Tensor:
    """Return [size, n] as FSDP lays gradients out."""
    rows = []
    for part in parts_of(0, size):
        flat = torch.zeros(part.padded * size)
        flat[: whole[part.name].numel()] = whole[part.name].view(-1)
        rows.append(flat.view(size, -1))
    return torch.cat(rows, 1)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(100 * step + rank)
    return {name: torch.randn(shape, generator=draws) * (1 + rank) for name, shape in SHAPES}


def order_of(team: Team) -> tuple[int, ...]:
    return team.ranks


def real(shard: Tensor, rank: int) -> Tensor:
    """Return a shard without its padding."""
    own = shard_of(parts_of(rank), rank, WORLD)
    return torch.cat([shard[begin:end] for begin, end in own.spans_of(own.layout)])


# ------------------------------------------------------------------------------------------- gradients

AGGREGATORS: dict[str, Aggregator] = {
    "flat": Flat(),
    "hierarchical": Hierarchical(),
    "8 bits": Hierarchical(Compressed(Quantize(bits=8))),
    "2 bits": Hierarchical(Compressed(Quantize(bits=2), dense=("*.bias",))),
    "one bit": Hierarchical(Compressed(OneBit(block=64))),
    "cast": Hierarchical(Compressed(Cast(torch.bfloat16))),
    "stochastic": Hierarchical(Compressed(Quantize(bits=4, rounding="stochastic"))),
    "no feedback": Hierarchical(Compressed(Quantize(bits=8), feedback=None)),
    "half residuals": Hierarchical(Compressed(Quantize(bits=4), feedback=Feedback(dtype=torch.bfloat16))),
    "all ranks": Compressed(Quantize(bits=4)),
    "warm-up": Hierarchical(Compressed(Quantize(bits=4, start_step=2))),
}


def reduce_many(rank: int, world: int, aggregator: Aggregator, dtype: torch.dtype) -> dict[str, Any]:
    """Return what one rank got in all steps, what it still owes, and which collectives it called and had announced."""
    team = join(None, None, 60).team
    scatter, store, parts = ReduceScatter(aggregator, team, order_of(team)), ResidualStore(), parts_of(rank)
    heard: list[Any] = []
    said: list[Any] = []
    outputs = []
    for step in range(STEPS):
        source = padded(gradients(rank, step)).to(dtype).view(-1)
        layout = scatter.layout(parts)
        store.transaction.begin_step()
        context = context_for(aggregator, layout, team, store, step, 0, team.ranks[team.rank])
        output = torch.full((source.numel() // world,), torch.nan, dtype=dtype)
        now: list[Any] = []
        store.beside = WireBytes()
        with overheard(lambda team, what, nbytes, _, now=now: now.append((team, what, nbytes))):  # type: ignore[misc]
            scatter(output, source, parts, 1 / world, context)
        if store.beside != WireBytes():  # in the first step, in which ranks tell which elements rest
            asked, what, nbytes = now.pop(-2)
            assert getattr(asked.wire, what)(nbytes) == store.beside
        heard += [(team.level, what, nbytes) for team, what, nbytes in now]
        store.transaction.end_bucket((), last=True)
        calls = [each for each in scatter.calls(parts, dtype, step) if isinstance(each, Call)]
        said += [(each.level, each.primitive, each.nbytes) for each in calls]
        outputs.append(real(output, rank).double())
    owed = {}
    for slot in store.residuals():
        for piece, begin in zip(slot.layout.pieces, slot.layout.offsets, strict=True):
            owed[str(piece)] = slot.values[begin : begin + piece.numel].double()
    return {"outputs": outputs, "owed": owed, "heard": heard, "said": said, "dropped": int(store.transaction.dropped)}


def check_reduction(
    aggregator: Aggregator, nodes: Any, dtype: torch.dtype = torch.float32, sites: tuple[str, ...] | None = None
) -> None:
    results = run(reduce_many, WORLD, aggregator, dtype, nodes=nodes, sites=sites)
    hierarchical = isinstance(aggregator, Hierarchical)
    exact = aggregator.lossless or (nodes == (4,) and hierarchical)
    means = [
        torch.stack([padded(gradients(rank, step)).to(dtype).double() for rank in range(WORLD)]).mean(0)
        for step in range(STEPS)
    ]
    numel = sum(part.padded for part in parts_of(0)) * WORLD
    per_node = 2 if hierarchical and len(nodes) == 2 else 1
    for rank, result in enumerate(results):
        assert result["heard"] == result["said"]
        assert result["dropped"] == 0
        own = shard_of(parts_of(rank), rank, WORLD)
        truths = [real(each[rank], rank) for each in means]
        for output, truth in zip(result["outputs"], truths, strict=True):
            torch.testing.assert_close(output, truth, rtol=0, atol=1e-6 if exact else 8.0)
        # What the owner has, with what all ranks still owe it, is all that there was.
        owed = [sum(each["owed"].get(str(piece), torch.zeros(1)) for each in results) for piece in own.layout.pieces]
        lost = sum(truths) - sum(result["outputs"])
        if exact or aggregator.residual_paths:
            rounds = 0.05 if "bfloat16" in str(aggregator.__dict__.get("inter")) else 1e-5
            lost = lost - torch.cat(
                [each.expand(piece.numel) for each, piece in zip(owed, own.layout.pieces, strict=True)]
            )
            assert float(lost.abs().max()) < rounds
        assert sum(each.numel() for each in result["owed"].values()) <= numel / per_node


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("name", ["flat", "2 bits"])
def test_gradients_come_to_their_owners_and_nothing_is_lost(name: str, nodes: str) -> None:
    check_reduction(AGGREGATORS[name], NODES[nodes])


@pytest.mark.parametrize("name", sorted(AGGREGATORS.keys() - {"flat", "2 bits"}))
def test_every_aggregator_on_two_nodes(name: str) -> None:
    check_reduction(AGGREGATORS[name], (2, 2))


@pytest.mark.parametrize("name", ["hierarchical", "2 bits"])
def test_in_a_network_with_sites_they_are_added_up_in_each_first(name: str) -> None:
    check_reduction(AGGREGATORS[name], (1, 1, 1, 1), sites=("a", "b", "a", "b"))


def test_gradients_of_16_bits_lose_nothing_either() -> None:
    check_reduction(AGGREGATORS["2 bits"], (2, 2), torch.bfloat16)


def reduce_spoilt(
    rank: int, world: int, aggregator: Aggregator, owner: int, column: int, value: float
) -> tuple[int, bool, bool]:
    """Let an element that rank 0 has for another rank be no number in the second of three steps.

    Return how many steps a rank did not commit, whether the second left its residuals alone, and its last is finite.
    """
    team = join(None, None, 60).team
    scatter, store, parts = ReduceScatter(aggregator, team, order_of(team)), ResidualStore(), parts_of(rank)
    owed, output = [], torch.empty(0)
    for step in range(3):
        source = padded(gradients(rank, step))
        if step == 1 and rank == 0:
            source[owner, column] = value
        store.transaction.begin_step()
        context = context_for(aggregator, scatter.layout(parts), team, store, step, 0, team.ranks[team.rank])
        output = torch.zeros(source.shape[1])
        scatter(output, source.view(-1), parts, 1 / world, context)
        store.transaction.end_bucket((), last=True)
        owed.append(torch.cat([slot.values.clone() for slot in store.residuals()]))
    finite = bool(output.isfinite().all() and owed[-1].isfinite().all())
    return int(store.transaction.dropped), torch.equal(owed[0], owed[1]), finite


@pytest.mark.parametrize(("owner", "value"), [(1, torch.nan), (WORLD - 1, torch.nan), (WORLD - 1, torch.inf)])
@pytest.mark.parametrize("name", [name for name, _ in SHAPES if name != "b.norm"])  # of which the last rank has nothing
@pytest.mark.parametrize("compressor", [Quantize(bits=4), OneBit(block=64), Cast(torch.bfloat16)], ids=repr)
def test_what_is_no_number_is_kept_neither_by_its_sender_nor_by_its_owner(
    compressor: Compressor, name: str, owner: int, value: float
) -> None:
    column = sum(part.padded for part in parts_of(owner)[: [each for each, _ in SHAPES].index(name)])
    aggregator = Compressed(compressor, dense=("*.bias",))
    results = run(reduce_spoilt, WORLD, aggregator, owner, column, value)
    for rank, (dropped, alone, finite) in enumerate(results):
        spoilt = rank in (0, owner)
        assert (dropped, alone, finite) == (int(spoilt), spoilt, True), rank


# ------------------------------------------------------------------------------------------- weights


def gather_many(rank: int, world: int, weights: Weights) -> list[tuple[float, Tensor, Any, Any]]:
    team = join(None, None, 60).team
    gather, scratch, found = AllGather(weights, team, order_of(team), parts_of(rank)), Scratch(), []
    whole = padded(gradients(0, 0))
    heard: list[Any] = []
    for step in range(4):
        whole += 0.01 * padded(gradients(0, step + 1)) * (step < 3)
        source = whole[rank].clone()
        output = torch.full((whole.numel(),), torch.nan)
        heard.clear()
        exact, crosses = gather.is_exact_next, gather.copy is None or step != 3
        with overheard(lambda team, what, nbytes, _: heard.append((team.level, what, nbytes))):
            gather(output, source, scratch, crosses=crosses)
        calls = [each for each in gather.calls(output.dtype, crosses=crosses, exact=exact) if isinstance(each, Call)]
        error = float((output.view(world, -1) - whole).abs().max())
        found.append((error, output, list(heard), [(each.level, each.primitive, each.nbytes) for each in calls]))
    return found


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("difference", [False, True])
def test_weights_come_to_all_ranks_alike(difference: bool, nodes: str) -> None:
    weights = Weights(Quantize(bits=4 if difference else 8), difference=difference, dense=("*.norm",))
    everyone = run(gather_many, WORLD, weights, nodes=NODES[nodes])
    for step in range(4):
        for error, output, heard, said in (found[step] for found in everyone):
            assert heard == said
            torch.testing.assert_close(output, everyone[0][step][1], rtol=0, atol=0)
            if difference:  # the first is exact, and later ones are so to a share of the last change
                assert error <= (0.0 if step == 0 else 0.01)
            else:
                assert error <= 0.02
        if step == 3 and len(NODES[nodes]) == 2:
            assert {level for level, *_ in everyone[0][step][2]} == {"intra"}


def test_weights_that_cannot_travel_are_named() -> None:
    for make, words in [
        (lambda: Weights(8), "needs a Compressor"),  # type: ignore[arg-type]
        (lambda: Weights(Quantize(bits=8, rounding="stochastic")), "rounding='nearest'"),
        (lambda: Weights(Quantize(bits=8, start_step=3)), "for gradients only"),
        (lambda: Weights(DGC()), "for gradients only"),
        (lambda: Weights(difference=True, second_copy=False), "nothing to take the difference to"),
        (lambda: Weights(dense="*.bias"), "must be a tuple"),  # type: ignore[arg-type]
        (lambda: AllGather(Weights(), TeamShape.of((2, 1)), (0, 1, 2), ()), "equally many ranks"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            make()


@pytest.mark.parametrize(
    ("aggregator", "words"),
    [
        (PowerSGD(), "use commopt.Hierarchical"),
        (Hierarchical(PowerSGD()), "2-D mesh"),
        (Compressed(DGC()), "equally long"),
        (Hierarchical(form="leader"), "form=None"),
        (LocalSGD(4), "DDP models only"),
        (Auto(), "DDP models only"),
        (Hierarchical(Compressed(Quantize())), "equally many ranks"),
    ],
    ids=str,
)
def test_aggregators_that_cannot_scatter_are_named(aggregator: Aggregator, words: str) -> None:
    team = TeamShape.of((2, 1) if "equally many" in words else (2, 2))
    with pytest.raises(ConfigurationError, match=words):
        ReduceScatter(aggregator, team, tuple(range(team.size)))


@pytest.mark.parametrize("nodes", [(4,), (2, 2)], ids=str)
def test_directions_of_adam_cannot_be_scattered_on_one_node_either(nodes: tuple[int, ...]) -> None:
    aggregator = Hierarchical(Compressed(OneBit(), adam=Adam()))
    with pytest.raises(ConfigurationError, match="use no adam"):
        ReduceScatter(aggregator, TeamShape.of(nodes), (0, 1, 2, 3))


def test_an_aggregator_that_says_nothing_of_it_refuses_to_scatter_itself() -> None:
    @dataclass(frozen=True, repr=False)
    class Own(Aggregator):
        def all_reduce(self, buffer: Tensor, team: Team, scale: float, context: BufferContext) -> None: ...

        def calls(self, buffer: Buffer, team: TeamShape) -> tuple[Action, ...]:
            return ()

    for aggregator in (Own(), Hierarchical(Own())):
        with pytest.raises(ConfigurationError, match="1-D FSDP2 mesh, where each rank keeps a shard"):
            aggregator.check_reduce_scatter(TeamShape.of((2, 2)))
