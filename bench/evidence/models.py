# SPDX-License-Identifier: Apache-2.0
"""Models that want different buckets, and three whose size can be chosen."""

from __future__ import annotations

import inspect
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.vision import CLASSES, ResNet50
from commopt import ConfigurationError
from examples.train_gpt import GPT, VOCABULARY, Block


@dataclass(frozen=True)
class Subject:
    """A model and its input; `batch` sets how long backward takes."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int


def many_small() -> nn.Module:
    """Return 64 layers of 64 KiB to 256 KiB: 128 tensors, 8.4 MB."""
    widths = [128, 256] * 32
    layers: list[nn.Module] = []
    for inputs, outputs in zip([128, *widths], widths, strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def few_large() -> nn.Module:
    """Return 6 layers of 16 MiB, the first of which are slow to compute for their bytes: 101 MB."""
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())))


class Transformer(nn.Module):
    """The blocks of the example's GPT: 8 of width 256, and an embedding: 26 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.blocks = nn.Sequential(*(Block(256, 4) for _ in range(8)))
        self.head = nn.Linear(256, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes [batch, context] to logits [batch, context, 256]."""
        logits: Tensor = self.head(self.blocks(self.embedding(text)))
        return logits


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("many_small", many_small, lambda batch: torch.randn(batch, 128), 512),
        Subject("few_large", few_large, lambda batch: torch.randn(batch, 2048), 64),
        Subject("transformer", Transformer, lambda batch: torch.randint(VOCABULARY, (batch, 64)), 8),
    )
}


def gpt(layers: int = 4, width: int = 256, context: int = 64, batch: int = 4) -> Subject:
    """The example's GPT: 3.3 million parameters, none of its tensors above 1 MiB."""

    def inputs(count: int) -> Tensor:
        return torch.randint(VOCABULARY, (count, context))

    return Subject("gpt", lambda: GPT(layers, width, context), inputs, batch)


def resnet50(width: int = 32, pixels: int = 32, batch: int = 4) -> Subject:
    """ResNet-50 with its widths scaled to begin at `width`: 6.9 million parameters in 161 tensors; 64 is the original.

    Batches are normalized by their own statistics: running ones would be buffers, which DDP broadcasts in each forward.
    """
    return Subject("resnet50", lambda: _resnet50(width), lambda count: torch.randn(count, 3, pixels, pixels), batch)


def vgg(width: int = 32, hidden: int = 1536, pixels: int = 32, batch: int = 8) -> Subject:
    """Five convolutions before three linear layers, which hold most of its 5.3 million parameters."""
    return Subject(
        "vgg", lambda: _vgg(width, hidden, pixels), lambda count: torch.randn(count, 3, pixels, pixels), batch
    )


MODELS: dict[str, Callable[..., Subject]] = {"gpt": gpt, "resnet50": resnet50, "vgg": vgg}


def subject(text: str) -> Subject:
    """Return the model that "name" or "name:option=value:option=value" describes.

    Raises ConfigurationError that lists the known names or the model's options.
    """
    name, *settings = text.split(":")
    if name not in MODELS:
        raise ConfigurationError(f"model {name!r} is unknown; known models: {', '.join(MODELS)}")
    known = inspect.signature(MODELS[name]).parameters
    options: dict[str, int] = {}
    for setting in settings:
        option, _, value = setting.partition("=")
        if option not in known or not value.isdecimal() or value.strip("0") == "":
            raise ConfigurationError(
                f"{setting!r} in {text!r} is no option=number above 0; {name} takes {', '.join(known)}"
            )
        options[option] = literal_eval(value)
    return replace(MODELS[name](**options), name=text)


def _resnet50(width: int) -> nn.Module:
    model = ResNet50(width)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return model


def _vgg(width: int, hidden: int, pixels: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for scale in (1, 2, 4, 8, 8):
        layers += [nn.Conv2d(channels, scale * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = scale * width
    features = channels * (pixels // 32) ** 2
    widths = (features, hidden, hidden, CLASSES)
    layers.append(nn.Flatten())
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
