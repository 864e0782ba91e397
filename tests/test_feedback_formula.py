# SPDX-License-Identifier: Apache-2.0
"""The formulas themselves: residuals stay bounded for ever, and stochastic rounding is right on average."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import Tensor

from commopt import Communicator, Compressed, Compressor, Quantize
from commopt.compress import Encoding, ErrorFeedback, RngKey
from tests.feedback_training import BLOCK, COMPRESSORS
from tests.ranks import run

NUMEL = 4 * BLOCK
WORKERS = 2
MARK = 250
STOCHASTIC = Quantize(8, BLOCK, rounding="stochastic")
STEPS = {"4 bits": 2500, "2 bits": 2500, "onebit mean": 2500}  # the others take 750


@pytest.mark.parametrize("name", COMPRESSORS)
def test_residuals_stay_bounded(name: str) -> None:
    """Two workers and a server; two blocks of gradients that never change, and two that are new every step."""
    compressor, steps = COMPRESSORS[name], STEPS.get(name, 750)
    generator = torch.Generator().manual_seed(3)
    changes = torch.arange(NUMEL) >= NUMEL // 2
    constant, fresh = (torch.randn(shape, generator=generator) for shape in ((WORKERS, NUMEL), (500, WORKERS, NUMEL)))
    residuals = torch.zeros(WORKERS + 1, NUMEL)
    payloads = torch.empty(WORKERS, compressor.payload_nbytes(NUMEL), dtype=torch.uint8)
    norms = torch.empty(steps, 2)
    for step in range(steps):
        news = torch.empty_like(residuals)
        gradients = torch.where(changes, fresh[step % len(fresh)], constant)
        for rank in range(WORKERS):
            feedback, row = ErrorFeedback(residuals[rank], news[rank]), payloads[rank : rank + 1]
            encoding = Encoding(NUMEL, 1 / WORKERS, feedback, RngKey(rank, step))
            compressor.compress(gradients[rank], row, encoding)
        encoding = Encoding(NUMEL, 1.0, ErrorFeedback(residuals[-1], news[-1]), RngKey(7, step))
        compressor.recompress(payloads, torch.empty_like(payloads[:1]), NUMEL, encoding)
        residuals = news
        left = residuals.double().sum(0)
        norms[step] = torch.stack([left[~changes].norm(), left[changes].norm()])
    before, after = norms[MARK - 50 : MARK].mean(0), norms[-50:].mean(0)
    assert (before > 0).all()
    assert (after <= 2 * before).all(), f"constant and new gradients: {before.tolist()}, later {after.tolist()}"


def average_again_and_again(
    rank: int, world_size: int, compressor: Compressor, repeats: int
) -> tuple[Tensor, Tensor, list[str]]:
    """Return the mean error, its standard error, and a hash of each result."""
    comm = Communicator()
    aggregator = Compressed(compressor, feedback=None)
    true = torch.stack([input_of(peer).double() for peer in range(world_size)]).mean(0)
    errors, hashes = [], []
    for _ in range(repeats):
        result = comm.all_reduce(input_of(rank), aggregator=aggregator)
        errors.append(result.double() - true)
        hashes.append(hashlib.sha256(result.numpy().tobytes()).hexdigest())
    std, mean = torch.std_mean(torch.stack(errors), 0)
    return mean, std / repeats**0.5, hashes


def input_of(rank: int) -> Tensor:
    return torch.randn(2000, generator=torch.Generator().manual_seed(rank)) * (1 + rank)


def z_scores(result: tuple[Tensor, Tensor, list[str]]) -> Tensor:
    mean, standard_error, _ = result
    return mean / standard_error.clamp_min(1e-6)  # the largest element of a block is exact but for a float32 rounding


def test_stochastic_rounding_is_unbiased_through_an_all_reduce() -> None:
    results = run(average_again_and_again, 3, STOCHASTIC, 200)
    assert len({tuple(hashes) for _, _, hashes in results}) == 1, "ranks got different bits"
    assert len(set(results[0][2])) == 200, "the rng fell alike twice"
    z = z_scores(results[0])
    assert float(z.abs().max()) < 5.5, "an element is off"
    assert 0.8 < float(z.square().mean()) < 1.2, "the elements are off"
    assert abs(float(z.mean())) * z.numel() ** 0.5 < 5, "the results are off on average"


def test_nearest_rounding_is_biased() -> None:
    """The z-test can fail: rounding to nearest is wrong in the same way every time."""
    (result, _) = run(average_again_and_again, 2, Quantize(8, BLOCK), 20)
    assert float(z_scores(result).square().mean()) > 100


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_same_program_gives_the_same_bits(world_size: int) -> None:
    first, second = (run(average_again_and_again, world_size, STOCHASTIC, 5, fresh=True) for _ in range(2))
    assert first[0][2] == second[0][2]
