"""A small vision transformer: many matrices of the same few shapes, and no batch statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.models.images import CLASSES
from commopt import ConfigurationError

_PATCH = 8  # pixels
_WIDTH = 256
_DEPTH = 6
_HEADS = 4


class ViT(nn.Module):
    """5 million parameters: images [batch, 3, pixels, pixels] in, logits [batch, 1000] out.

    As in Dosovitskiy et al., arXiv 2010.11929, section 3.1, with the mean over patches in place of a class token.
    Raises ConfigurationError when the image is not made of whole patches.
    """

    def __init__(self, pixels: int) -> None:
        super().__init__()
        if pixels < _PATCH or pixels % _PATCH:
            raise ConfigurationError(f"--pixels {pixels} must be a multiple of a patch, {_PATCH}; take 32")
        self.patches = nn.Conv2d(3, _WIDTH, _PATCH, _PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((pixels // _PATCH) ** 2, _WIDTH))
        layer = nn.TransformerEncoderLayer(
            _WIDTH, _HEADS, 4 * _WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, _DEPTH, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.blocks(tokens).mean(dim=1))
        return logits
