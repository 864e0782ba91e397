# SPDX-License-Identifier: Apache-2.0
"""Nothing is lost: the mean gradients of all steps are what was applied plus what the residuals hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from commopt import Feedback
from tests.catalogue import run_on
from tests.feedback_training import (
    NUMELS,
    SMALL_BUCKETS,
    STRATEGIES,
    Books,
    Training,
    Vectors,
    assert_conserved,
    assert_something_left,
    drift,
    flat,
    gradients,
    residuals_of,
    total,
    zeros,
)
from tests.hook_training import assert_identical
from tests.ranks import run

SHORT = (1, 2, 3, 15)  # DDP makes new buckets before step 2, or 3 with a static graph
MIDDLE = (*SHORT, 25)
LONG = (*SHORT, 200)
ONE_BUCKET: dict[str, Any] = {}
# Each kind of compressor flat and between nodes, and each layout once.
CASES: list[tuple[str, str, str]] = [
    ("2 bits", "4", "float32"),
    ("4 uniform", "2", "bfloat16"),
    ("onebit mean", "3", "bfloat16"),
    ("bf16", "2", "bfloat16"),
    ("inter 8 bits", "2+1", "float32"),
    ("inter 4 bits", "2x2 interleaved", "bfloat16"),
    ("inter onebit rms", "3x2", "float32"),
    ("inter stochastic", "2x2", "float32"),
    ("served top 5%", "4", "bfloat16"),
    ("inter served top 5%", "3x2", "float32"),
    ("inter top 5%", "2+1 interleaved", "float32"),
    ("inter rank 2", "3x2", "bfloat16"),
]
# What else may be otherwise: the steps, the growth of a loss scale, DDP's options.
OTHERS: list[tuple[str, str, str, tuple[int, ...], float | None, dict[str, Any]]] = [
    ("inter 4 bits", "2x2", "float32", LONG, None, SMALL_BUCKETS),
    ("top 5%", "2", "bfloat16", LONG, None, SMALL_BUCKETS),
    ("rank 2", "2", "float32", LONG, None, SMALL_BUCKETS),
    ("4 bits", "2x2", "float32", SHORT, None, {**SMALL_BUCKETS, "static_graph": True}),
    ("inter rank 2", "2x2", "float32", SHORT, None, {**SMALL_BUCKETS, "static_graph": True}),
    ("inter 4 bits", "2x2", "float32", SHORT, None, ONE_BUCKET),
    ("inter rank 2", "2x2", "float32", SHORT, None, {**SMALL_BUCKETS, "gradient_as_bucket_view": True}),
    ("inter onebit mean", "2x2", "float32", SHORT, 1.5, SMALL_BUCKETS),
    ("inter top 5%", "2x2", "bfloat16", SHORT, 2.0, SMALL_BUCKETS),
    ("rank 2", "2x2", "bfloat16", SHORT, 2.0, SMALL_BUCKETS),
]


def keep_books(
    rank: int,
    world_size: int,
    strategy: str,
    dtype: str,
    snapshots: Sequence[int],
    growth: float | None = None,
    options: dict[str, Any] = SMALL_BUCKETS,
) -> tuple[list[Books], str]:
    scaler = None
    if growth is not None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_factor=growth, growth_interval=3)
    training = Training(rank, world_size, STRATEGIES[strategy], getattr(torch, dtype), scaler, options)
    books, plans = [], []
    for step in range(1, snapshots[-1] + 1):
        training.step()
        if step in snapshots:
            plans.append(training.comm.state_dict()["buckets"])
            books.append(training.books())
    assert options is not SMALL_BUCKETS or (plans[0] != plans[-1] and len(plans[-1]) > 1), "buckets never changed"
    return books, training.digest()


def check(results: Sequence[tuple[list[Books], str]], kept_at: int = -1) -> None:
    assert_identical([digest for _, digest in results])
    for snapshot in zip(*(books for books, _ in results), strict=True):
        assert_conserved(snapshot)
    assert_something_left([books[kept_at] for books, _ in results])


@pytest.mark.parametrize(("strategy", "layout", "dtype"), CASES)
def test_nothing_is_lost(strategy: str, layout: str, dtype: str) -> None:
    check(run_on(layout, keep_books, strategy, dtype, MIDDLE))


@pytest.mark.parametrize(("strategy", "layout", "dtype", "snapshots", "growth", "options"), OTHERS)
def test_nothing_is_lost_in_other_trainings(
    strategy: str,
    layout: str,
    dtype: str,
    snapshots: tuple[int, ...],
    growth: float | None,
    options: dict[str, Any],
) -> None:
    """Hundreds of steps, buckets that are made later or never, and loss scales that grow."""
    check(run_on(layout, keep_books, strategy, dtype, snapshots, growth, options))


def tiny_beside_large(rank: int, world_size: int, step: int, dtype: torch.dtype) -> Vectors:
    """One large element in each block makes a level so wide that the others fill it in hundreds of steps."""
    chosen = {name: torch.full((numel,), 3e-6 * (1 + rank), dtype=dtype) for name, numel in NUMELS.items()}
    for values in chosen.values():
        values[::16] = 1.0
    return chosen


def store_in_16_bits(rank: int, world_size: int, steps: int) -> tuple[Books, Tensor]:
    def chosen(rank: int, step: int, dtype: torch.dtype) -> Vectors:
        return tiny_beside_large(rank, world_size, step, dtype)

    aggregator = flat("8 bits", feedback=Feedback(dtype=torch.bfloat16))
    training = Training(rank, world_size, aggregator, options=ONE_BUCKET, chosen=chosen)
    for _ in range(steps):
        training.step()
    saved = training.comm.state_dict()["residuals"]["/worker"]
    assert {values.dtype for values in saved.values()} == {torch.bfloat16}
    return training.books(), training.owed["second.weight"]


def test_residuals_in_16_bits_do_not_drift() -> None:
    """A residual of 5e-4 has a last place of 4e-6 in bfloat16: truncated or rounded to nearest it would stay there."""
    results = run(store_in_16_bits, 2, 400)
    tiny = torch.arange(NUMELS["second.weight"]) % 16 != 0
    lost = drift([books for books, _ in results])["second.weight"][tiny]
    owed = torch.stack([owed for _, owed in results]).sum(0)[tiny]
    truncation = float(owed.mean()) - 2.0**-11
    assert truncation > 0.5 * float(owed.mean()), "the test must be able to fail"
    assert abs(float(lost.mean())) < truncation / 8 / 8
    assert float(lost.square().mean().sqrt()) < truncation / 8


def round_alike(rank: int, world_size: int, steps: int, dtype: torch.dtype) -> tuple[Tensor, str]:
    """Return the residual of some steps in which all ranks have equal gradients, and the digest of the results."""

    def chosen(rank: int, step: int, dtype: torch.dtype) -> Vectors:
        return gradients(0, step, dtype)

    aggregator = flat("8 bits", feedback=Feedback(dtype=dtype))
    training = Training(rank, world_size, aggregator, options=ONE_BUCKET, chosen=chosen)
    for _ in range(steps):
        training.step()
    return residuals_of(training.comm.state_dict())["/worker"]["first.weight"], training.digest()


def test_ranks_round_residuals_by_dice_of_their_own() -> None:
    exact, _ = run(round_alike, 2, 1, torch.float32)[0]
    errors = torch.stack([kept - exact for kept, _ in run(round_alike, 2, 1, torch.bfloat16)])
    assert not torch.equal(*errors)
    one, mean = errors.square().mean().sqrt(), errors.mean(0).square().mean().sqrt()
    assert 0.6 * one < mean < 0.8 * one  # 1 / sqrt(2): errors that have nothing to do with each other


def test_replicas_with_residuals_in_16_bits_are_identical() -> None:
    results = run(round_alike, 4, 4, torch.bfloat16, nodes=(2, 2))
    assert_identical([digest for _, digest in results])
    assert len({tuple(kept.tolist()) for kept, _ in results}) == 4


def fade(rank: int, world_size: int, decay: float) -> tuple[Books, Books, Vectors, float]:
    """Return the books before and after, what decay took in between, and the norm of what is left."""
    training = Training(rank, world_size, flat("onebit mean", feedback=Feedback(decay=decay)), options=ONE_BUCKET)
    for _ in range(3):
        training.step()  # a server's residuals do not decay, unless new buckets make them a worker's
    before, faded = training.books(), zeros()
    for _ in range(20):
        for name, values in residuals_of(training.comm.state_dict())["/worker"].items():
            faded[name] += (1 - decay) * values.double()
        training.step()
    return before, training.books(), faded, training.comm.stats()["residual_norm"]


def test_decay_takes_its_share_and_no_more() -> None:
    kept, faded = run(fade, 3, 1.0), run(fade, 3, 0.5)
    before, after = drift([before for before, _, _, _ in faded]), drift([after for _, after, _, _ in faded])
    taken = total([result[2] for result in faded])
    assert float(taken["first.weight"].abs().max()) > 1
    for name in NUMELS:
        assert float((after[name] - before[name] - taken[name]).abs().max()) < 1e-4, name
    for result, faded_result in zip(kept, faded, strict=True):
        assert faded_result[-1] < 0.8 * result[-1]
