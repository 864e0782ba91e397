# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 for images of 32 x 32 pixels, and images that need no download and are hard to tell apart.

Every image is drawn when it is used, so that none is seen twice: one of ten random textures, shifted at random around
the edges, with another one over it that has less contrast, in noise.
"""

# No `from __future__ import annotations`: as the examples, whose trainings this one stands beside.

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, pad, relu
from torch.nn.parallel import DistributedDataParallel

import commopt

PIXELS = 32
CLASSES = 10
OTHER = 0.7  # contrast of the texture that is none of the image's class
NOISE = 1.5
HELD_OUT_IMAGES = 512
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.05  # of AdamW


# ------------------------------------------------------------------------------------ the images


def textures() -> Tensor:
    """Return what the classes are: float32 [10, 3, 32, 32] of unit variance, the same everywhere."""
    noise = torch.randn(CLASSES, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    return 3 * avg_pool2d(pad(noise, (1, 1, 1, 1), "circular"), 3, stride=1)


def draw_images(known: Tensor, count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return float32 [count, 3, 32, 32] around 0 of `textures`, and their classes, int64 [count]."""
    labels = torch.randint(CLASSES, (count,), generator=draws)
    others = (labels + torch.randint(1, CLASSES, (count,), generator=draws)) % CLASSES
    images = _shifted(known, labels, draws) + OTHER * _shifted(known, others, draws)
    return images + NOISE * torch.randn(images.shape, generator=draws), labels


def _shifted(known: Tensor, chosen: Tensor, draws: torch.Generator) -> Tensor:
    across, down = (torch.arange(PIXELS) + torch.randint(PIXELS, (2, len(chosen), 1), generator=draws)) % PIXELS
    return known[chosen[:, None, None], :, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


# ------------------------------------------------------------------------------------- the model


def _norm(channels: int) -> nn.BatchNorm2d:
    """Normalize by the batch's own statistics, always: running averages mean little after a few hundred steps."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., arXiv 1512.03385, section 4.1)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        last_norm = _norm(outputs)
        nn.init.zeros_(last_norm.weight)  # at first a block passes its input on: no learning-rate warm-up needed
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            _norm(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            last_norm,
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to [batch, outputs, height / stride, width / stride]."""
        return relu(self.body(x) + self.shortcut(x))


def resnet18(width: int) -> nn.Module:
    """Return ResNet-18 with the stem for small images: a 3x3 convolution, no pooling; at width 64 it has 11.2 million.

    Images [batch, 3, 32, 32] in, logits [batch, 10] out.
    """
    channels = width
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), _norm(width), nn.ReLU(inplace=True)]
    for scale, stride in ((1, 1), (2, 2), (4, 2), (8, 2)):
        for index in range(2):
            layers.append(Block(channels, scale * width, stride if index == 0 else 1))
            channels = scale * width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it; half the time
    return model


# ---------------------------------------------------------------------------------- the training


class Training:
    """As examples.train_digits.Training, of `resnet18`."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        model = resnet18(options.width).to(device)
        self.model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.learning_rate = options.learning_rate
        self.steps = options.steps
        self.optimizer: torch.optim.Optimizer
        if options.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.model.parameters(), self.learning_rate, options.momentum)
        else:
            self.optimizer = torch.optim.AdamW(
                self.model.parameters(), self.learning_rate, betas=options.betas, weight_decay=WEIGHT_DECAY
            )
        self.decay = self._decay()
        self.device = device
        self.batch = options.batch
        self.textures = textures()
        self.held_out = draw_images(self.textures, HELD_OUT_IMAGES, torch.Generator().manual_seed(0))
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
        images, labels = (each.to(self.device) for each in draw_images(self.textures, self.batch, self.draws))
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
        logits = self.model.module(images.contiguous(memory_format=torch.channels_last))
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
    parser.add_argument("--betas", type=float, nargs=2, default=BETAS, help="of AdamW")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD (default 0.9)")
    parser.add_argument("--learning-rate", type=float, required=True)
