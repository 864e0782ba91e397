# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 for images of 32 x 32 pixels, and images that need no download and are hard: digits among scraps of others.

Every image is drawn when it is used, so that none is seen twice: one of scikit-learn's handwritten digits, turned,
scaled and shifted at random, in a bright colour on a dark one, partly covered by fragments of other digits, in noise. A third
of the handwriting is held out.
"""

# No `from __future__ import annotations`: as the examples, whose trainings this one stands beside.

import argparse
from math import pi

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample, relu
from torch.nn.parallel import DistributedDataParallel

import commopt
from examples.train_digits import load_images

PIXELS = 32
FRAGMENTS = 2
NOISE = 0.2
HELD_OUT_IMAGES = 512
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.05  # of AdamW


# ------------------------------------------------------------------------------------ the images


def draw_images(digits: Tensor, labels: Tensor, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return float32 [count, 3, 32, 32] around 0 and what they show, int64 [count], of digits [known, 1, 8, 8]."""
    shown = torch.randint(len(labels), (count,), generator=draws)
    images = 0.5 * torch.rand(count, 3, 1, 1, generator=draws).expand(-1, -1, PIXELS, PIXELS)
    images = _painted(images, digits[shown], (0.8, 1.0), draws)
    for _ in range(FRAGMENTS):
        other = digits[torch.randint(len(labels), (count,), generator=draws)].clone()
        other[:, :, :, digits.shape[-1] // 2 :] = 0  # half a digit, turned any way, is none
        images = _painted(images, other, (0.3, 0.45), draws, turn=pi)
    return images - 0.5 + NOISE * torch.randn(images.shape, generator=draws), labels[shown]


def _painted(
    images: Tensor, shapes: Tensor, sizes: tuple[float, float], draws: torch.Generator, turn: float = pi / 8
) -> Tensor:
    """Paint a shape over each image, `sizes` of it high, turned up to `turn`, in one bright colour."""
    count = len(images)
    size, angle, right, down = torch.rand(4, count, generator=draws)
    size, angle = sizes[0] + (sizes[1] - sizes[0]) * size, turn * (2 * angle - 1)
    cos, sin = angle.cos() / size, angle.sin() / size
    x, y = ((2 * place - 1) * (1 - size) for place in (right, down))
    moved = torch.stack([cos, -sin, sin * y - cos * x, sin, cos, -sin * x - cos * y], dim=1).view(count, 2, 3)
    grid = affine_grid(moved, [count, 1, PIXELS, PIXELS], align_corners=False)
    cover = grid_sample(shapes, grid, align_corners=False)
    return images + cover * (0.5 + 0.5 * torch.rand(count, 3, 1, 1, generator=draws) - images)


# ------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., arXiv 1512.03385, section 4.1)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        last_norm = nn.BatchNorm2d(outputs)
        nn.init.zeros_(last_norm.weight)  # at first a block passes its input on: no learning-rate warm-up needed
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            last_norm,
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        return relu(self.body(x) + self.shortcut(x))


def resnet18(width: int) -> nn.Module:
    """Return ResNet-18 with the stem for small images: a 3x3 convolution, no pooling; at width 64 it has 11.2 million.

    Images [batch, 3, 32, 32] in, logits [batch, 10] out.
    """
    channels = width
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    for scale, stride in ((1, 1), (2, 2), (4, 2), (8, 2)):
        for index in range(2):
            layers.append(Block(channels, scale * width, stride if index == 0 else 1))
            channels = scale * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return model.to(memory_format=torch.channels_last)  # on a CPU half the time


# ---------------------------------------------------------------------------------- the training


class Training:
    """As examples.train_digits.Training, of `resnet18`."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        model = resnet18(options.width).to(device)
        self.model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.learning_rate, self.steps = options.learning_rate, options.steps
        self.optimizer: torch.optim.Optimizer
        if options.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.model.parameters(), self.learning_rate, options.momentum)
        else:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), self.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
            )
        self.decay = self._decay()
        self.device, self.batch = device, options.batch
        self.digits, held_out = load_images()
        self.held_out = draw_images(*held_out, HELD_OUT_IMAGES, torch.Generator().manual_seed(0))
        # Every rank draws its own batches; they depend on the seed and the rank, not on the strategy.
        self.draws = torch.Generator().manual_seed(1 + options.seed * dist.get_world_size() + dist.get_rank())

    def _decay(self) -> torch.optim.lr_scheduler.LinearLR:
        return torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, self.steps)

    def follow(self, state: commopt.CommState | None) -> None:
        """Take the optimizer that goes with the hook, where the hook does Adam's part of AdamW."""
        if state is not None and state.aggregator is not None and state.aggregator.adam is not None:
            self.optimizer = state.optimizer(self.model.parameters(), self.learning_rate, WEIGHT_DECAY)
            self.decay = self._decay()

    def step(self) -> Tensor:
        """Do one optimizer step on this rank's next batch; return this rank's loss, still on the device."""
        images, labels = (each.to(self.device) for each in draw_images(*self.digits, self.batch, self.draws))
        loss = cross_entropy(self.model(images.contiguous(memory_format=torch.channels_last)), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.decay.step()
        return loss.detach()

    @torch.no_grad()
    def held_out_accuracy(self) -> tuple[float, float]:
        """Return the share of held-out images that are recognized, and the loss in nats; all ranks take a part."""
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        images, labels = (each[mine].to(self.device) for each in self.held_out)
        self.model.eval()
        logits = self.model.module(images.contiguous(memory_format=torch.channels_last))
        self.model.train()
        right = (logits.argmax(1) == labels).sum()
        totals = torch.stack([right, cross_entropy(logits, labels, reduction="sum")])
        dist.all_reduce(totals)
        accuracy, loss = (totals / len(self.held_out[1])).tolist()
        return accuracy, loss


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add what `Training` reads from its options."""
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage (default 16)")
    parser.add_argument("--steps", type=int, required=True, help="of the optimizer")
    parser.add_argument("--batch", type=int, default=16, help="images per rank and step (default 16)")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (default 0.9)")
    parser.add_argument("--learning-rate", type=float, required=True)
