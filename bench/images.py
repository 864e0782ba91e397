"""ResNet-50 on images that need no download: the model of many papers, as a second subject of bench.training."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel

CLASSES = 1000
HELD_OUT_IMAGES = 64
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride
_EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut (He et al., arXiv 1512.03385, section 4.1)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * _EXPANSION
        last_norm = nn.BatchNorm2d(outputs)
        nn.init.zeros_(last_norm.weight)  # at first a block passes its input on: no learning-rate warm-up needed
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            last_norm,
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to [batch, 4 * width, height / stride, width / stride]."""
        return relu(self.body(x) + self.shortcut(x))


class ResNet50(nn.Module):
    """25.6 million parameters in 161 tensors: images [batch, 3, height, width] in, logits [batch, 1000] out."""

    def __init__(self) -> None:
        super().__init__()
        channels = _STAGES[0][0]
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        for width, blocks, stride in _STAGES:
            for index in range(blocks):
                layers.append(Bottleneck(channels, width, stride if index == 0 else 1))
                channels = width * _EXPANSION
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        logits: Tensor = self.layers(images)
        return logits


class ImageTraining:
    """As examples.train_gpt.Training, of ResNet-50: every class is a pattern, every image a pattern under noise."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(options.seed)
        model = ResNet50().to(device)
        self.ddp = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)
        self.device, self.batch, self.pixels = device, options.batch, options.pixels
        self.patterns = torch.randn(CLASSES, 3, self.pixels, self.pixels)
        self.evaluation = f"{HELD_OUT_IMAGES} fixed held-out images of {self.pixels} x {self.pixels} pixels"
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
        labels = torch.randint(CLASSES, (count,), generator=draws)
        noise = torch.randn(count, 3, self.pixels, self.pixels, generator=draws)
        return (self.patterns[labels] + noise).to(self.device), labels.to(self.device)
