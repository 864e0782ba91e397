# SPDX-License-Identifier: Apache-2.0
"""Block quantization: values to payload rows and back, their sum, the sum encoded again. And stochastic bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.errors import ConfigurationError
from commopt.kernels import loader
from commopt.kernels.codec import (
    DTYPES,
    Codec,
    Encoding,
    ErrorFeedback,
    RngKey,
    Scattered,
    check_residual,
    check_rows,
    check_total,
    check_values,
    residual_arguments,
    rng_arguments,
)
from commopt.kernels.cpu import block_kernels, readable
from commopt.kernels.finite import all_finite
from commopt.kernels.loader import Arguments, Loader
from commopt.kernels.residual import round_with_residual

_SHORT_NUMEL = 64  # so short a block takes 4 lanes of a warp
_WARP_NUMEL = 512  # a longer block takes all warps of a CUDA block
_WARP_THREADS = 32
_WARPS = 8
_CAST_THREADS = 256
_CAST_PER_THREAD = 8
_LARGEST_SCALE = 2.0**121  # a code is worth up to 127 scales, and 2^128 is infinite


def encode(codec: Codec, values: Tensor | Scattered, payload: Tensor, encoding: Encoding) -> None:
    """Encode p = `scale * values` (+ the residual) into the rows of `payload`; see Compressor.compress."""
    chunk_numel = encoding.chunk_numel
    values, scattered, numel = _opened(values)
    _check_rows(codec, payload, chunk_numel)
    check_values(values, payload, chunk_numel, numel)
    check_residual(encoding.residual, numel, payload)
    values = readable(values)
    kernels = block_kernels(payload.device, values.dtype)
    if kernels is None:
        from commopt.kernels import quantize_reference as reference

        return reference.encode(codec, values, payload, encoding)
    arguments = (
        values.data_ptr(),
        DTYPES[values.dtype],
        numel,
        float(encoding.scale),
        payload.data_ptr(),
        payload.stride(0),
        *_shape(codec, payload.shape[0], chunk_numel),
        *residual_arguments(encoding.residual),
        *(rng_arguments(encoding.rng_key) if codec.stochastic else ()),
        *_part_arguments(scattered),
    )
    _launch(kernels, f"encode_{_encoder(codec)}", codec, payload, payload.shape[0] * chunk_numel, arguments)


def decode(codec: Codec, payload: Tensor, values: Tensor | Scattered, chunk_numel: int) -> None:
    """Decode the rows of `payload` into `values`; see Compressor.decompress."""
    values, scattered, numel = _opened(values)
    _check_rows(codec, payload, chunk_numel)
    check_values(values, payload, chunk_numel, numel)
    kernels = block_kernels(payload.device, values.dtype)
    if kernels is None:
        from commopt.kernels import quantize_reference as reference

        return reference.decode(codec, payload, values, chunk_numel)
    rows = -(-numel // max(chunk_numel, 1))
    _decode(kernels, codec, payload, (rows, 1), values, chunk_numel, numel, scattered)


def accumulate(codec: Codec, payloads: Tensor, total: Tensor | Scattered) -> None:
    """Set `total` (float32 [chunk_numel]) to the sum of the decoded rows, in row order.

    Scattered, it has no place for the padding of a chunk.
    """
    total, scattered, numel = _opened(total)
    chunk_numel = -(-numel // codec.block) * codec.block if scattered is not None else numel
    _check_rows(codec, payloads, chunk_numel)
    check_values(total, payloads, chunk_numel, numel)
    check_total(total)
    kernels = block_kernels(payloads.device, total.dtype)
    if kernels is None:
        from commopt.kernels import quantize_reference as reference

        return reference.accumulate(codec, payloads, total)
    _decode(kernels, codec, payloads, (1, payloads.shape[0]), total, chunk_numel, numel, scattered)


def recode(codec: Codec, payloads: Tensor, payload: Tensor, numel: int, encoding: Encoding) -> None:
    """Encode the sum of the rows of `payloads`, whose first `numel` elements are real, into the row `payload`."""
    chunk_numel = encoding.chunk_numel
    _check_rows(codec, payloads, chunk_numel)
    _check_rows(codec, payload, chunk_numel)
    if not (payload.shape[0] == 1 and 0 <= numel <= chunk_numel):
        raise ConfigurationError(
            f"{numel} elements in {payload.shape[0]} rows of {chunk_numel}; a sum has one row and fits into it"
        )
    check_residual(encoding.residual, numel, payload)
    kernels = block_kernels(payload.device)
    if kernels is None:
        from commopt.kernels import quantize_reference as reference

        return reference.recode(codec, payloads, payload, numel, encoding)
    _, *row_shape = _shape(codec, 1, chunk_numel)
    arguments = (
        payloads.data_ptr(),
        payloads.stride(0),
        payloads.shape[0],
        payload.data_ptr(),
        *row_shape,
        numel,
        *residual_arguments(encoding.residual),
        *(rng_arguments(encoding.rng_key) if codec.stochastic else ()),
    )
    _launch(kernels, f"recode_{_encoder(codec)}", codec, payload, chunk_numel, arguments)


def finite(codec: Codec, payload: Tensor, chunk_numel: int) -> Tensor:
    """Return whether all rows decode to finite values: bool, 0-d."""
    _check_rows(codec, payload, chunk_numel)
    begin = codec.codes_nbytes(chunk_numel)
    scales = payload[:, begin : begin + 4 * (chunk_numel // codec.block)]
    if codec.name == "centroids":
        return all_finite(scales.view(torch.bfloat16))
    return all_finite(scales.view(torch.float32), below=_LARGEST_SCALE)


def _check_rows(codec: Codec, payload: Tensor, chunk_numel: int) -> None:
    if chunk_numel % codec.block or chunk_numel < 0:
        raise ConfigurationError(
            f"a chunk of {chunk_numel} elements is no multiple of the block, {codec.block}; pad it"
        )
    check_rows(payload, chunk_numel, codec.payload_nbytes(chunk_numel))


def _opened(values: Tensor | Scattered) -> tuple[Tensor, Scattered | None, int]:
    """Return the tensor that holds values, where in it they are scattered, and how many they are."""
    if isinstance(values, Tensor):
        return values, None, values.numel()
    return values.buffer, values, values.numel


def _part_arguments(scattered: Scattered | None) -> tuple[int, int]:
    return (0, 0) if scattered is None else scattered.arguments


def _decode(
    kernels: Loader,
    codec: Codec,
    payload: Tensor,
    sums: tuple[int, int],
    values: Tensor,
    chunk_numel: int,
    numel: int,
    scattered: Scattered | None,
) -> None:
    """Decode sums[0] rows of values, each the sum of sums[1] rows of payload."""
    rows, peers = sums
    arguments = (
        payload.data_ptr(),
        payload.stride(0),
        *_shape(codec, rows, chunk_numel),
        peers,
        values.data_ptr(),
        DTYPES[values.dtype],
        numel,
        *_part_arguments(scattered),
    )
    _launch(kernels, f"decode_{_decoder(codec)}", codec, payload, rows * chunk_numel, arguments)


def _encoder(codec: Codec) -> str:
    name = codec.name if codec.bits == 1 else f"{codec.name}{codec.bits}"
    return f"{name}_stochastic" if codec.stochastic else name


def _decoder(codec: Codec) -> str:
    return "sign" if codec.bits == 1 else f"{codec.name}{codec.bits}"


def _shape(codec: Codec, rows: int, chunk_numel: int) -> tuple[int, int, int]:
    return rows, chunk_numel // codec.block, codec.block


def _launch(kernels: Loader, kernel: str, codec: Codec, payload: Tensor, numel: int, arguments: Arguments) -> None:
    """Queue a warp per block or several short ones, or a CUDA block where a warp's registers cannot hold it."""
    blocks = numel // codec.block
    alone = codec.block <= _WARP_NUMEL
    of_warp = _WARP_NUMEL // _SHORT_NUMEL if codec.block <= _SHORT_NUMEL else 1
    grid = -(-blocks // (_WARPS * of_warp)) if alone else blocks
    warps = _WARPS if alone else -(-codec.block // _WARP_NUMEL)
    kernels.queue(payload.device, kernel, grid, warps * _WARP_THREADS, arguments)


def round_stochastically(
    values: Tensor, rounded: Tensor, scale: float, residual: ErrorFeedback | None, rng_key: RngKey, place: int
) -> None:
    """Round `scale * values` (+ the residual), the elements from `place` on; see residual.round_with_residual.

    rounded: bfloat16, from a multiple of 16 bytes on. place: a multiple of 8. To nearest, torch is as fast.
    """
    kernels = loader.loader_for(values.device, values.dtype)
    if kernels is None:
        return round_with_residual(values, rounded, scale, residual, rng_key, place)
    arguments = (
        values.data_ptr(),
        DTYPES[values.dtype],
        values.numel(),
        float(scale),
        rounded.data_ptr(),
        *residual_arguments(residual),
        *rng_arguments(rng_key),
        place,
    )
    grid = -(-values.numel() // (_CAST_THREADS * _CAST_PER_THREAD))
    kernels.queue(values.device, "cast_stochastic", grid, _CAST_THREADS, arguments)
