"""Three kinds of model that want different buckets: many small layers, few large ones, a transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from examples.train_gpt import VOCABULARY, Block


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
