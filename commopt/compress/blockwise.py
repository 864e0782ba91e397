"""What the block compressors share: a codec, and the kernels that know it."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from commopt.compress.base import Compressor
from commopt.errors import ConfigurationError
from commopt.kernels import quantize
from commopt.kernels.codec import Codec, Dice, ErrorFeedback

_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 4096


class Blockwise(Compressor):
    """A few bits per element and a scale for each block of elements; subclasses choose the codec."""

    @property
    @abstractmethod
    def codec(self) -> Codec:
        """What the kernels are told."""

    @property
    def granularity(self) -> int:
        """See Compressor."""
        return self.codec.block

    @property
    def error_bound(self) -> float:
        """See Compressor; of the block's largest."""
        return self.codec.error_bound

    def payload_nbytes(self, chunk_numel: int) -> int:
        """See Compressor."""
        return self.codec.payload_nbytes(chunk_numel)

    def compress(
        self,
        values: Tensor,
        payload: Tensor,
        chunk_numel: int,
        scale: float,
        carry: ErrorFeedback | None = None,
        dice: Dice = Dice(),
    ) -> None:
        """See Compressor."""
        quantize.encode(self.codec, values, payload, chunk_numel, scale, carry, dice)

    def decompress(self, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
        """See Compressor."""
        quantize.decode(self.codec, payload, values, chunk_numel)

    def accumulate(self, payloads: Tensor, total: Tensor) -> None:
        """See Compressor."""
        quantize.accumulate(self.codec, payloads, total)

    def recompress(
        self,
        payloads: Tensor,
        payload: Tensor,
        chunk_numel: int,
        numel: int,
        carry: ErrorFeedback | None = None,
        dice: Dice = Dice(),
    ) -> None:
        """See Compressor; the sum never leaves the kernel."""
        quantize.recode(self.codec, payloads, payload, chunk_numel, numel, carry, dice)

    def finite(self, payload: Tensor, chunk_numel: int) -> Tensor:
        """See Compressor; the scales tell."""
        return quantize.finite(self.codec, payload, chunk_numel)


def check(owner: str, block: int, start_step: int) -> None:
    """Raise ConfigurationError unless the fields that all block compressors have are valid."""
    if type(block) is not int or not _SMALLEST_BLOCK <= block <= _LARGEST_BLOCK or block % _SMALLEST_BLOCK:
        raise ConfigurationError(
            f"{owner}(block={block!r}) is no block length; use a multiple of {_SMALLEST_BLOCK} from {_SMALLEST_BLOCK} "
            f"to {_LARGEST_BLOCK}: short blocks are more exact, long ones spend fewer bytes on scales"
        )
    if type(start_step) is not int or start_step < 0:
        raise ConfigurationError(
            f"{owner}(start_step={start_step!r}) is no step; give the first step to compress, 0 for all"
        )


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ConfigurationError unless `value` is one of `choices`."""
    if value not in choices or type(value) is not type(choices[0]):
        raise ConfigurationError(f"{owner}({name}={value!r}) is unknown; use one of {', '.join(map(repr, choices))}")
