"""What the kernels of block quantization agree on: the codecs, the layout of a payload row, what they are handed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

TINY = 2.0**-100
"""A block whose absmax is below is encoded as zeros: t / absmax must not overflow."""

ROW_ALIGNMENT = 16
_SCALE_NBYTES = 4

LEVELS = tuple(h + h * h / 2 for h in (k + 0.5 for k in range(8)))
"""Magnitudes of the companded codec, in units of its scale; all exact in float32."""

CENTROID_SPLIT = 1.05
"""The centroids codec calls an element large when it exceeds this many times the root mean square."""

CodecName = Literal["uniform", "companded", "centroids", "sign_mean", "sign_rms"]


@dataclass(frozen=True)
class Momentum:
    """How a velocity u follows the gradients g: u <- factor u + g, or factor (u + g) with Nesterov's momentum.

    masking: where an element was sent its velocity starts from zero (arXiv 1712.01887, section 3.2).
    """

    factor: float
    nesterov: bool = False
    masking: bool = True


@dataclass(frozen=True)
class Velocity:
    """The velocity before and after an encoding: float32 [numel], never the same memory, unscaled as there."""

    old: Tensor
    new: Tensor
    momentum: Momentum


@dataclass(frozen=True)
class Carry:
    """What an encoding takes over from the last one, and what it leaves to the next.

    `old` and `new` are float32 [numel], never the same memory. Both are held unscaled: `loss_scale` (0-d float32 on
    their device, None for 1) is what the values were multiplied by. A `velocity` is for compressors with a momentum.
    """

    old: Tensor
    new: Tensor
    loss_scale: Tensor | None = None
    decay: float = 1.0
    velocity: Velocity | None = None


@dataclass(frozen=True)
class Dice:
    """Where the random bits of a stochastic rounding come from: equal dice fall alike on every machine."""

    seed: int = 0
    step: int = 0
    stream: int = 0


@dataclass(frozen=True)
class Codec:
    """How blocks of `block` elements become codes of `bits` bits, packed little-endian, and one 4-byte scale each.

    A row of payload holds the codes of its chunk, then the scales, then zeros up to a multiple of 16 bytes.
    """

    name: CodecName
    bits: int
    block: int
    stochastic: bool = False

    def codes_nbytes(self, chunk_numel: int) -> int:
        """Return where in a row the scales begin."""
        return chunk_numel * self.bits // 8

    def payload_nbytes(self, chunk_numel: int) -> int:
        """Return the bytes of a row."""
        nbytes = self.codes_nbytes(chunk_numel) + _SCALE_NBYTES * (chunk_numel // self.block)
        return -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def error_bound(self) -> float:
        """The largest error of an element, as a share of its block's largest."""
        if self.name == "uniform":
            return (1.0 if self.stochastic else 0.5) / ((1 << (self.bits - 1)) - 1)
        if self.name == "companded":
            return (LEVELS[-1] - LEVELS[-2]) / 2 / LEVELS[-1]
        return 1.0  # all that is known of an element is on which side of a mean it is

    @property
    def zero_byte(self) -> int:
        """Packed codes of elements that are zero."""
        if self.name != "uniform":
            return 0
        return sum(1 << (shift + self.bits - 1) for shift in range(0, 8, self.bits))
