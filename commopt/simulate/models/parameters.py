"""What a simulation knows of a model: the shapes of its parameters, and what their layers compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from commopt.document import require_text, require_time, require_whole


@dataclass(frozen=True)
class Parameter:
    """One parameter; `forward_flops`: of its layer in forward for one sample, a multiply-add being two.

    A layer's FLOPs stand at one of its parameters, the weight; the others have 0.
    """

    name: str
    shape: tuple[int, ...]
    forward_flops: float = 0

    def __post_init__(self) -> None:
        require_text(self.name, "parameter: name")
        for extent in self.shape:
            require_whole(extent, 1, f"parameter {self.name!r}: an extent of its shape")
        require_time(self.forward_flops, f"parameter {self.name!r}: forward_flops")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def layer(self) -> str:
        """Name of the module it belongs to; its own where it belongs to none."""
        return self.name.rpartition(".")[0] or self.name


@dataclass(frozen=True)
class Model:
    """Parameters in the order in which forward uses them, tied ones once, where they are used first.

    A tied weight stands there because its gradient is complete only when backward has come to its first use. sample:
    what the FLOPs are counted for, in words.
    """

    name: str
    parameters: tuple[Parameter, ...]
    sample: str

    @cached_property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of one sample's forward."""
        return sum(parameter.forward_flops for parameter in self.parameters)

    @cached_property
    def convolutional(self) -> bool:
        """Whether most FLOPs are those of convolutions, whose weights have four extents."""
        inside = sum(parameter.forward_flops for parameter in self.parameters if len(parameter.shape) == 4)
        return inside > self.forward_flops / 2
