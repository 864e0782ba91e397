# SPDX-License-Identifier: Apache-2.0
"""Sampled averages are compared with the exact ones: the same samples on every rank, and every byte of them counted."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from commopt import DGC, Aggregator, Cast, Compressed, Flat, Hierarchical, PowerSGD, Quantize
from commopt.aggregate import Call
from commopt.compress import Exact
from commopt.feedback import Layout
from commopt.feedback.quality import EVERY_STEPS, MAX_SAMPLE_NUMEL, GradientCosine, sample_numel
from commopt.groups import Team, WireBytes
from commopt.lanes import Work
from tests.catalogue import run_on
from tests.feedback_training import NUMELS, Training, Vectors, gradients
from tests.overheard import overheard
from tests.ranks import run


@dataclass(frozen=True, repr=False)
class Halved(Cast):
    """Hands on one element in two: of equal values the cosine with the exact average is 1 / sqrt(2)."""

    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        super().decompress(payload, values, chunk_numel)
        values[1::2] = 0

    def accumulate(self, payloads: Tensor, total: Tensor) -> None:
        super().accumulate(payloads, total)
        total[1::2] = 0


# ------------------------------------------------------------------------------------------- one rank

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("samples", "cosine"),
    [
        ([], None),
        ([([0.0, 0.0], [0.0, 0.0])], None),
        ([([0.0, 0.0], [0.0, 0.0]), ([1.0, -2.0], [3.0, -6.0])], 1.0),
        ([([3.0, 4.0], [3.0, 0.0]), ([INF, 0.0], [1.0, 1.0]), ([1.0, 1.0], [0.0, NAN])], 0.6),
        ([([3e30, 4e30], [3e30, 0.0])], 0.6),  # float32 cannot hold the squares
        ([([3.0, 0.0], [0.0, 5.0]), ([1.0, 2.0], [2.0, 1.0])], 4 / sqrt((0.75 * 9 + 5) * (0.75 * 25 + 5))),  # old fade
    ],
)
def test_the_cosine_of_samples(samples: list[tuple[list[float], list[float]]], cosine: float | None) -> None:
    compared = GradientCosine()
    for exact, result in samples:
        compared.add(torch.tensor(exact), torch.tensor(result))
    assert compared.cosine() == (None if cosine is None else pytest.approx(cosine))


@pytest.mark.parametrize("numel", [1, 2, 2047, 2048, 2049, 6000, 100_000, (1 << 20) + 1])
def test_samples_are_short_and_reach_from_end_to_end(numel: int) -> None:
    sampled = sample_numel(numel)
    assert min(numel, MAX_SAMPLE_NUMEL // 3) <= sampled <= MAX_SAMPLE_NUMEL
    ends = {0, numel - 1 - (numel - 1) % ceil(numel / sampled)}
    buffer, compared = torch.zeros(numel), GradientCosine()
    buffer[list(ends)] = 1.0
    compared.add(torch.ones(sampled), buffer)
    assert compared.cosine() == pytest.approx(sqrt(len(ends) / sampled))


def test_buffers_take_turns_in_every_eighth_step() -> None:
    compared = GradientCosine(first_step=3)
    taken = [(step, number) for step in range(3 + 5 * EVERY_STEPS) for number in range(3) if compared.takes(step)]
    assert taken == [(10, 1), (18, 2), (26, 0), (34, 1), (42, 2)]
    assert not any(GradientCosine(first_step=16).takes(step) for step in range(16))


# ------------------------------------------------------------------------------------------- in training

STEPS = 3 * EVERY_STEPS


def constant_gradients(rank: int, step: int, dtype: torch.dtype) -> Vectors:
    return {name: torch.full((numel,), 1.0 + rank, dtype=dtype) for name, numel in NUMELS.items()}


def watch(rank: int, world_size: int, aggregator: Aggregator, constant: bool) -> float | None:
    chosen = constant_gradients if constant else gradients
    training = Training(rank, world_size, aggregator, chosen=chosen)
    training.comm._registration.watches_cosine = True
    for _ in range(STEPS):
        training.step()
    return training.comm._registration.cosine.cosine()


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
@pytest.mark.parametrize(
    ("aggregator", "constant", "low", "high"),
    [
        (Compressed(Exact(), feedback=None), False, 1 - 1e-9, 1 + 1e-9),
        (Compressed(Halved(torch.bfloat16), feedback=None), True, sqrt(0.5) - 0.01, sqrt(0.5) + 0.01),
        (Compressed(Quantize(8, 64)), False, 0.999, 1.0),
        (Hierarchical(Compressed(Quantize(8, 64))), False, 0.999, 1.0),
        (Compressed(DGC(0.01)), False, 0.01, 0.5),
    ],
    ids=["exact", "halved", "8 bits", "inter 8 bits", "1%"],
)
def test_cosine_in_training(layout: str, aggregator: Aggregator, constant: bool, low: float, high: float) -> None:
    found = run_on(layout, watch, aggregator, constant)
    assert len(set(found)) == 1, "ranks differ"
    assert found[0] is not None
    assert low <= found[0] <= high


def listen_to(rank: int, world_size: int, aggregator: Aggregator, watched: bool) -> list[tuple[int, int]]:
    """Return the step and the bytes of each all_reduce over all ranks."""
    heard: list[tuple[int, int]] = []
    training = Training(rank, world_size, aggregator)

    def listen(team: Team, primitive: str, nbytes: int, roots: list[int]) -> None:
        if team.level == "world" and primitive == "all_reduce":
            heard.append((training.steps, nbytes))

    training.comm._registration.watches_cosine = watched
    with overheard(listen):
        for _ in range(STEPS):
            training.step()
    return heard


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_every_rank_sends_its_samples_in_the_same_steps(layout: str) -> None:
    heard = run_on(layout, listen_to, Hierarchical(Compressed(Quantize(4, 64))), True)
    assert len({tuple(each) for each in heard}) == 1
    assert [step for step, _ in heard[0]] == [7, 15, 23]
    assert len({nbytes for _, nbytes in heard[0]}) == 3, "every bucket has its turn"


def test_who_does_not_ask_is_told_nothing_and_what_is_exact_is_not_compared_with_itself() -> None:
    assert run(listen_to, 2, Compressed(Quantize(8, 64)), False) == [[], []]
    for heard in run(listen_to, 2, Flat(), True):
        assert len({step for step, _ in heard}) == STEPS
        assert all(sum(at == step for at, _ in heard) == 3 for step in range(2, STEPS)), "more than the buckets"


def count_bytes(rank: int, world_size: int) -> tuple[WireBytes, WireBytes, int]:
    """Return what is said to be sent, with several strategies in every step, what was heard, and the samples in it."""
    strategies = [Compressed(Quantize(4, 64)), Hierarchical(PowerSGD(2, start_step=0)), Compressed(DGC(0.25)), Flat()]
    training = Training(rank, world_size, strategies[0])
    registration = training.comm._registration
    world, registration.watches_cosine = registration.client.team, True
    heard, samples, exact = WireBytes(), 0, GradientCosine.exact

    def listen(team: Team, primitive: str, nbytes: int, roots: list[int]) -> None:
        nonlocal heard
        heard += Call(team.level, primitive, nbytes, *roots).wire_bytes(world)

    def sample(cosine: GradientCosine, buffer: Tensor, team: Team, scale: float) -> Tensor:
        nonlocal samples
        samples += 1
        return exact(cosine, buffer, team, scale)

    path, controller = registration, registration.controller
    send = path._send

    def switched(layout: Layout, buffer: Tensor, index: int, *, last: bool) -> Work:
        controller.aggregator = strategies[index % 4]
        return send(layout, buffer, index, last=last)

    with patch.object(path, "_send", switched):
        for _ in range(3):
            training.step()
        before = registration.wire_bytes()
        with overheard(listen), patch.object(GradientCosine, "exact", sample):
            for _ in range(STEPS):
                training.step()
    sent = registration.wire_bytes()
    return WireBytes(sent.intra - before.intra, sent.inter - before.inter), heard, samples


@pytest.mark.parametrize("layout", ["2x2", "2+1", "3"])
def test_samples_are_counted_to_the_byte(layout: str) -> None:
    for said, heard, samples in run_on(layout, count_bytes):
        assert said == heard
        assert samples == STEPS // EVERY_STEPS
