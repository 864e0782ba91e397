"""Block quantization: values to payload rows and back, their sum, and the sum encoded again."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.kernels import quantize_cuda, reference
from commopt.kernels.codec import ROW_ALIGNMENT, Carry, Codec, Dice
from commopt.kernels.loader import Loader, loader_for

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def encode(
    codec: Codec, values: Tensor, payload: Tensor, chunk_numel: int, scale: float, carry: Carry | None, dice: Dice
) -> None:
    """Encode p = `scale * values` (+ the carry) into the rows of `payload`; see Compressor.compress."""
    _check_rows(codec, payload, chunk_numel)
    _check_values(values, payload, chunk_numel)
    _check_carry(carry, values.numel(), payload)
    loader = _loader(payload, values.dtype)
    if loader is None:
        reference.encode(codec, values, payload, chunk_numel, scale, carry, dice)
    else:
        quantize_cuda.encode(loader, codec, values, payload, chunk_numel, scale, carry, dice)


def decode(codec: Codec, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
    """Decode the rows of `payload` into `values`; see Compressor.decompress."""
    _check_rows(codec, payload, chunk_numel)
    _check_values(values, payload, chunk_numel)
    loader = _loader(payload, values.dtype)
    if loader is None:
        reference.decode(codec, payload, values, chunk_numel)
    else:
        quantize_cuda.decode(loader, codec, payload, values, chunk_numel)


def accumulate(codec: Codec, payloads: Tensor, total: Tensor) -> None:
    """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, in row order."""
    _check_rows(codec, payloads, total.numel())
    _check_values(total, payloads, total.numel())
    if total.dtype != torch.float32:
        raise UnsupportedTensorError(f"total is {total.dtype}; sums are float32: allocate it as torch.float32")
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
    _check_carry(carry, numel, payload)
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
    nbytes = codec.payload_nbytes(chunk_numel)
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


def _check_values(values: Tensor, payload: Tensor, chunk_numel: int) -> None:
    if values.dtype not in _DTYPES:
        raise UnsupportedTensorError(f"values are {values.dtype}; only {', '.join(map(str, _DTYPES))} can be encoded")
    if values.dim() != 1 or not values.is_contiguous():
        raise ConfigurationError(
            f"values have shape {tuple(values.shape)} and stride {values.stride()}; they must be 1-D and contiguous: "
            "pass values.view(-1) of a contiguous tensor"
        )
    if values.numel() > payload.shape[0] * chunk_numel:
        raise ConfigurationError(
            f"{values.numel()} values do not fit into {payload.shape[0]} rows of {chunk_numel}; add rows"
        )
    if values.device != payload.device:
        raise ConfigurationError(f"values are on {values.device} and payload on {payload.device}; move one of them")


def _check_carry(carry: Carry | None, numel: int, payload: Tensor) -> None:
    if carry is None:
        return
    for name, part in (("old", carry.old), ("new", carry.new)):
        if part.dtype != torch.float32 or part.shape != (numel,) or part.device != payload.device:
            raise ConfigurationError(
                f"the carry's {name} is {part.dtype} {tuple(part.shape)} on {part.device}; it must be float32 "
                f"({numel},) on {payload.device}, one element per value"
            )
