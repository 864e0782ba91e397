"""8, 4 or 2 bits per element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commopt.compress.blockwise import Blockwise, check, check_choice
from commopt.errors import ConfigurationError
from commopt.kernels.codec import Codec, CodecName

_NONUNIFORM: dict[int, CodecName] = {4: "companded", 2: "centroids"}


@dataclass(frozen=True, repr=False)
class Quantize(Blockwise):
    """Round every element to one of 2^bits levels that are fitted to its block.

    block: elements that share a scale of 4 bytes; a multiple of 64.
    levels: "uniform" are multiples of the block's absmax / (2^(bits-1) - 1). "nonuniform" are denser where gradients
        are: 16 levels whose spacing grows with their magnitude (4 bits), or the mean magnitudes of the small and of the
        large elements (2 bits). None takes the nonuniform ones where they exist: 4 and 2 bits, nearest rounding.
    rounding: "stochastic" rounds up or down at random, so that the mean over steps is exact even without feedback; one
        step is less exact than with "nearest".
    start_step: steps before travel dense.
    """

    bits: Literal[8, 4, 2] = 8
    block: int = 512
    levels: Literal["uniform", "nonuniform"] | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    start_step: int = 0

    def __post_init__(self) -> None:
        check_choice("Quantize", "bits", self.bits, (8, 4, 2))
        check("Quantize", self.block, self.start_step)
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

    @property
    def throws_dice(self) -> bool:
        """See Compressor."""
        return self.codec.stochastic

    @property
    def codec(self) -> Codec:
        """See Blockwise."""
        stochastic = self.rounding == "stochastic"
        if self.levels == "uniform" or stochastic or self.bits == 8:
            return Codec("uniform", self.bits, self.block, stochastic)
        return Codec(_NONUNIFORM[self.bits], self.bits, self.block)
