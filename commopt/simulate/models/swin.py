"""Swin-T (Liu et al., arXiv 2103.14030), with names as in torchvision."""

from __future__ import annotations

from collections.abc import Iterator

from commopt.simulate.models.layers import attention_flops, convolution, linear, norm
from commopt.simulate.models.parameters import Model, Parameter

_PIXELS = 224
_PATCH = 4
_WIDTH = 96
_STAGES = ((2, 3), (2, 6), (6, 12), (2, 24))  # blocks, heads
_WINDOW = 7
_CLASSES = 1000


def swin_t() -> Model:
    """Return the model of 28,288,354 parameters."""
    return Model("swin-t", tuple(_parameters()), f"image of {_PIXELS} x {_PIXELS} pixels")


def _parameters() -> Iterator[Parameter]:
    width, side = _WIDTH, _PIXELS // _PATCH
    yield from convolution("features.0.0", 3, width, _PATCH, side, bias=True)
    yield from norm("features.0.2", width)
    for stage, (blocks, heads) in enumerate(_STAGES):
        if stage:
            width, side = 2 * width, side // 2
            yield from norm(f"features.{2 * stage}.norm", 2 * width)
            yield from linear(f"features.{2 * stage}.reduction", 2 * width, width, side**2, bias=False)
        for block in range(blocks):
            yield from _block(f"features.{2 * stage + 1}.{block}", width, heads, side**2)
    yield from norm("norm", width)
    yield from linear("head", width, _CLASSES)


def _block(name: str, width: int, heads: int, tokens: int) -> Iterator[Parameter]:
    attention = attention_flops(tokens, _WINDOW**2, width)
    yield from norm(f"{name}.norm1", width)
    yield from linear(f"{name}.attn.qkv", width, 3 * width, tokens)
    yield Parameter(f"{name}.attn.relative_position_bias_table", ((2 * _WINDOW - 1) ** 2, heads))
    yield from linear(f"{name}.attn.proj", width, width, tokens, more_flops=attention)
    yield from norm(f"{name}.norm2", width)
    yield from linear(f"{name}.mlp.0", width, 4 * width, tokens)
    yield from linear(f"{name}.mlp.3", 4 * width, width, tokens)
