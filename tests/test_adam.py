"""Adam before the wire: equal to torch.optim.AdamW where nothing is left out, and nothing is lost where something is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import DGC, Adam, Aggregator, Compressed, ConfigurationError, Hierarchical, OneBit
from tests.catalogue import run_on
from tests.feedback_training import alike
from tests.hook_training import assert_identical
from tests.ranks import run

EXACT = Hierarchical(Compressed(OneBit(64, start_step=1_000_000), adam=Adam()))  # dense for ever: exact
SIGNS = Hierarchical(Compressed(OneBit(64), adam=Adam()))
STRATEGIES: dict[str, Aggregator] = {
    "exact": EXACT,
    "signs": SIGNS,
    "signs, flat": Compressed(OneBit(64), adam=Adam()),
    "largest": Hierarchical(Compressed(DGC(0.05), adam=Adam())),
    "renewed": Hierarchical(Compressed(OneBit(64), adam=Adam(renew_every=3))),
    "clipped": Hierarchical(Compressed(OneBit(64), adam=Adam(clip_norm=1.0))),
}
LR, DECAY = 0.01, 0.1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(30, 70), nn.Tanh(), nn.Linear(70, 41), nn.Tanh(), nn.Linear(41, 5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) * self.frozen[0]
        return y


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 30, generator=generator)
    return x, x[:, :5].sin() + 0.1 * torch.randn(8, 5, generator=generator)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    matrices = [each for each in module.parameters() if each.requires_grad and each.dim() > 1]
    others = [each for each in module.parameters() if each.requires_grad and each.dim() == 1]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": others, "lr": LR / 2, "weight_decay": 0.0}]


class Trainer:
    """A DDP model of one rank; `data_of` says whose data a rank sees."""

    def __init__(
        self, rank: int, aggregator: Aggregator, scaler: torch.amp.GradScaler | None = None, **options: Any
    ) -> None:
        self.rank, self.scaler = rank, scaler
        self.module = Net()
        self.ddp = TorchDDP(self.module, bucket_cap_mb=0.01)
        self.comm = commopt.attach(self.ddp, aggregator, scaler=scaler, **options)
        self.optimizer = self.comm.optimizer(groups_of(self.module), lr=LR)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)

    def step(self, step: int, *, spoil: float = 1.0, micros: int = 1) -> None:
        self.optimizer.zero_grad()
        for micro in range(micros):
            self.ddp.require_backward_grad_sync = micro + 1 == micros
            x, y = data(self.rank, step * micros + micro)
            loss = (self.ddp(x) - y).square().mean() * spoil
            (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.schedule.step()

    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.module.parameters()])


def by_adamw(ranks: list[int], steps: int, micros: int = 1) -> Tensor:
    """Train one replica with torch.optim.AdamW on the mean gradient of the ranks' data."""
    module = Net()
    optimizer = torch.optim.AdamW(groups_of(module), lr=LR, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in ranks:
            for micro in range(micros):
                x, y = data(rank, step * micros + micro)
                ((module(x) - y).square().mean() / len(ranks)).backward()
        optimizer.step()
        schedule.step()
    return torch.cat([each.detach().flatten() for each in module.parameters()])


def train_exactly(rank: int, world_size: int, equal: bool, steps: int, micros: int) -> Tensor:
    trainer = Trainer(0 if equal else rank, EXACT)
    for step in range(steps):
        trainer.step(step, micros=micros)
    return trainer.weights()


@pytest.mark.parametrize(
    ("layout", "equal", "micros"), [("2", False, 1), ("3", False, 2), ("1+1", True, 1), ("2x2", True, 1)]
)
def test_without_compression_it_is_adamw(layout: str, equal: bool, micros: int) -> None:
    """Groups, a schedule, decoupled decay, accumulation, a frozen parameter, and buckets that change on the way."""
    results = run_on(layout, train_exactly, equal, 200, micros)
    expected = by_adamw([0] if equal else list(range(len(results))), 200, micros)
    for weights in results:
        assert torch.equal(weights, results[0])
        assert float((weights - expected).norm() / expected.norm()) < 1e-6
