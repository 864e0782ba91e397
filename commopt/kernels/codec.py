# SPDX-License-Identifier: Apache-2.0
"""Shared by the kernels of compression: codecs, rows of payload, how values are encoded, checks of arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from commopt.errors import ConfigurationError, UnsupportedTensorError

TINY = 2.0**-100
"""A block whose absmax is below is encoded as zeros: t / absmax must not overflow."""

ROW_ALIGNMENT = 16
_SCALE_NBYTES = 4

LEVELS = tuple(h + h * h / 2 for h in (k + 0.5 for k in range(8)))
"""Magnitudes of the companded codec, in units of its scale; all exact in float32."""

CENTROID_SPLIT = 1.05
"""The centroids codec calls an element large when it exceeds this many times the root mean square."""

CodecName = Literal["uniform", "companded", "centroids", "sign_mean", "sign_rms"]


# Of these two, one is made for every encoding. Frozen dataclasses take several times as long to make.
@dataclass(eq=False, slots=True)
class ErrorFeedback:
    """The residual that goes into an encoding, and the memory for the residual that comes out of it.

    old: the residual of the last encoding, float32 [numel], unscaled.
    new: memory for the next residual, float32 [numel], unscaled; never the memory of `old`.
    loss_scale: the factor that the values were multiplied by, 0-d float32 on their device; None for 1.
    decay: the share of `old` that is added.
    """

    old: Tensor
    new: Tensor
    loss_scale: Tensor | None = None
    decay: float = 1.0

    def cut(self, begin: int, end: int) -> ErrorFeedback:
        """Return the residuals of elements [begin, end), in the same memory."""
        return ErrorFeedback(self.old[begin:end], self.new[begin:end], self.loss_scale, self.decay)


@dataclass(frozen=True)
class RngKey:
    """Where the random bits of a stochastic rounding come from: equal keys give equal bits on every machine."""

    seed: int = 0
    step: int = 0
    stream: int = 0


_NO_KEY = RngKey()


@dataclass(eq=False, slots=True)
class Encoding:
    """How values are encoded: the argument of a compressor beside values and payload.

    chunk_numel: the elements of a row, the last row's padding included.
    scale: the factor of the values.
    residual: the residual to add, and memory for the new one; None for no error feedback.
    rng_key: the key of the random bits, for stochastic rounding.
    """

    chunk_numel: int
    scale: float = 1.0
    residual: ErrorFeedback | None = None
    rng_key: RngKey = _NO_KEY


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
        return 1.0  # a code only says on which side of a mean an element is

    @property
    def has_zero(self) -> bool:
        """Whether an element that is zero comes out as zero beside others that are not."""
        return self.name == "uniform"

    @property
    def zero_byte(self) -> int:
        """Packed codes of elements that are zero."""
        if self.name != "uniform":
            return 0
        return sum(1 << (shift + self.bits - 1) for shift in range(0, 8, self.bits))


DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The dtypes of values that the CUDA kernels take, each with its number there."""

_FLOATING = (*DTYPES, torch.float64)


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor for a kernel, null for none."""
    return 0 if tensor is None else tensor.data_ptr()


def check_rows(payload: Tensor, chunk_numel: int, nbytes: int) -> None:
    """Raise ConfigurationError unless `payload` holds aligned, gapless rows of `nbytes` bytes."""
    if payload.dtype != torch.uint8 or payload.dim() != 2 or payload.shape[1] != nbytes:
        raise ConfigurationError(
            f"payload is {payload.dtype} {tuple(payload.shape)}; rows of {chunk_numel} elements are uint8 "
            f"[rows, {nbytes}]"
        )
    gaps = nbytes > 1 and payload.stride(1) != 1
    if gaps or (payload.shape[0] > 1 and payload.stride(0) % ROW_ALIGNMENT) or payload.data_ptr() % ROW_ALIGNMENT:
        raise ConfigurationError(
            f"payload has strides {payload.stride()} from byte {payload.storage_offset()}; its rows must be gapless "
            f"and start at multiples of {ROW_ALIGNMENT} bytes"
        )


@dataclass(frozen=True, eq=False)
class Scattered:
    """Elements of a 1-D contiguous buffer in parts, which kernels of block quantization read and write where they are.

    parts: int64 [n, 3] on the device of the buffer: where each begins in the buffer, where among the elements, and how
        many there are; in the order of the elements, of which none is missing. None where they are the whole buffer.
    """

    buffer: Tensor
    parts: Tensor | None
    numel: int

    @property
    def arguments(self) -> tuple[int, int]:
        """What the kernels take."""
        return (0, 0) if self.parts is None else (self.parts.data_ptr(), len(self.parts))


def check_values(values: Tensor, payload: Tensor, chunk_numel: int, numel: int | None = None) -> None:
    """Raise an error unless `values` are floating, 1-D, contiguous, on the device of `payload`, and fit into it.

    numel: of so many of them it is about; None for all.
    """
    numel = values.numel() if numel is None else numel
    if values.dtype not in _FLOATING:
        raise UnsupportedTensorError(f"values are {values.dtype}; only {', '.join(map(str, _FLOATING))} can be encoded")
    if values.dim() != 1 or not values.is_contiguous():
        raise ConfigurationError(
            f"values have shape {tuple(values.shape)} and stride {values.stride()}; they must be 1-D and contiguous: "
            "pass values.view(-1) of a contiguous tensor"
        )
    if numel > payload.shape[0] * chunk_numel:
        raise ConfigurationError(f"{numel} values do not fit into {payload.shape[0]} rows of {chunk_numel}; add rows")
    if values.device != payload.device:
        raise ConfigurationError(f"values are on {values.device} and payload on {payload.device}; move one of them")


def check_total(total: Tensor) -> None:
    """Raise UnsupportedTensorError unless sums are float32."""
    if total.dtype != torch.float32:
        raise UnsupportedTensorError(f"total is {total.dtype}; sums are float32: allocate it as torch.float32")


def check_residual(residual: ErrorFeedback | None, numel: int, payload: Tensor) -> None:
    """Raise ConfigurationError unless the residual, if any, has a float32 element for each of `numel` values."""
    if residual is None:
        return
    for name, part in (("old", residual.old), ("new", residual.new)):
        suits = part.dtype == torch.float32 and part.shape == (numel,) and part.is_contiguous()
        if not suits or part.device != payload.device:
            raise ConfigurationError(
                f"the residual's {name} is {part.dtype} {tuple(part.shape)} on {part.device}; it must be float32 "
                f"({numel},) on {payload.device}, contiguous, one element per value"
            )


def residual_arguments(residual: ErrorFeedback | None) -> tuple[int | float, ...]:
    """Return the arguments of a kernel for a residual."""
    if residual is None:
        return 0, 0, 0, 1.0
    return residual.old.data_ptr(), residual.new.data_ptr(), address(residual.loss_scale), float(residual.decay)


def rng_arguments(rng_key: RngKey) -> tuple[int | float, ...]:
    """Return the arguments of a kernel for a stochastic rounding; the numbers cross as signed ones."""
    return tuple((number + 2**63) % 2**64 - 2**63 for number in (rng_key.seed, rng_key.step, rng_key.stream))
