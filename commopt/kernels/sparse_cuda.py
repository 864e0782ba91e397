"""Launch the CUDA kernels of sparse rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from commopt.kernels.codec import Carry
from commopt.kernels.loader import Arguments, Loader
from commopt.kernels.quantize_cuda import DTYPES
from commopt.kernels.sparse_row import BLOCK, SparseRow

_THREADS = 256
_DECODE_THREADS = 512
_TILE_NUMEL = 4096
_GROUP_TILES = 8  # one for each warp of a CUDA block
_CANDIDATES_WORDS = 385  # of a tile: 256 values, 256 indices of 16 bits, and how many there are
_BINS = 2048
_LEVELS = 3  # of a key's bits: 11, 11 and 9
_THRESHOLD_WORDS = 4
_COUNT_WORDS = 2


def select(loader: Loader, row: SparseRow, values: Tensor, payload: Tensor, scale: float, carry: Carry | None) -> None:
    """Queue what `reference.select` does on the current stream; `values` are of one of DTYPES."""
    rows = payload.shape[0]
    if rows * row.chunk_numel == 0:
        return
    tiles = -(-row.chunk_numel // _TILE_NUMEL)
    p = torch.empty(values.numel(), dtype=torch.float32, device=values.device) if carry is None else carry.new
    bins = torch.zeros(_LEVELS, rows, _BINS, dtype=torch.int32, device=values.device)
    thresholds = torch.empty(rows, _THRESHOLD_WORDS, dtype=torch.int32, device=values.device)
    candidates = torch.empty(rows, tiles, _CANDIDATES_WORDS, dtype=torch.int32, device=values.device)
    counts = torch.empty(rows, tiles, _COUNT_WORDS, dtype=torch.int32, device=values.device)

    found = thresholds.data_ptr()
    seen = (p.data_ptr(), values.numel(), row.chunk_numel, found, candidates.data_ptr())
    target = (payload.data_ptr(), payload.stride(0), row.count, DTYPES[row.value_dtype])
    with torch.cuda.device(values.device):
        stream = torch.cuda.current_stream().cuda_stream
        per_group = partial(_launch, loader, rows * -(-tiles // _GROUP_TILES), stream)
        per_row = partial(_launch, loader, rows, stream)
        accumulated = (*_accumulated(values, scale, row, carry), p.data_ptr(), bins[0].data_ptr())
        _launch(loader, rows * tiles, stream, "sparse_accumulate", accumulated)
        per_row("sparse_threshold", (bins[0].data_ptr(), 0, row.count, found))
        per_group("sparse_collect", (*seen, bins[1].data_ptr()))
        per_row("sparse_threshold", (bins[1].data_ptr(), 1, row.count, found))
        per_group("sparse_histogram", (*seen, bins[2].data_ptr()))
        per_row("sparse_threshold", (bins[2].data_ptr(), 2, row.count, found))
        per_group("sparse_count", (*seen, counts.data_ptr()))
        per_row("sparse_offsets", (counts.data_ptr(), row.chunk_numel, found, *target))
        per_group("sparse_write", (*seen, counts.data_ptr(), *target, *_kept(carry)))


def scatter(loader: Loader, row: SparseRow, payload: Tensor, values: Tensor) -> None:
    """Queue what `reference.scatter` does on the current stream; `values` are of one of DTYPES."""
    _decode(loader, row, payload, -(-values.numel() // max(row.chunk_numel, 1)), 1, values)


def accumulate(loader: Loader, row: SparseRow, payloads: Tensor, total: Tensor) -> None:
    """Queue what `reference.accumulate` does on the current stream."""
    _decode(loader, row, payloads, min(total.numel(), 1), payloads.shape[0], total)


def _decode(loader: Loader, row: SparseRow, payload: Tensor, rows: int, peers: int, values: Tensor) -> None:
    if rows == 0:
        return
    arguments = (
        *(payload.data_ptr(), payload.stride(0), row.chunk_numel, row.count, DTYPES[row.value_dtype]),
        *(peers, values.data_ptr(), DTYPES[values.dtype], values.numel()),
    )
    with torch.cuda.device(values.device):
        stream = torch.cuda.current_stream().cuda_stream
        loader.launch("sparse_decode", rows * -(-row.chunk_numel // BLOCK), _DECODE_THREADS, stream, arguments)


def _launch(loader: Loader, grid: int, stream: int, kernel: str, arguments: Arguments) -> None:
    loader.launch(kernel, grid, _THREADS, stream, arguments)


def _accumulated(values: Tensor, scale: float, row: SparseRow, carry: Carry | None) -> Arguments:
    """Return what p is added up from."""
    source = (values.data_ptr(), DTYPES[values.dtype], values.numel(), float(scale), row.chunk_numel)
    if carry is None:
        return (*source, 0, 1.0, 0, 0, 0.0, 0, 0)
    residual = (carry.old.data_ptr(), float(carry.decay))
    if carry.velocity is None:
        return (*source, *residual, 0, 0, 0.0, 0, _loss_scale(carry))
    velocity, momentum = carry.velocity, carry.velocity.momentum
    parts = (velocity.old.data_ptr(), velocity.new.data_ptr(), float(momentum.factor), int(momentum.nesterov))
    return (*source, *residual, *parts, _loss_scale(carry))


def _kept(carry: Carry | None) -> Arguments:
    """Return whether p becomes the new residual, and what of the velocity is masked."""
    if carry is None:
        return 0, 0, 0
    masked = carry.velocity is not None and carry.velocity.momentum.masking
    return 1, _loss_scale(carry), carry.velocity.new.data_ptr() if carry.velocity is not None and masked else 0


def _loss_scale(carry: Carry) -> int:
    return 0 if carry.loss_scale is None else carry.loss_scale.data_ptr()
