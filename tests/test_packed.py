# SPDX-License-Identifier: Apache-2.0
"""Bfloat16 in fewer bytes: every bit comes back, what does not fit follows, and averages are the same bits."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import commopt
from commopt import Aggregator, Cast, Communicator, Compressed, ConfigurationError, Feedback, Hierarchical, Quantize
from commopt.aggregate import Buffer, Call, context_for
from commopt.aggregate.packed import _warn_once
from commopt.feedback import Layout, ResidualStore
from commopt.groups import Team, TeamShape
from commopt.kernels.packing import BLOCK, pack, packed_nbytes, spare_nbytes, unpack
from commopt.schedule.candidates import allowed_families
from tests.catalogue import run_on
from tests.overheard import overheard

PACKED = Compressed(Cast(), feedback=None, packed=True)
NUMELS = (1, 8, 255, 256, 257, 5000, 2**17 - 1, 2**17 + 256, 2**17 + 300)


def some(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def comes_back(values: Tensor) -> bool:
    """Return whether they fit. They are to come back, and nothing else is to change."""
    guard = 0xA5
    nbytes = packed_nbytes(values.numel()), spare_nbytes(values.numel())
    assert sum(nbytes) == 16 + 2 * BLOCK * -(-values.numel() // BLOCK)  # the numbers and a head
    arena = torch.full((sum(nbytes) + 48,), guard, dtype=torch.uint8)
    before, (packed, _, beyond) = values.clone(), arena[16:-16].split([nbytes[0], 16, nbytes[1]])
    more = pack(values, packed, beyond)
    assert torch.equal(values.view(torch.int16), before.view(torch.int16))
    found = torch.full_like(values, 7.0)
    unpack(packed, beyond[:more].clone(), found)
    assert torch.equal(found.view(torch.int16), values.view(torch.int16))
    assert all((each == guard).all() for each in (arena[:16], arena[16 + nbytes[0] :][:16], beyond[more:], arena[-16:]))
    return more == 0


# ------------------------------------------------------------------------------------------- the code


@pytest.mark.parametrize("numel", NUMELS)
def test_what_gradients_are_like_fits(numel: int) -> None:
    assert comes_back(some(numel).bfloat16())
    assert comes_back(torch.zeros(numel).bfloat16())
    assert comes_back(torch.full((numel,), -1e-40).bfloat16())
    assert comes_back(torch.full((numel,), float("nan")).bfloat16())
    if numel > 100 * BLOCK:
        scales = torch.logspace(-30, 30, 7).repeat_interleave(numel // 7 + 1)[:numel]
        assert comes_back((some(numel) * scales).bfloat16())


def test_bytes() -> None:
    assert packed_nbytes(2**20) / 2**21 == pytest.approx(365 / 512, abs=1e-4)
    assert [packed_nbytes(numel) % 16 for numel in NUMELS] == [0] * len(NUMELS)


@pytest.mark.parametrize("listed", [12, 13, 24, 25, 200])
@pytest.mark.parametrize("elsewhere", [0.0, -1e-30, float("inf")])
def test_the_list_goes_on_beyond_the_message_and_gives_way_to_all_exponents(listed: int, elsewhere: float) -> None:
    """One that is larger than all others takes the places of these."""
    values = torch.ones(16, BLOCK)
    values[:, -listed:] = elsewhere
    assert comes_back(values.view(-1).bfloat16()) == (listed == 12 and elsewhere != float("inf"))


def test_every_pattern_of_bits_comes_back() -> None:
    """In order, so that a block has two exponents; at random there are too many."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    assert comes_back(every.view(torch.bfloat16))
    assert not comes_back(every[torch.randperm(2**16)].view(torch.bfloat16))


@settings(max_examples=150, deadline=None)
@given(
    numel=st.integers(1, 1500),
    seed=st.integers(0, 2**31),
    low=st.integers(0, 255),
    span=st.integers(0, 40),
    share=st.floats(0, 1),
)
def test_any_bits_come_back(numel: int, seed: int, low: int, span: int, share: float) -> None:
    """Exponents of one range, and a share of anything: denormal numbers, infinities, NaN."""
    draws = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**16, (numel,), generator=draws)
    near = (low + torch.randint(0, span + 1, (numel,), generator=draws)).clamp(max=255)
    bits = torch.where(torch.rand(numel, generator=draws) < share, bits, bits & 0x807F | near << 7)
    values = torch.where(bits < 2**15, bits, bits - 2**16).to(torch.int16).view(torch.bfloat16)
    fits = comes_back(values)
    if share == 0 and span < 7:
        assert fits


# -------------------------------------------------------------------------------------------- averages


CONTENTS = {
    "normal": lambda rank: some(20_000, rank),
    "one rank's does not fit": lambda rank: some(20_000, rank) * 10.0 ** (60 * (rank == 1) * torch.rand(20_000) - 30),
    "only the sum does not fit": lambda rank: some(20_000) * (1 - 2 * rank) + 10.0 ** (-9 * torch.rand(20_000)),
    "not finite": lambda rank: some(20_000, rank).index_fill_(0, torch.tensor([3, 9000]), float("nan")),
    "zero": lambda rank: torch.zeros(20_000),
    "few": lambda rank: some(37, rank),
}
FORMS: list[Aggregator] = [
    Compressed(Cast(), feedback=None),
    Compressed(Cast()),
    Compressed(Cast(), dense=("b",)),
    Compressed(Cast(rounding="stochastic"), feedback=None),
    Hierarchical(Compressed(Cast(), feedback=None)),
    Hierarchical(Compressed(Cast(), Feedback(decay=0.9))),
]


def packed(aggregator: Aggregator) -> Aggregator:
    if isinstance(aggregator, Hierarchical):
        return Hierarchical(packed(aggregator.inter), aggregator.form)
    assert isinstance(aggregator, Compressed)
    return Compressed(aggregator.compressor, aggregator.feedback, aggregator.dense, aggregator.adam, packed=True)


def differences(rank: int, world_size: int, dtype: str) -> list[str]:
    """Average everything in both ways, twice, and look at every bit, at residuals, and at what is sent."""
    team, found = Communicator()._membership.team, []
    for content, values_of in CONTENTS.items():
        torch.manual_seed(rank)
        values = values_of(rank)
        third = values.numel() // 3  # in bfloat16 what is dense is packed, too: rows have parts of unequal length
        layout = Layout.of_parameters([("a", (values.numel() - third,)), ("b", (third,))])
        for plain in FORMS:
            ends = [averages(each, team, values.to(getattr(torch, dtype)), layout) for each in (plain, packed(plain))]
            if not all(torch.equal(x, y) for x, y in zip(*ends, strict=True)):
                found.append(f"{plain} of {content}")
    return found


def averages(aggregator: Aggregator, team: Team, values: Tensor, layout: Layout) -> list[Tensor]:
    """Return the bits of two averages one after the other, and of what is kept."""
    store, ends = ResidualStore(), []
    for step in range(2):
        buffer = values.clone()
        aggregator.all_reduce(buffer, team, 1 / team.size, context_for(aggregator, layout, team, store, step))
        store.transaction.end_bucket(last=True)
        ends.append(buffer.view(torch.uint8))
    return ends + [slot.values.view(torch.uint8) for slot in store.residuals()]


@pytest.mark.parametrize(
    ("nodes", "dtype"), [("2", "float32"), ("3", "bfloat16"), ("2x2", "float32"), ("2+1", "bfloat16")]
)
def test_the_same_bits_as_without(nodes: str, dtype: str) -> None:
    found = [each for mine in run_on(nodes, differences, dtype) for each in mine]
    assert not found, "\n".join(found)


def lengths(rank: int, world_size: int, content: str) -> tuple[list[int], list[int], list[str]]:
    """Return the bytes that are said to be sent, those that are, and what is told."""
    team, sent, told = Communicator()._membership.team, [], []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("commopt").addHandler(handler)
    values = CONTENTS[content](rank)
    promised = PACKED.calls(Buffer(Layout.anonymous(values.numel()), values.dtype), team)
    _warn_once.cache_clear()

    def listen(team: Team, primitive: str, nbytes: int, roots: Sequence[int]) -> None:
        sent.append(nbytes)

    for _ in range(2):
        sent.clear()
        with overheard(listen):
            averages(PACKED, team, values, Layout.anonymous(values.numel()))
    return [each.nbytes for each in promised if isinstance(each, Call)], sent, told


@pytest.mark.parametrize(("world_size", "calls"), [("2", 1), ("3", 2)])
def test_what_is_promised_is_sent(world_size: str, calls: int) -> None:
    for promised, sent, told in run_on(world_size, lengths, "normal"):
        assert sent == 2 * promised
        assert len(promised) == calls
        assert sum(sent) < 0.75 * (2 * 2 * 20_000 * (1 if calls == 1 else 4 / 3))
        assert told == []


@pytest.mark.parametrize("world_size", ["2", "3"])
def test_what_does_not_fit_follows_and_is_told_once(world_size: str) -> None:
    for promised, sent, told in run_on(world_size, lengths, "one rank's does not fit"):
        assert len(sent) > 2 * len(promised)
        assert sum(sent) <= 2 * (sum(promised) / 0.713 + 600 * (1 if world_size == "2" else 4))  # padding and heads
        assert len(told) == 1
        assert "leave out packed=True (hierarchical_bf16: lossless=True)" in told[0]


# ------------------------------------------------------------------------------------------- who may


def test_only_bfloat16_on_a_cpu() -> None:
    for compressor in (Quantize(8), Cast(torch.float16)):
        with pytest.raises(ConfigurationError, match=r"packed=True\) packs the exponents of bfloat16"):
            Compressed(compressor, packed=True)
    on_gpus = TeamShape.of((2, 2), 0, {"cuda": "nccl"})
    for aggregator in (PACKED, commopt.hierarchical_bf16(lossless=True)):
        with pytest.raises(ConfigurationError, match=r"tensors are on cuda; use packed=False \(.*lossless=False\)"):
            aggregator.check(on_gpus)
    assert allowed_families(commopt.Auto("bf16_packed"), on_gpus) == ()
    names = [family.family for family in allowed_families(commopt.Auto("bf16_packed"), TeamShape.of((2, 2)))]
    assert names == ["bf16_packed", "hierarchical bf16_packed"]
