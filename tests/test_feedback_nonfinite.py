# SPDX-License-Identifier: Apache-2.0
"""inf and NaN reach every rank and leave no trace in any residual, with a GradScaler and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.catalogue import run_on
from tests.feedback_training import (
    NUMELS,
    STRATEGIES,
    Books,
    Training,
    assert_conserved,
    assert_something_left,
    factors_of,
    residuals_of,
    same_residuals,
)
from tests.hook_training import assert_identical

NAMES = list(NUMELS)
# The first, a middle and the last parameter of the model, and what shares no bucket with them.
POISONS = [
    ("first.weight", 0, float("inf")),
    ("second.weight", -1, float("nan")),
    ("second.weight", 2048, float("-inf")),
    ("third.bias", -1, float("inf")),
    ("gain", 0, float("nan")),
]


def skip_steps(
    rank: int,
    world_size: int,
    strategy: str,
    dtype: str,
    steps: int,
    every: int,
    scaling: dict[str, Any],
    device: str = "cpu",
) -> tuple[Books, str, list[float], float]:
    """Train with a GradScaler, one rank's gradients being non-finite in every `every`th step, from the first on."""
    scaler = torch.amp.GradScaler(device, **scaling)
    training = Training(rank, world_size, STRATEGIES[strategy], getattr(torch, dtype), scaler, device=device)
    scales = []
    for step in range(steps):
        poison = None
        if step % every == 0:
            poison = ((step // every) % world_size, *POISONS[(step // every) % len(POISONS)])
        before = training.comm.state_dict()
        parameters = [parameter.clone() for parameter in training.module.parameters()]
        assert training.step(poison) == (poison is None), f"step {step}"
        if poison is not None:
            after = training.comm.state_dict()
            assert step < 4 or same_residuals(before, after), f"step {step}: residuals changed"
            assert all(torch.equal(a, b) for a, b in zip(parameters, training.module.parameters(), strict=True))
        scales.append(scaler.get_scale())
    return training.books(), training.digest(), scales, training.comm.stats()["dropped_commits"]


@pytest.mark.parametrize(
    ("strategy", "layout", "dtype", "steps"),
    [
        ("8 bits", "2", "float32", 120),
        ("onebit mean", "3", "float32", 25),
        ("stochastic", "4", "float32", 25),
        ("bf16", "2", "float32", 25),
        ("inter 4 bits", "2x2", "float32", 25),
        ("inter 2 bits", "2+1", "float32", 25),
        ("inter onebit rms", "3x2", "float32", 25),
        ("inter 4 bits", "2x2", "bfloat16", 25),
        ("top 5%", "2", "bfloat16", 25),
        ("inter top 5%", "2x2", "float32", 25),
        ("inter adam", "2x2", "float32", 25),
        ("inter rank 2", "2x2", "bfloat16", 25),
        ("inter rank 1", "2+1", "float32", 25),
    ],
)
def test_skipped_steps_leave_no_trace(strategy: str, layout: str, dtype: str, steps: int) -> None:
    every = 20 if steps > 100 else 6
    # In bfloat16 1500 times a gradient would not be exact.
    growth = 2.0 if dtype == "bfloat16" else 1.5
    scaling = {"init_scale": 1000.0, "growth_interval": 2, "growth_factor": growth, "backoff_factor": 0.5}
    results = run_on(layout, skip_steps, strategy, dtype, steps, every, scaling)
    assert_identical([digest for _, digest, _, _ in results])
    if "adam" not in strategy:  # whose residuals are updates
        assert_conserved([books for books, _, _, _ in results])
    assert_something_left([books for books, _, _, _ in results])
    for books, _, scales, dropped in results:
        assert scales == results[0][2]
        assert len(set(scales)) > 3, "the scale never changed"
        assert dropped > 0 or not books.residual_nbytes, "a rank that keeps residuals has noticed nothing"


def poison_buckets(rank: int, world_size: int, strategy: str, device: str = "cpu", dtype: str = "float32") -> str:
    """Poison one step after another without a scaler; check bucket by bucket. Return a hash of the results."""
    training = Training(rank, world_size, STRATEGIES[strategy], getattr(torch, dtype), device=device)
    for _ in range(3):
        training.step()
    buckets = [{name for name, *_ in bucket} for bucket in training.comm.state_dict()["buckets"]]
    assert len(buckets) > 1
    for number, (name, element, value) in enumerate(POISONS):
        for culprit in {number % world_size, world_size - 1}:
            saved = training.comm.state_dict()
            before, factors = residuals_of(saved), factors_of(saved)
            assert not training.step((culprit, name, element, value))
            saved = training.comm.state_dict()
            after, factors_after = residuals_of(saved), factors_of(saved)
            (hit,) = (bucket for bucket in buckets if name in bucket)
            results = training.results()
            assert not all(bool(results[each].isfinite().all()) for each in hit), f"{name}: {value} is gone"
            for each in set(NAMES) - hit:
                assert results[each].isfinite().all(), f"{value} in {name} spoiled {each} of another bucket"
            for role in before:
                assert before[role].keys() == after[role].keys()
                for each in before[role]:
                    same = torch.equal(before[role][each], after[role][each])
                    assert same or each not in hit, f"{role} of {each} changed with {value} in {name}"
            assert factors.keys() == factors_after.keys()
            same_factors = {key: torch.equal(values, factors_after[key]) for key, values in factors.items()}
            assert all(same for (each, _), same in same_factors.items() if each in hit), f"{value} in {name}"
            elsewhere = [same for (each, _), same in same_factors.items() if each not in hit]
            assert not elsewhere or not all(elsewhere), "the factors of the other buckets stood still"
            moved = [each for role in before for each in before[role] if each not in hit]
            changed = [
                each
                for role in before
                for each in before[role]
                if each not in hit and not torch.equal(before[role][each], after[role][each])
            ]
            assert changed or not moved, "the other buckets stood still"
            training.step()
    return training.digest()


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("4 bits", "4"),
        ("stochastic", "3"),
        ("onebit rms", "2"),
        ("bf16", "3"),
        ("inter 8 bits", "2+1"),
        ("inter 4 bits", "2x2"),
        ("inter 2 bits", "3x2"),
        ("inter onebit mean", "2x2"),
        ("top 5%", "2"),
        ("inter top 5%", "2x2"),
        ("rank 2", "2"),
        ("inter rank 2", "2x2"),
        ("inter rank 1", "2+1"),
    ],
)
def test_without_a_scaler_each_bucket_is_dropped_by_itself(strategy: str, layout: str) -> None:
    assert_identical(run_on(layout, poison_buckets, strategy))
