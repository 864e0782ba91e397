"""Training on images that need no download: a class is a pattern, every image a pattern under noise."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES = 1000
PATTERNS = 16  # of the classes: what a model can learn in the seconds of a benchmark
HELD_OUT_IMAGES = 64


class ImageTraining:
    """As examples.train_gpt.Training, of a model that maps images [batch, 3, pixels, pixels] to logits.

    build: makes the model, given `pixels`.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device, build: Callable[[int], nn.Module]) -> None:
        torch.manual_seed(options.seed)
        model = build(options.pixels).to(device)
        self.ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.ddp.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5
        )
        self.device, self.batch, self.pixels = device, options.batch, options.pixels
        self.patterns = torch.randn(PATTERNS, 3, self.pixels, self.pixels)
        self.evaluation = (
            f"{HELD_OUT_IMAGES} fixed held-out images of {PATTERNS} classes, {self.pixels} x {self.pixels} pixels"
        )
        self.draws = torch.Generator().manual_seed(options.seed * dist.get_world_size() + dist.get_rank())
        self.held_out = self._images(HELD_OUT_IMAGES, torch.Generator().manual_seed(options.seed + 1_000_000))

    def step(self) -> Tensor:
        """Do one optimizer step on this rank's next batch; return this rank's loss, still on the device."""
        images, labels = self._images(self.batch, self.draws)
        loss = cross_entropy(self.ddp(images), labels)
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
        total = cross_entropy(self.ddp.module(images[mine]), labels[mine], reduction="sum")
        dist.all_reduce(total)
        return float(total / HELD_OUT_IMAGES)

    def _images(self, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(PATTERNS, (count,), generator=draws)
        noise = torch.randn(count, 3, self.pixels, self.pixels, generator=draws)
        return (self.patterns[labels] + noise).to(self.device), labels.to(self.device)
