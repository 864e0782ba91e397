"""Launch the CUDA kernels of block quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.kernels.codec import Carry, Codec, Dice
from commopt.kernels.loader import Arguments, Loader

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The dtypes of values that the kernels take, and what they call them."""

_WARP_NUMEL = 512  # a longer block takes all warps of a CUDA block
_WARP_THREADS = 32
_WARPS = 8


def encode(
    loader: Loader,
    codec: Codec,
    values: Tensor,
    payload: Tensor,
    chunk_numel: int,
    scale: float,
    carry: Carry | None,
    dice: Dice,
) -> None:
    """Queue what `reference.encode` does on the current stream; `values` are of one of DTYPES."""
    arguments = (
        *(values.data_ptr(), DTYPES[values.dtype], values.numel(), float(scale)),
        *(payload.data_ptr(), payload.stride(0), *_shape(codec, payload.shape[0], chunk_numel)),
        *_carry(carry),
        *_dice(codec, dice),
    )
    _launch(loader, f"encode_{_encoder(codec)}", codec, payload, payload.shape[0] * chunk_numel, arguments)


def decode(loader: Loader, codec: Codec, payload: Tensor, values: Tensor, chunk_numel: int) -> None:
    """Queue what `reference.decode` does on the current stream; `values` are of one of DTYPES."""
    rows = -(-values.numel() // max(chunk_numel, 1))
    _decode(loader, codec, payload, rows, 1, values, chunk_numel)


def accumulate(loader: Loader, codec: Codec, payloads: Tensor, total: Tensor) -> None:
    """Queue what `reference.accumulate` does on the current stream."""
    _decode(loader, codec, payloads, 1, payloads.shape[0], total, total.numel())


def recode(
    loader: Loader,
    codec: Codec,
    payloads: Tensor,
    payload: Tensor,
    chunk_numel: int,
    numel: int,
    carry: Carry | None,
    dice: Dice,
) -> None:
    """Queue what `reference.recode` does on the current stream."""
    _, *row_shape = _shape(codec, 1, chunk_numel)
    arguments = (
        *(payloads.data_ptr(), payloads.stride(0), payloads.shape[0], payload.data_ptr(), *row_shape, numel),
        *_carry(carry),
        *_dice(codec, dice),
    )
    _launch(loader, f"recode_{_encoder(codec)}", codec, payload, chunk_numel, arguments)


def _decode(
    loader: Loader, codec: Codec, payload: Tensor, rows: int, peers: int, values: Tensor, chunk_numel: int
) -> None:
    arguments = (
        *(payload.data_ptr(), payload.stride(0), *_shape(codec, rows, chunk_numel), peers),
        *(values.data_ptr(), DTYPES[values.dtype], values.numel()),
    )
    _launch(loader, f"decode_{_decoder(codec)}", codec, payload, rows * chunk_numel, arguments)


def _encoder(codec: Codec) -> str:
    name = codec.name if codec.bits == 1 else f"{codec.name}{codec.bits}"
    return f"{name}_stochastic" if codec.stochastic else name


def _decoder(codec: Codec) -> str:
    return "sign" if codec.bits == 1 else f"{codec.name}{codec.bits}"


def _shape(codec: Codec, rows: int, chunk_numel: int) -> tuple[int, int, int]:
    return rows, chunk_numel // codec.block, codec.block


def _carry(carry: Carry | None) -> Arguments:
    if carry is None:
        return 0, 0, 0, 1.0
    loss_scale = 0 if carry.loss_scale is None else carry.loss_scale.data_ptr()
    return carry.old.data_ptr(), carry.new.data_ptr(), loss_scale, float(carry.decay)


def _dice(codec: Codec, dice: Dice) -> Arguments:
    """Return the arguments of a stochastic rounding; they cross as signed numbers."""
    if not codec.stochastic:
        return ()
    return _signed(dice.seed), _signed(dice.step), _signed(dice.stream)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _launch(loader: Loader, kernel: str, codec: Codec, payload: Tensor, numel: int, arguments: Arguments) -> None:
    """Launch a warp per block, or a CUDA block where a warp's registers cannot hold it."""
    blocks = numel // codec.block
    if blocks == 0:
        return
    alone = codec.block <= _WARP_NUMEL
    grid = -(-blocks // _WARPS) if alone else blocks
    warps = _WARPS if alone else -(-codec.block // _WARP_NUMEL)
    with torch.cuda.device(payload.device):
        stream = torch.cuda.current_stream().cuda_stream
        loader.launch(kernel, grid, warps * _WARP_THREADS, stream, arguments)
