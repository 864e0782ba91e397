# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 for images of 32 x 32 pixels, and images that need no download and are hard to tell apart.

Every image is drawn when it is used, so that none is seen twice: one of ten random textures, shifted at random around
the edges, with another one over it that has less contrast, in noise.
"""

# No `from __future__ import annotations`: as the examples, whose trainings this one stands beside.

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, pad, relu

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
