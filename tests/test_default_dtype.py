# SPDX-License-Identifier: Apache-2.0
"""torch.set_default_dtype is the caller's: what the library keeps, sends and computes is not of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import commopt
from tests.gpu_training import Learner, kept
from tests.ranks import run

STRATEGIES = [name for name in commopt.PRESETS if name != "auto"]  # whose choices depend on the clock
OPTIONS = {"quantized": ":rounding=stochastic"}


def train(rank: int, world_size: int, default: torch.dtype, strategies: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Return all parameters, and what each strategy keeps, after steps under a default dtype."""
    results = {}
    for strategy in strategies:
        learner = Learner("resnet", rank, "cpu", strategy)
        torch.set_default_dtype(default)
        try:
            for _ in range(4):
                learner.step()
        finally:
            torch.set_default_dtype(torch.float32)
        assert learner.state is not None
        results[strategy] = {"parameters": learner.parameters(), **kept(learner.state)}
    return results


def test_every_preset_trains_to_the_same_bits() -> None:
    strategies = [name + OPTIONS.get(name, "") for name in STRATEGIES]
    usual, others = (run(train, 4, dtype, strategies, nodes=(2, 2)) for dtype in (torch.float32, torch.bfloat16))
    for mine, theirs in zip(usual, others, strict=True):
        for strategy in strategies:
            assert mine[strategy].keys() == theirs[strategy].keys()
            for name, values in mine[strategy].items():
                assert values.dtype == theirs[strategy][name].dtype, f"{strategy}: {name}"
                assert torch.equal(values, theirs[strategy][name]), f"{strategy}: {name}"
