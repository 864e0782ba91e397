# SPDX-License-Identifier: Apache-2.0
"""One bit per element: signs, and one magnitude per block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from commopt.compress.quantize import Blockwise, check, check_choice
from commopt.kernels.codec import Codec


@dataclass(frozen=True, repr=False)
class OneBit(Blockwise):
    """Send signs and a magnitude per block, as 1-bit Adam does (arXiv 2102.02888).

    One step misses two thirds of a gradient's norm, so feedback is not optional, and a dense start is advised.
    Tensors of one dimension travel dense: a bias is not of the magnitude of the weights beside it, which shows.

    block: elements that share a magnitude of 4 bytes; a multiple of 64.
    scale: the magnitude: "rms", 1-bit Adam's, which keeps the norm and learned better where we measured; or "mean"
        of |x|, that of EF-SignSGD (arXiv 1901.09847), which has the least square error of one step.
    start_step: steps before travel dense.
    """

    block: int = 512
    scale: Literal["mean", "rms"] = "rms"
    start_step: int = 0

    def __post_init__(self) -> None:
        check("OneBit", self.block, self.start_step)
        check_choice("OneBit", "scale", self.scale, ("mean", "rms"))

    def should_compress(self, shape: tuple[int, ...]) -> bool:
        """Not one dimension: biases and the weights of norms are few, and rarely of their neighbours' magnitude."""
        return len(shape) != 1

    @cached_property
    def codec(self) -> Codec:
        """Signs, and one of two magnitudes."""
        return Codec("sign_mean" if self.scale == "mean" else "sign_rms", 1, self.block)
