"""Block quantization: values to payload rows and back, their sum, and the sum encoded again."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.errors import ConfigurationError
from commopt.kernels import quantize_cuda, reference
from commopt.kernels.checks import check_carry, check_rows, check_total, check_values
from commopt.kernels.codec import Carry, Codec, Dice
from commopt.kernels.loader import Loader, loader_for


def encode(
    codec: Codec, values: Tensor, payload: Tensor, chunk_numel: int, scale: float, carry: Carry | None, dice: Dice
) -> None:
    """Encode p = `scale * values` (+ the carry) into the rows of `payload`; see Compressor.compress."""
    _check_rows(codec, payload, chunk_numel)
    check_values(values, payload, chunk_numel)
    check_carry(carry, values.numel(), payload)
    loader = _loader(payload, values.dtype)
    if loader is None:
        reference.encode(codec, values, payload, chunk_numel, scale, carry, dice)
    else:
        quantize_cuda.encode(loader, codec, values, payload, chunk_numel, scale, carry, dice)


def decode(codec: Codec, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
    """Decode the rows of `payload` into `values`; see Compressor.decompress."""
    _check_rows(codec, payload, chunk_numel)
    check_values(values, payload, chunk_numel)
    loader = _loader(payload, values.dtype)
    if loader is None:
        reference.decode(codec, payload, values, chunk_numel)
    else:
        quantize_cuda.decode(loader, codec, payload, values, chunk_numel)


def accumulate(codec: Codec, payloads: Tensor, total: Tensor) -> None:
    """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, in row order."""
    _check_rows(codec, payloads, total.numel())
    check_values(total, payloads, total.numel())
    check_total(total)
    loader = _loader(payloads, total.dtype)
    if loader is None:
        reference.accumulate(codec, payloads, total)
    else:
        quantize_cuda.accumulate(loader, codec, payloads, total)


def recode(
    codec: Codec,
    payloads: Tensor,
    payload: Tensor,
    chunk_numel: int,
    numel: int,
    carry: Carry | None,
    dice: Dice,
) -> None:
    """Encode the sum of the rows of `payloads`, whose first `numel` elements are real, into the row `payload`."""
    _check_rows(codec, payloads, chunk_numel)
    _check_rows(codec, payload, chunk_numel)
    if not (payload.shape[0] == 1 and 0 <= numel <= chunk_numel):
        raise ConfigurationError(
            f"{numel} elements in {payload.shape[0]} rows of {chunk_numel}; a sum has one row and fits into it"
        )
    check_carry(carry, numel, payload)
    loader = _loader(payload, torch.float32)
    if loader is None:
        reference.recode(codec, payloads, payload, chunk_numel, numel, carry, dice)
    else:
        quantize_cuda.recode(loader, codec, payloads, payload, chunk_numel, numel, carry, dice)


def finite(codec: Codec, payload: Tensor, chunk_numel: int) -> Tensor:
    """Return whether all rows decode to finite values: bool, 0-d."""
    _check_rows(codec, payload, chunk_numel)
    return reference.finite(codec, payload, chunk_numel)


def _loader(payload: Tensor, dtype: torch.dtype) -> Loader | None:
    """Return what launches the kernel for values of `dtype`, None where the reference must run."""
    if payload.device.type != "cuda" or dtype not in quantize_cuda.DTYPES:
        return None
    return loader_for(payload.device)


def _check_rows(codec: Codec, payload: Tensor, chunk_numel: int) -> None:
    if chunk_numel % codec.block or chunk_numel < 0:
        raise ConfigurationError(
            f"a chunk of {chunk_numel} elements is no multiple of the block, {codec.block}; pad it"
        )
    check_rows(payload, chunk_numel, codec.payload_nbytes(chunk_numel))
