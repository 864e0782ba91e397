# SPDX-License-Identifier: Apache-2.0
"""Training with feedback ends where dense training ends; without it, it does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Aggregator, Flat, PowerSGD
from tests.catalogue import run_on
from tests.feedback_training import COMPRESSORS, STRATEGIES, flat
from tests.hook_training import assert_identical, digest_of

NUMEL = 512
SHAPE = (16, 32)  # for PowerSGD a matrix
RATES = [0.1] * 30 + [0.03] * 30 + [0.005] * 30  # feedback arrives late by some steps: the last must be small
WITHOUT = [
    flat("onebit mean", feedback=None),
    flat("2 bits", feedback=None),
    flat("top 5%", feedback=None),
    PowerSGD(1, start_step=0, feedback=None),
]


class Quadratic(nn.Module):
    """Every rank wants x elsewhere: |x - target|^2."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SHAPE))

    def forward(self, target: Tensor) -> Tensor:
        return (self.x.flatten() - target).square().sum()


def target_of(rank: int) -> Tensor:
    """Skewed, as a mean of signs is right where targets are symmetric, and of another magnitude in each block."""
    targets = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)).abs() * (1 + 3 * (rank == 0))
    return targets * torch.logspace(-1, 1, NUMEL)


def descend(rank: int, world_size: int, aggregators: Sequence[Aggregator]) -> list[tuple[float, str]]:
    """Return, for each, the mean loss over the ranks in the end and a hash of the parameters."""
    targets = torch.stack([target_of(peer).double() for peer in range(world_size)])
    ends = []
    for aggregator in aggregators:
        module = Quadratic()
        ddp = TorchDDP(module)
        commopt.attach(ddp, aggregator)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        for rate in RATES:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            ddp(target_of(rank)).backward()
            optimizer.step()
        loss = (module.x.detach().flatten().double() - targets).square().sum(1).mean()
        ends.append((float(loss), digest_of(module)))
    return ends


def losses(layout: str, aggregators: Sequence[Aggregator]) -> list[float]:
    results = run_on(layout, descend, aggregators)
    for ends in zip(*results, strict=True):
        assert_identical([digest for _, digest in ends])
    return [loss for loss, _ in results[0]]


EVERYWHERE = [*COMPRESSORS, "rank 2"]
BETWEEN_NODES = ["inter 2 bits", "inter onebit mean", "inter top 5%", "inter rank 2"]


@pytest.mark.parametrize(("layout", "names"), [("3", EVERYWHERE), ("2x2", BETWEEN_NODES)])
def test_feedback_reaches_the_loss_of_dense_training(layout: str, names: Sequence[str]) -> None:
    dense, *compressed = losses(layout, [Flat(), *(STRATEGIES[name] for name in names)])
    ratios = {name: loss / dense for name, loss in zip(names, compressed, strict=True)}
    assert all(0.999 < ratio < 1.01 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("layout", ["2", "3"])
def test_low_bits_without_feedback_do_not(layout: str) -> None:
    dense, *compressed = losses(layout, [Flat(), *WITHOUT])
    assert all(loss > 1.015 * dense for loss in compressed), [loss / dense for loss in compressed]
