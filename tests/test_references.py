# SPDX-License-Identifier: Apache-2.0
"""The readable references of PowerSGD and of quantization with error feedback, and the fast paths beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from commopt import Aggregator, Communicator, Compressed, Feedback, Layout, PowerSGD, Quantize
from commopt.aggregate import context_for, powersgd_reference
from commopt.compress import error_feedback_reference
from commopt.feedback import Piece, ResidualKind, ResidualStore
from commopt.feedback.factors import RightFactor
from commopt.groups import Team
from commopt.kernels.lowrank import orthogonalize
from tests.ranks import run

T = TypeVar("T")
Step = tuple[Tensor, dict[ResidualKind, Tensor]]
"""The average, and this rank's residuals by kind."""

STEPS = 5
SCALINGS = ((1.0, 1.0), (1024.0, 1.0), (1.0, 0.75), (2.0**-3, 0.5))
"""Loss scale and decay."""
SIZES = (513, 1024, 5003)
SHAPES = ((40, 24), (16, 3, 5), (130, 66))
MATRIX_RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """A buffer of one parameter, averaged for some steps."""

    aggregator: Aggregator
    shape: tuple[int, ...]
    loss_scale: float
    seed: int

    def gradients(self, step: int, world_size: int) -> list[Tensor]:
        """Return the ranks' gradients, scaled: a part is constant, so that factors become warm."""
        generator = torch.Generator().manual_seed(self.seed)
        constant = torch.randn(world_size, *self.shape, generator=generator)
        generator.manual_seed(1000 * self.seed + step)
        fresh = torch.randn(world_size, *self.shape, generator=generator)
        return list((constant + 0.25 * fresh) * self.loss_scale)

    def first_right(self, matrix_rank: int) -> Tensor:
        """Return the factor to begin with: orthonormal columns."""
        cols = prod(self.shape[1:])
        drawn = torch.randn(1, cols, matrix_rank, generator=torch.Generator().manual_seed(self.seed))
        return orthogonalize(drawn)[0]


def train(rank: int, world_size: int, cases: Sequence[Case]) -> list[list[Step]]:
    """Return the steps of each case."""
    team = Communicator()._membership.team
    return [[*steps_of(case, rank, world_size, team)] for case in cases]


def steps_of(case: Case, rank: int, world_size: int, team: Team) -> list[Step]:
    layout, store = Layout.of_parameters([("w", case.shape)]), ResidualStore()
    found: list[Step] = []
    if isinstance(case.aggregator, PowerSGD):
        right = case.first_right(case.aggregator.matrix_rank)
        store.factors.add("", RightFactor(Piece("w", 0, layout.numel), right))
    loss_scale = None if case.loss_scale == 1.0 else torch.tensor(case.loss_scale)
    for step in range(STEPS):
        buffer = case.gradients(step, world_size)[rank].reshape(-1).clone()
        context = context_for(case.aggregator, layout, team, store, step, 0, rank, loss_scale)
        case.aggregator.all_reduce(buffer, team, 1 / world_size, context)
        store.transaction.end_bucket([buffer], last=True)
        found.append((buffer, {each.kind: each.values.clone() for each in store.residuals()}))
    return found


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def by_rank(results: Sequence[Sequence[Sequence[T]]], number: int, step: int) -> list[T]:
    return [of_rank[number][step] for of_rank in results]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_quantization_with_feedback_has_the_bits_of_its_reference(world_size: int) -> None:
    cases, coders = [], []
    for number, (bits, numel, (loss_scale, decay)) in enumerate(product((8, 4, 2), SIZES, SCALINGS)):
        coder = Quantize(bits, 64 * (1 + number % 3), levels="uniform")  # type: ignore[arg-type]
        cases.append(Case(Compressed(coder, Feedback(decay)), (numel,), loss_scale, number))
        coders.append((bits, coder.codec.block, decay))
    results = run(train, world_size, cases)
    for number, (case, (bits, block, decay)) in enumerate(zip(cases, coders, strict=True)):
        zeros = torch.zeros(case.shape)
        state = error_feedback_reference.FeedbackState([zeros] * world_size, zeros)
        for step in range(STEPS):
            gradients = case.gradients(step, world_size)
            expected = error_feedback_reference.average(gradients, state, bits, block, decay, case.loss_scale)
            ranks = by_rank(results, number, step)
            for (average, residuals), residual in zip(ranks, state.residuals, strict=True):
                assert torch.equal(average, expected), f"{case}, step {step}"
                assert torch.equal(residuals["worker"], residual), f"{case}, step {step}"
            if world_size > 2:
                served = torch.cat([residuals["server"] for _, residuals in ranks])
                assert torch.equal(served, state.server_residual), f"{case}, step {step}"


@pytest.mark.parametrize(("world_size", "nodes"), [(2, None), (3, None), (2, (1, 1))], ids=str)
def test_power_sgd_follows_its_reference(world_size: int, nodes: tuple[int, ...] | None) -> None:
    """Up to roundings, and the noise that keeps directions from getting lost: a millionth of each factor.

    Between nodes factors cross as bfloat16. Tolerances are those of norms.
    """
    cases = [
        Case(PowerSGD(matrix_rank, 1, start_step=0, feedback=Feedback(decay)), shape, loss_scale, number)
        for number, (matrix_rank, shape, (loss_scale, decay)) in enumerate(product(MATRIX_RANKS, SHAPES, SCALINGS))
    ]
    results = run(train, world_size, cases, nodes=nodes)
    close = 1e-4 if nodes is None else 2**-5
    for number, case in enumerate(cases):
        assert isinstance(case.aggregator, PowerSGD)
        matrix = (case.shape[0], prod(case.shape[1:]))
        right = case.first_right(case.aggregator.matrix_rank)
        state = powersgd_reference.MatrixState([torch.zeros(matrix)] * world_size, right)
        assert case.aggregator.feedback is not None
        decay = case.aggregator.feedback.decay
        for step in range(STEPS):
            gradients = [gradient.view(matrix) for gradient in case.gradients(step, world_size)]
            expected = powersgd_reference.average(gradients, state, decay, case.loss_scale) / case.loss_scale
            for (average, residuals), residual in zip(by_rank(results, number, step), state.residuals, strict=True):
                apart = relative_error(average.view(matrix) / case.loss_scale, expected)
                assert apart < close, f"{case}, step {step}: averages are {apart:.2g} apart"
                apart = relative_error(residuals["worker"].view(matrix), residual)
                assert apart < close, f"{case}, step {step}: residuals are {apart:.2g} apart"


def test_the_references_conserve_the_sum_of_gradients() -> None:
    """All that was averaged, and the residuals, are all gradients."""
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(20, 3, 32, 48, generator=generator, dtype=torch.float64)
    zeros = torch.zeros(32, 48, dtype=torch.float64)
    low_rank = powersgd_reference.MatrixState([zeros] * 3, torch.randn(48, 2, generator=generator, dtype=torch.float64))
    coded = error_feedback_reference.FeedbackState([zeros.view(-1)] * 3, zeros.view(-1))
    low_rank_sum, coded_sum = zeros, zeros.view(-1)
    for step in gradients:
        low_rank_sum = low_rank_sum + powersgd_reference.average(list(step), low_rank)
        coded_sum = coded_sum + error_feedback_reference.average([*step.view(3, -1)], coded, bits=2, block=64)
    exact = gradients.mean(1).sum(0)
    torch.testing.assert_close(low_rank_sum + torch.stack(low_rank.residuals).sum(0), exact)
    left = torch.stack(coded.residuals).sum(0) + coded.server_residual
    torch.testing.assert_close(coded_sum + left, exact.view(-1))
