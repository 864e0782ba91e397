"""VGG-11 for small images: nearly half of its bytes are in three linear layers, whose gradients come first."""

from __future__ import annotations

from torch import Tensor, nn

from bench.models.images import CLASSES

# Configuration A of Simonyan and Zisserman, arXiv 1409.1556, table 1; None is a max pooling.
_LAYERS = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)
_HIDDEN = 2048  # half of the paper's, and one position in place of 7 x 7: an eighth of its parameters


class VGG11(nn.Module):
    """16.5 million parameters in 38 tensors: images [batch, 3, height, width] in, logits [batch, 1000] out."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in _LAYERS:
            if width is None:
                layers.append(nn.MaxPool2d(2, ceil_mode=True))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        for _ in range(2):
            layers += [nn.Linear(channels, _HIDDEN), nn.ReLU(inplace=True)]
            channels = _HIDDEN
        self.layers = nn.Sequential(*layers, nn.Linear(channels, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        logits: Tensor = self.layers(images)
        return logits
