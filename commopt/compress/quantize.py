# SPDX-License-Identifier: Apache-2.0
"""A few bits per element and a scale for each block: the base of block compressors, and 8, 4 or 2 bits."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from commopt.compress.base import Candidates, Compressor
from commopt.errors import ConfigurationError, did_you_mean
from commopt.kernels import quantize
from commopt.kernels.codec import Codec, CodecName, Encoding, Scattered

_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 4096
# To AdamW small gradients matter as much as large ones. With 2 bits they come out as noise beside larger ones: longer
# blocks would save too few bytes for that.
_BLOCK = {8: 512, 4: 512, 2: 64}
_NONUNIFORM: dict[int, CodecName] = {4: "companded", 2: "centroids"}


class Blockwise(Compressor):
    """A few bits per element and a scale for each block of elements; subclasses choose the codec."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """The codec of the kernels."""

    @property
    def granularity(self) -> int:
        """Whole blocks."""
        return self.codec.block

    @property
    def error_bound(self) -> float:
        """The error bound of the codec, as a share of the block's largest element."""
        return self.codec.error_bound

    @property
    def codec_without_zero(self) -> Codec | None:
        """Signs, and levels that are denser towards zero, which is none of them."""
        return None if self.codec.has_zero else self.codec

    def payload_nbytes(self, chunk_numel: int) -> int:
        """Return the bytes of codes and scales."""
        return self.codec.payload_nbytes(chunk_numel)

    def compress(self, values: Tensor | Scattered, payload: Tensor, encoding: Encoding) -> None:
        """Encode block by block."""
        quantize.encode(self.codec, values, payload, encoding)

    def decompress(self, payload: Tensor, values: Tensor | Scattered, chunk_numel: int) -> None:
        """Decode block by block."""
        quantize.decode(self.codec, payload, values, chunk_numel)

    def accumulate(self, payloads: Tensor, total: Tensor | Scattered) -> None:
        """Decode and add in one pass."""
        quantize.accumulate(self.codec, payloads, total)

    def recompress(self, payloads: Tensor, payload: Tensor, numel: int, encoding: Encoding) -> None:
        """Encode the sum, which never leaves the kernel."""
        quantize.recode(self.codec, payloads, payload, numel, encoding)

    def finite(self, payload: Tensor, chunk_numel: int) -> Tensor:
        """Look at the scales."""
        return quantize.finite(self.codec, payload, chunk_numel)


def check(whose: str, block: int, start_step: int) -> None:
    """Raise ConfigurationError unless the fields that all block compressors have are valid."""
    if type(block) is not int or not _SMALLEST_BLOCK <= block <= _LARGEST_BLOCK or block % _SMALLEST_BLOCK:
        raise ConfigurationError(
            f"{whose}(block={block!r}) is no block length; use a multiple of {_SMALLEST_BLOCK} from {_SMALLEST_BLOCK} "
            f"to {_LARGEST_BLOCK}: short blocks are more exact, long ones spend fewer bytes on scales"
        )
    if type(start_step) is not int or start_step < 0:
        raise ConfigurationError(
            f"{whose}(start_step={start_step!r}) is no step; give the first step to compress, 0 for all"
        )


def check_choice(whose: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ConfigurationError unless `value` is one of `choices`."""
    if value not in choices or type(value) is not type(choices[0]):
        meant = did_you_mean(value, choices) or ";"
        raise ConfigurationError(
            f"{whose}({name}={value!r}) is unknown{meant} use one of {', '.join(map(repr, choices))}"
        )


@dataclass(frozen=True, repr=False)
class Quantize(Blockwise):
    """Round every element to one of 2^bits levels that are fitted to its block.

    block: elements that share a scale of 4 bytes; a multiple of 64. None: 512, and 64 with 2 bits.
    levels: "uniform" are multiples of the block's absmax / (2^(bits-1) - 1). "nonuniform" are denser where gradients
        are: 16 levels whose spacing grows with their magnitude (4 bits), or the mean magnitudes of the small and of the
        large elements (2 bits). None takes the nonuniform ones where they exist: 4 and 2 bits, nearest rounding.
    rounding: "stochastic" rounds up or down at random, so that the mean over steps is exact even without feedback; one
        step is less exact than with "nearest".
    start_step: steps before travel dense.
    """

    bits: Literal[8, 4, 2] = 8
    block: int | None = None
    levels: Literal["uniform", "nonuniform"] | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    start_step: int = 0

    def __post_init__(self) -> None:
        check_choice("Quantize", "bits", self.bits, (8, 4, 2))
        check("Quantize", self.codec.block, self.start_step)
        if self.levels is not None:
            check_choice("Quantize", "levels", self.levels, ("uniform", "nonuniform"))
        check_choice("Quantize", "rounding", self.rounding, ("nearest", "stochastic"))
        if self.levels == "nonuniform" and self.bits == 8:
            raise ConfigurationError(
                "Quantize(bits=8, levels='nonuniform') does not exist, since 255 uniform levels leave little to gain; "
                "use levels='uniform'"
            )
        if self.levels == "nonuniform" and self.rounding == "stochastic":
            raise ConfigurationError(
                "Quantize(levels='nonuniform', rounding='stochastic') does not exist, since these levels minimize the "
                "error of one rounding and have no value for zero; use levels='uniform' or rounding='nearest'"
            )

    @cached_property
    def stochastic(self) -> bool:
        """With rounding="stochastic"."""
        return self.codec.stochastic

    @cached_property
    def codec(self) -> Codec:
        """The uniform codec, or the nonuniform one of as many bits."""
        stochastic = self.rounding == "stochastic"
        block = _BLOCK[self.bits] if self.block is None else self.block
        if self.levels == "uniform" or stochastic or self.bits == 8:
            return Codec("uniform", self.bits, block, stochastic)
        return Codec(_NONUNIFORM[self.bits], self.bits, block)

    @classmethod
    def candidates(cls) -> Candidates[Compressor]:
        """Return 8, 4 and 2 bits; the error of 4 bits is the usual limit."""
        return Candidates("quantized", tuple(cls(bits) for bits in (8, 4, 2)), usual=1)
