# SPDX-License-Identifier: Apache-2.0
"""Small models that train on a CPU over gloo or on a GPU over NCCL: jobs that take a device, and what they return."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_map_only

import commopt
from bench.vision import Bottleneck
from examples.train_gpt import GPT, VOCABULARY
from tests.ranks import Nodes, run

T = TypeVar("T")

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
every_device = pytest.mark.parametrize("device", DEVICES)

CONTEXT = 16
CLASSES = 10


def on_ranks(
    device: str, job: Callable[..., T], world_size: int, *args: object, nodes: Nodes | None = None, **options: Any
) -> list[T]:
    """Return `[job(rank, world_size, device, *args) for every rank]`, over gloo or NCCL."""
    return run(job, world_size, device, *args, nodes=nodes, device=device, **options)


def as_default(rank: int, world_size: int, device: str, job: Callable[..., T], *args: object, **options: object) -> T:
    """Return what a job that names no device returns where `device` is torch's default one, with tensors on the CPU."""
    with torch.device(device):
        found = job(rank, world_size, *args, **options)
    moved: T = tree_map_only(Tensor, lambda tensor: tensor.cpu(), found)  # else who reads it would use the GPU too
    return moved


def narrow_resnet() -> nn.Module:
    """Two bottlenecks of ResNet-50 with few channels: images [batch, 3, 16, 16] in, logits [batch, 10] out."""
    blocks = [Bottleneck(8, 8, 1), Bottleneck(32, 16, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), *blocks, *head)


def small_gpt() -> nn.Module:
    """The example's GPT: int64 [batch, 16] in, logits [batch, 16, 256] out."""
    return GPT(layers=2, width=64, context=CONTEXT)


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 16, 16, generator=generator), torch.randint(CLASSES, (8,), generator=generator)


def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    window = torch.randint(VOCABULARY, (8, CONTEXT + 1), generator=generator)
    return window[:, :-1], window[:, 1:]


@dataclass(frozen=True)
class Subject:
    """A model, what one rank learns by heart and how fast, and a cap that makes a few buckets of the gradients."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    learning_rate: float
    bucket_cap_mb: float


SUBJECTS = {"resnet": Subject(narrow_resnet, images, 0.1, 0.01), "gpt": Subject(small_gpt, tokens, 0.2, 0.15)}


class Learner:
    """One rank's DDP model with its hook, its optimizer and the one batch that it learns.

    strategy: a preset's name with options, None for stock DDP. scaler: of the loss.
    """

    def __init__(
        self,
        subject: str,
        rank: int,
        device: str,
        strategy: str | None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(7)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
        chosen = SUBJECTS[subject]
        self.module = chosen.build().to(device)
        self.ddp = TorchDDP(self.module, **{"bucket_cap_mb": chosen.bucket_cap_mb, **options})
        self.state = None if strategy is None else commopt.attach(self.ddp, strategy, scaler=scaler)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), chosen.learning_rate, momentum=0.9)
        self.scaler = scaler or torch.amp.GradScaler(device, enabled=False)
        drawn = chosen.draw(torch.Generator().manual_seed(100 + rank))
        self.inputs, self.targets = (each.to(device) for each in drawn)
        self.forward: Callable[[Tensor], Tensor] = self.ddp

    def loss(self) -> Tensor:
        """Return the mean over the batch."""
        return cross_entropy(self.forward(self.inputs).float().flatten(0, -2), self.targets.flatten())

    def step(self, precision: AbstractContextManager[object] | None = None) -> float:
        """Take a step, with the forward in `precision`; return the loss before it."""
        self.optimizer.zero_grad(set_to_none=True)
        with precision or nullcontext():
            loss = self.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return float(loss.detach())

    def digest(self) -> str:
        """Return a hash of the parameters."""
        return hashlib.sha256(self.parameters().numpy().tobytes()).hexdigest()

    def parameters(self) -> Tensor:
        """Return all parameters in one vector, on the CPU."""
        return torch.cat([parameter.detach().cpu().flatten() for parameter in self.module.parameters()])


def kept(state: commopt.HookState) -> dict[str, Tensor]:
    """Return residuals, moments and factors of this rank by what they are of, on the CPU."""
    saved = state.state_dict()
    found = {f"{role} {key}": values for role, pieces in saved["residuals"].items() for key, values in pieces.items()}
    for block in saved["factors"]:
        found[f"{block['path']} {block['piece']}"] = block["right"]
    return found
