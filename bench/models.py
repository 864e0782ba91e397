# SPDX-License-Identifier: Apache-2.0
"""What benchmarks train: the example's GPT, and ResNet-50 and Swin-T on images which need no download."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.vision import ResNet50, SwinT
from commopt.command_line import whole
from examples.train_gpt import Training, add_model_options


class Trainable(Protocol):
    """A fresh model under DDP or FSDP2, its optimizer and this rank's batches; equal seeds start equal runs."""

    model: nn.Module
    device: torch.device
    evaluation: str
    """On what the held-out loss is computed."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The one that steps first."""
        ...

    def step(self) -> Tensor:
        """Do one optimizer step on this rank's next batch; return this rank's loss, still on the device."""
        ...

    def held_out_loss(self) -> float:
        """Return the mean loss in nats on the same held-out data each time; collective."""
        ...

    def follow(self, state: commopt.CommState | None) -> None:
        """Take the optimizer that goes with the hook, where the hook does Adam's part of AdamW."""
        ...


PATTERNS = 16  # of the classes: what a model can learn in the seconds of a benchmark
HELD_OUT_IMAGES = 64
ADAM_LEARNING_RATE = 1e-3  # where the hook makes Adam's directions


IMAGE_MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "resnet50": (lambda pixels: ResNet50(), partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-5)),
    "swin-t": (SwinT, partial(torch.optim.AdamW, lr=5e-4, weight_decay=0.05)),
}
"""By name: the model for images of so many pixels a side, and its optimizer."""


class ImageTraining:
    """As examples.train_gpt.Training, of one of IMAGE_MODELS."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        make, optimizer = IMAGE_MODELS[options.model]
        model = make(options.pixels).to(device)
        self.model: nn.Module = DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None
        )
        self.optimizer: torch.optim.Optimizer = optimizer(self.model.parameters())
        self.device = device
        self.batch = options.batch
        self.pixels = options.pixels
        self.patterns = torch.randn(PATTERNS, 3, self.pixels, self.pixels)
        self.evaluation = (
            f"{HELD_OUT_IMAGES} fixed held-out images of {PATTERNS} classes, {self.pixels} x {self.pixels} pixels"
        )
        self.draws = torch.Generator().manual_seed(options.seed * dist.get_world_size() + dist.get_rank())
        self.held_out = self._images(HELD_OUT_IMAGES, torch.Generator().manual_seed(options.seed + 1_000_000))

    def follow(self, state: commopt.CommState | None) -> None:
        """Take the optimizer that goes with the hook, where the hook does Adam's part of AdamW."""
        if state is not None and state.aggregator is not None and state.aggregator.adam is not None:
            self.optimizer = state.optimizer(self.model.parameters(), ADAM_LEARNING_RATE)

    def step(self) -> Tensor:
        """Do one optimizer step on this rank's next batch; return this rank's loss, still on the device."""
        images, labels = self._images(self.batch, self.draws)
        loss = cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss in nats per image on the same held-out images each time; all ranks take a share.

        Normalized by the share's own statistics: running averages mean little in a benchmark's few steps.
        """
        images, labels = self.held_out
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        total = cross_entropy(model(images[mine]), labels[mine], reduction="sum")
        dist.all_reduce(total)
        return float(total / HELD_OUT_IMAGES)

    def _images(self, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(PATTERNS, (count,), generator=draws)
        noise = torch.randn(count, 3, self.pixels, self.pixels, generator=draws)
        return (self.patterns[labels] + noise).to(self.device), labels.to(self.device)


MODELS: dict[str, Callable[[argparse.Namespace, torch.device], Trainable]] = {
    "gpt": Training,
    **dict.fromkeys(IMAGE_MODELS, ImageTraining),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what chooses a model, and what the models read from their options."""
    parser.add_argument("--model", choices=MODELS, default="gpt", help="what to train (default gpt)")
    parser.add_argument("--pixels", type=whole(1), default=32, help="images are so high and wide (default 32)")
    add_model_options(parser)


__all__ = ["MODELS", "ImageTraining", "Trainable", "add_options"]
