"""VGG-16 (Simonyan, Zisserman, arXiv 1409.1556, configuration D), with names as in torchvision."""

from __future__ import annotations

from collections.abc import Iterator

from commopt.simulate.models.layers import convolution, linear
from commopt.simulate.models.parameters import Model, Parameter

_PIXELS = 224
_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # width, 3x3 convolutions before each pooling
_HIDDEN = 4096
_CLASSES = 1000


def vgg16() -> Model:
    """Return the model of 138,357,544 parameters, nine tenths of them in three linear layers."""
    return Model("vgg16", tuple(_parameters()), f"image of {_PIXELS} x {_PIXELS} pixels")


def _parameters() -> Iterator[Parameter]:
    channels, pixels, place = 3, _PIXELS, 0
    for width, convolutions in _STAGES:
        for _ in range(convolutions):
            yield from convolution(f"features.{place}", channels, width, 3, pixels, bias=True)
            channels, place = width, place + 2  # an activation follows
        pixels, place = pixels // 2, place + 1
    yield from linear("classifier.0", channels * pixels**2, _HIDDEN)
    yield from linear("classifier.3", _HIDDEN, _HIDDEN)
    yield from linear("classifier.6", _HIDDEN, _CLASSES)
