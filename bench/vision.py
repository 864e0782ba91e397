# SPDX-License-Identifier: Apache-2.0
"""Networks for images that are trained at their full size: ResNet-50 and Swin-T."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, scaled_dot_product_attention

CLASSES = 1000

_STAGES = ((1, 3, 1), (2, 4, 2), (4, 6, 2), (8, 3, 2))  # of the width, blocks, stride
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
    """ResNet-50: images [batch, 3, height, width] in, logits [batch, 1000] out.

    width: of the first stage. At 64 it has 25.6 million parameters in 161 tensors.
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        channels = width
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        ]
        for scale, blocks, stride in _STAGES:
            for index in range(blocks):
                layers.append(Bottleneck(channels, scale * width, stride if index == 0 else 1))
                channels = scale * width * _EXPANSION
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits."""
        logits: Tensor = self.layers(images)
        return logits


_SWIN_STAGES = ((2, 3), (2, 6), (6, 12), (2, 24))  # blocks, heads
_LARGEST_WINDOW = 7


class WindowAttention(nn.Module):
    """Attention inside windows, with a bias for every relative position (Liu et al., arXiv 2103.14030, section 3.2).

    window: length of a side in patches; shift: by how many patches windows are moved, 0 or half a window.
    """

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads = heads
        self.window = window
        self.shift = shift
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, 2 * window - 1, 2 * window - 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map patches [batch, side, side, width] to as many."""
        batch, side, _, width = x.shape
        window, count = self.window, side // self.window
        place = torch.arange(window, device=x.device)
        offsets = (place[:, None] - place).add(window - 1)  # [window, window]
        rows, cols = offsets[:, None, :, None], offsets[None, :, None, :]
        scores = self.bias[:, rows, cols].flatten(3).flatten(1, 2)  # [heads, window^2, window^2]
        if self.shift:
            x = x.roll((-self.shift, -self.shift), (1, 2))
            scores = scores + self._mask(side, x.device)[:, None]
        windows = x.view(batch, count, window, count, window, width).transpose(2, 3)
        qkv = self.qkv(windows.reshape(batch, count**2, window**2, width))
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)  # [batch, windows, heads, ...]
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=scores.expand(batch, count**2, -1, -1, -1))
        mixed = mixed.transpose(2, 3).reshape(batch, count, count, window, window, width)
        x = self.project(mixed.transpose(2, 3).reshape(batch, side, side, width))
        return x.roll((self.shift, self.shift), (1, 2)) if self.shift else x

    def _mask(self, side: int, device: torch.device) -> Tensor:
        """Minus infinity between patches that only the shift has brought together: [windows, window^2, window^2]."""
        window = self.window
        place = torch.arange(side, device=device)
        part = (place >= side - window).int() + (place >= side - self.shift).int()
        regions = (3 * part[:, None] + part).view(side // window, window, side // window, window)
        regions = regions.transpose(1, 2).reshape(-1, window**2)
        apart = regions[:, :, None] != regions[:, None, :]
        return torch.zeros(apart.shape, device=device).masked_fill(apart, float("-inf"))


class SwinBlock(nn.Module):
    """Attention and a perceptron, each normalized before and added to what came in."""

    def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), WindowAttention(width, heads, window, shift))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map patches [batch, side, side, width] to as many."""
        x = x + self.attention(x)
        mapped: Tensor = x + self.perceptron(x)
        return mapped


class PatchMerging(nn.Module):
    """Makes one patch of four."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, side, side, width] to [batch, side / 2, side / 2, 2 * width]."""
        batch, side, _, width = x.shape
        fours = x.view(batch, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 4, 2, 5).flatten(3)
        merged: Tensor = self.reduce(self.norm(fours))
        return merged


def check_pixels(pixels: int) -> None:
    """Raise ValueError unless Swin-T can take images of this side."""
    if pixels % 32:
        raise ValueError(
            f"--pixels {pixels}: swin-t needs a multiple of 32, as it halves its map of patches three times"
        )


class SwinT(nn.Module):
    """Swin-T: images [batch, 3, pixels, pixels] in, logits [batch, 1000] out; 28.3 million parameters in 173 tensors.

    pixels: a multiple of 32. Windows are as long as divides the side of a stage, at most 7, which they are at 224.
    """

    def __init__(self, pixels: int = 224, width: int = 96) -> None:
        super().__init__()
        if pixels % 32:
            raise ValueError(
                f"pixels {pixels} must be a multiple of 32: Swin halves the side of its patches three times"
            )
        side = pixels // 4
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.norm = nn.LayerNorm(width)
        stages: list[nn.Module] = []
        for index, (blocks, heads) in enumerate(_SWIN_STAGES):
            if index:
                stages.append(PatchMerging(width))
                side, width = side // 2, 2 * width
            window = max(length for length in range(1, _LARGEST_WINDOW + 1) if side % length == 0)
            shift = window // 2 if side > window else 0
            stages += [SwinBlock(width, heads, window, shift * (block % 2)) for block in range(blocks)]
        self.stages = nn.Sequential(*stages, nn.LayerNorm(width))
        self.head = nn.Linear(width, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to logits."""
        patches = self.norm(self.embed(images).permute(0, 2, 3, 1))
        logits: Tensor = self.head(self.stages(patches).mean((1, 2)))
        return logits
