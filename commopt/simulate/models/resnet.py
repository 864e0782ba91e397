"""ResNet-50 (He et al., arXiv 1512.03385), with the stride in the 3x3 convolutions and names as in torchvision."""

from __future__ import annotations

from collections.abc import Iterator

from commopt.document import require_whole
from commopt.simulate.models.layers import convolution, linear, norm
from commopt.simulate.models.parameters import Model, Parameter

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # width, blocks, stride
_EXPANSION = 4
_CLASSES = 1000


def resnet50(pixels: int = 224) -> Model:
    """Return the model of 25,557,032 parameters for images of `pixels` x `pixels`."""
    require_whole(pixels, 1, "resnet50: pixels")
    return Model("resnet50", tuple(_parameters(pixels)), f"image of {pixels} x {pixels} pixels")


def _parameters(pixels: int) -> Iterator[Parameter]:
    channels = _STAGES[0][0]
    pixels = _strided(pixels, 2)
    yield from convolution("conv1", 3, channels, 7, pixels)
    yield from norm("bn1", channels)
    pixels = _strided(pixels, 2)  # max pooling
    for stage, (width, blocks, stride) in enumerate(_STAGES, start=1):
        for block in range(blocks):
            own_stride = stride if block == 0 else 1
            yield from _bottleneck(f"layer{stage}.{block}", channels, width, pixels, own_stride)
            channels, pixels = width * _EXPANSION, _strided(pixels, own_stride)
    yield from linear("fc", channels, _CLASSES)


def _bottleneck(name: str, inputs: int, width: int, pixels: int, stride: int) -> Iterator[Parameter]:
    outputs, pixels_after = width * _EXPANSION, _strided(pixels, stride)
    yield from convolution(f"{name}.conv1", inputs, width, 1, pixels)
    yield from norm(f"{name}.bn1", width)
    yield from convolution(f"{name}.conv2", width, width, 3, pixels_after)
    yield from norm(f"{name}.bn2", width)
    yield from convolution(f"{name}.conv3", width, outputs, 1, pixels_after)
    yield from norm(f"{name}.bn3", outputs)
    if stride > 1 or inputs != outputs:
        yield from convolution(f"{name}.downsample.0", inputs, outputs, 1, pixels_after)
        yield from norm(f"{name}.downsample.1", outputs)


def _strided(pixels: int, stride: int) -> int:
    return -(-pixels // stride)
