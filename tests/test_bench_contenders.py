# SPDX-License-Identifier: Apache-2.0
"""Who takes part in the training benchmark: names, torch's hooks, and PowerSGD without overlap."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commopt
from bench.models import MODELS, add_options
from bench.training.report import first_below
from bench.training.strategies import KNOWN, OTHERS, LowRankAverage, enter, require_known, split_strategies
from examples.train_gpt import PARALLEL
from tests.ranks import run

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("ddp", ["ddp"]),
        ("ddp,flat", ["ddp", "flat"]),
        (
            "auto:allow=('lossless','quantized'),hierarchical_dgc:warmup=((40,0.25),(40,0.0625)),ddp",
            ["auto:allow=('lossless','quantized')", "hierarchical_dgc:warmup=((40,0.25),(40,0.0625))", "ddp"],
        ),
    ],
)
def test_commas_in_brackets_belong_to_a_name(text: str, names: list[str]) -> None:
    assert split_strategies(text) == names


def test_every_preset_takes_part() -> None:
    assert {"ddp", *commopt.PRESETS, *OTHERS} <= set(KNOWN)
    for name in KNOWN:
        require_known(name, name if name in PARALLEL else "ddp")
    with pytest.raises(ValueError, match="strategy 'powersgd:rank=3' is unknown"):
        require_known("powersgd:rank=3")


@pytest.mark.parametrize(("level", "x"), [(5.0, 0.0), (4.0, 1.0), (3.0, 3.0), (2.0, 4.0), (1.5, None)])
def test_first_below(level: float, x: float | None) -> None:
    assert first_below([(0.0, 5.0), (1.0, 4.0), (2.0, 4.0), (4.0, 2.0), (5.0, 3.0)], level) == x


# ------------------------------------------------------------------------------ the models


def options_for(model: str, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.set_defaults(model=model)
    return parser.parse_args(["--layers", "1", "--width", "64", "--context", "16", *arguments])


def losses_of(rank: int, world_size: int, model: str, strategy: str, steps: int) -> tuple[list[float], list[float]]:
    training, _ = enter(MODELS[model](options_for(model), CPU), strategy, "ddp")
    losses = [float(training.step()) for _ in range(steps)]
    sums = [float(p.detach().double().sum()) for p in training.model.parameters()]
    dist.barrier()  # else a thread of gloo's, which has to be joined, may be the last to hold the process group
    return losses, sums


@pytest.mark.parametrize("model", sorted(set(MODELS) - {"gpt"}))
def test_replicas_of_every_model_stay_alike(model: str) -> None:
    (losses, first), (others, second) = run(losses_of, 2, model, "ddp", 1)
    assert first == second
    assert losses != others  # each rank has its own batches


@pytest.mark.parametrize("strategy", sorted(OTHERS))
def test_what_is_not_commopts_averages_too(strategy: str) -> None:
    """Ranks with batches of their own end with the same parameters, near those that stock DDP ends with."""
    (_, first), (_, second) = run(losses_of, 2, "gpt", strategy, 6)
    assert first == second
    (_, alone), (_, other) = run(losses_of, 2, "gpt", "noop", 6)
    assert alone != other


# ------------------------------------------------------------------------------ PowerSGD after backward


def averaged(
    rank: int, world_size: int, shape: tuple[int, ...], matrix_rank: int, calls: int
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
    torch.manual_seed(rank)
    matrix, vector = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(5))
    average = LowRankAverage([matrix, vector], matrix_rank)
    before, after = [], []
    for _ in range(calls):
        matrix.grad, vector.grad = torch.randn(shape), torch.randn(5)
        before.append(matrix.grad.clone())
        mean = vector.grad / world_size
        dist.all_reduce(mean)
        average()
        torch.testing.assert_close(vector.grad, mean)
        after.append(matrix.grad.clone())
    return before, after, average.residuals.get(matrix)


def begun_dense(rank: int, world_size: int) -> list[bool]:
    """Return of each call whether the gradient became the exact mean of all ranks'."""
    matrix = nn.Parameter(torch.zeros(16, 16))
    average = LowRankAverage([matrix], 1, dense_steps=2)
    exact = []
    for step in range(4):
        matrix.grad = torch.randn(16, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        mean = matrix.grad / world_size
        dist.all_reduce(mean)
        average()
        exact.append(torch.allclose(matrix.grad, mean))
    return exact


def test_the_first_steps_are_dense_as_with_torchs_hook() -> None:
    assert run(begun_dense, 2) == [[True, True, False, False]] * 2


def test_nothing_is_lost() -> None:
    """All that was put in has come out, or is in the mean of the residuals."""
    results = run(averaged, 2, (40, 3, 8), 2, 5)
    put_in = torch.stack([torch.stack(before).sum(0) for before, _, _ in results]).mean(0)
    come_out = torch.stack(results[0][1]).sum(0)
    kept = torch.stack([residual for _, _, residual in results if residual is not None]).mean(0)
    torch.testing.assert_close(put_in, come_out + kept.view(40, 3, 8), atol=1e-4, rtol=1e-4)
    for own, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.equal(own, other)
        assert torch.linalg.matrix_rank(own.flatten(1)) == 2


def test_small_matrices_travel_dense() -> None:
    """4 (3 + 3) factors would be more than 3 x 3 elements."""
    results = run(averaged, 2, (3, 3), 4, 1)
    assert results[0][2] is None
    torch.testing.assert_close(results[0][1][0], (results[0][0][0] + results[1][0][0]) / 2)
