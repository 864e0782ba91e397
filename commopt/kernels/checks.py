"""What every compression kernel requires of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.kernels.codec import ROW_ALIGNMENT, Carry

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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


def check_values(values: Tensor, payload: Tensor, chunk_numel: int) -> None:
    """Raise an error unless `values` are floating, 1-D, contiguous, on the device of `payload`, and fit into it."""
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


def check_total(total: Tensor) -> None:
    """Raise UnsupportedTensorError unless sums are float32."""
    if total.dtype != torch.float32:
        raise UnsupportedTensorError(f"total is {total.dtype}; sums are float32: allocate it as torch.float32")


def check_carry(carry: Carry | None, numel: int, payload: Tensor) -> None:
    """Raise ConfigurationError unless the carry, if any, has a float32 element for each of `numel` values."""
    if carry is None:
        return
    parts = [("old", carry.old), ("new", carry.new)]
    if carry.velocity is not None:
        parts += [("old velocity", carry.velocity.old), ("new velocity", carry.velocity.new)]
    for name, part in parts:
        suits = part.dtype == torch.float32 and part.shape == (numel,) and part.is_contiguous()
        if not suits or part.device != payload.device:
            raise ConfigurationError(
                f"the carry's {name} is {part.dtype} {tuple(part.shape)} on {part.device}; it must be float32 "
                f"({numel},) on {payload.device}, contiguous, one element per value"
            )
