"""Move a list of tensors into one flat buffer and back, with a cast and a scale, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.kernels.loader import Loader, loader_for

_KERNEL_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_SCALABLE_DTYPES = (*_KERNEL_DTYPES, torch.float64)

_THREADS = 256
_CHUNK_NBYTES = 16 * 1024  # of the wider dtype: what the threads of a block have under way at once


def pack(tensors: Sequence[Tensor], flat: Tensor, scale: float = 1.0) -> None:
    """Write `scale` times the tensors, one after the other, into `flat`; one launch on CUDA.

    `flat` is 1-D and contiguous and holds as many elements as the tensors together; a tensor of any layout
    counts in row-major order. Each value is the float32 product of x and `scale`, then rounded to nearest even
    in the target's dtype; with float64 on either side it is computed in float64; `scale` 1 within one dtype
    copies the bits. On CUDA the work is queued on the current stream. Raises `ConfigurationError` (shapes,
    devices, overlap) or `UnsupportedTensorError` (layouts, dtypes).
    """
    _check(tensors, flat, scale)
    loader = _loader(tensors, flat)
    if loader is None:
        pack_with_torch(tensors, flat, scale)
    else:
        dense = [tensor if tensor.is_contiguous() else tensor.detach().contiguous() for tensor in tensors]
        _launch(loader, dense, flat, scale, to_flat=True)


def unpack(flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
    """Write `scale` times the consecutive pieces of `flat` into the tensors: `pack` undone, same rules."""
    _check(tensors, flat, scale)
    loader = _loader(tensors, flat)
    if loader is None:
        unpack_with_torch(flat, tensors, scale)
    else:
        dense = [tensor if tensor.is_contiguous() else tensor.new_empty(tensor.shape) for tensor in tensors]
        _launch(loader, dense, flat, scale, to_flat=False)
        for tensor, written in zip(tensors, dense, strict=True):
            if written is not tensor:
                tensor.detach().copy_(written)


def _check(tensors: Sequence[Tensor], flat: Tensor, scale: float) -> None:
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ConfigurationError(
            f"flat has shape {tuple(flat.shape)} and stride {flat.stride()}; it must be 1-D and contiguous: "
            "pass flat.view(-1) of a contiguous buffer"
        )
    begin = flat.data_ptr()
    end = begin + flat.numel() * flat.element_size()
    total_numel = 0
    for index, tensor in enumerate(tensors):
        _check_dtypes(index, tensor, flat, scale)
        if tensor.device != flat.device:
            raise ConfigurationError(
                f"tensor {index} is on {tensor.device} and flat on {flat.device}; move one of them"
            )
        total_numel += tensor.numel()
        if tensor.is_contiguous() and _intersect(tensor, begin, end):
            raise ConfigurationError(f"tensor {index} shares memory with flat; give flat memory of its own")
    if total_numel != flat.numel():
        raise ConfigurationError(
            f"flat holds {flat.numel()} elements and the {len(tensors)} tensors {total_numel}; "
            f"allocate flat with {total_numel}"
        )


def _intersect(tensor: Tensor, begin: int, end: int) -> bool:
    """Tell whether a contiguous tensor has bytes in [begin, end)."""
    first = tensor.data_ptr()
    return max(first, begin) < min(first + tensor.numel() * tensor.element_size(), end)


def _check_dtypes(index: int, tensor: Tensor, flat: Tensor, scale: float) -> None:
    if tensor.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"tensor {index} is {tensor.layout}; only dense tensors can be packed: pass its to_dense()"
        )
    if tensor.dtype in _SCALABLE_DTYPES and flat.dtype in _SCALABLE_DTYPES:
        return
    if tensor.dtype != flat.dtype or scale != 1.0:
        raise UnsupportedTensorError(
            f"tensor {index} is {tensor.dtype}, flat {flat.dtype} and scale {scale}; only float16, bfloat16, "
            "float32 and float64 can be cast or scaled: use one dtype and scale 1"
        )


def _loader(tensors: Sequence[Tensor], flat: Tensor) -> Loader | None:
    """Return what launches the kernel for these tensors, None where the reference must run."""
    if flat.device.type != "cuda" or flat.numel() == 0:
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or not _KERNEL_DTYPES.keys() >= dtypes | {flat.dtype}:
        return None
    with torch.cuda.device(flat.device):
        if torch.cuda.is_current_stream_capturing():
            return None  # a graph would replay with the address of a table that may be gone by then
    return loader_for(flat.device)


def _launch(loader: Loader, tensors: Sequence[Tensor], flat: Tensor, scale: float, *, to_flat: bool) -> None:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    dtype = tensors[0].dtype
    chunk_numel = _CHUNK_NBYTES // max(dtype.itemsize, flat.element_size())
    with torch.cuda.device(flat.device):
        stream = torch.cuda.current_stream()
        table = _table(
            flat.device,
            chunk_numel,
            tuple(tensor.data_ptr() for tensor in tensors),
            tuple(tensor.numel() for tensor in tensors),
        )
        arguments = (table.address_for(stream), len(tensors), flat.data_ptr(), chunk_numel, int(to_flat))
        if scale == 1.0 and dtype == flat.dtype:
            kernel = f"transfer_bits_{8 * dtype.itemsize}"
            loader.launch(kernel, table.chunks, _THREADS, stream.cuda_stream, arguments)
            return
        source, target = (dtype, flat.dtype) if to_flat else (flat.dtype, dtype)
        kernel = f"transfer_{_KERNEL_DTYPES[source]}_{_KERNEL_DTYPES[target]}"
        loader.launch(kernel, table.chunks, _THREADS, stream.cuda_stream, (*arguments, float(scale)))


@dataclass(frozen=True)
class _Table:
    """Where a list of tensors lies, on the device: int64 [tensors + 1, 3], laid out as `struct Row`."""

    rows: Tensor
    chunks: int
    uploaded: torch.cuda.Event

    def address_for(self, stream: torch.cuda.Stream) -> int:
        """Return the address, valid for work queued next on `stream`, whichever stream uploaded it."""
        stream.wait_event(self.uploaded)
        self.rows.record_stream(stream)
        return self.rows.data_ptr()


# A step may have several lists for each of hundreds of buckets; one that is forgotten costs many times a launch.
@lru_cache(maxsize=4096)
def _table(device: torch.device, chunk_numel: int, addresses: tuple[int, ...], numels: tuple[int, ...]) -> _Table:
    host = torch.from_numpy(_rows(chunk_numel, addresses, numels)).pin_memory()
    rows = host.to(device, non_blocking=True)  # torch keeps the pinned memory until the copy is over
    uploaded = torch.cuda.Event()
    uploaded.record()
    return _Table(rows, int(host[-1, 2]), uploaded)


def _rows(chunk_numel: int, addresses: tuple[int, ...], numels: tuple[int, ...]) -> npt.NDArray[np.int64]:
    counts = np.array(numels, dtype=np.int64)
    rows = np.zeros((len(numels) + 1, 3), dtype=np.int64)
    rows[:-1, 0] = addresses
    rows[1:, 1] = np.cumsum(counts)
    rows[1:, 2] = np.cumsum(-(-counts // chunk_numel))
    return rows


@torch.no_grad()
def pack_with_torch(tensors: Sequence[Tensor], flat: Tensor, scale: float = 1.0) -> None:
    """Write `scale` times the tensors, one after the other, into `flat`, without any check."""
    _transfer(tensors, _views(flat, tensors), scale)


@torch.no_grad()
def unpack_with_torch(flat: Tensor, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
    """Write `scale` times the consecutive pieces of `flat` into the tensors, without any check."""
    _transfer(_views(flat, tensors), tensors, scale)


def _views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _transfer(sources: Sequence[Tensor], targets: Sequence[Tensor], scale: float) -> None:
    if not sources:
        return
    if scale == 1.0:
        torch._foreach_copy_(list(targets), list(sources))
        return
    for source, target in zip(sources, targets, strict=True):
        _scaled(source, target, scale)


def _scaled(source: Tensor, target: Tensor, scale: float) -> None:
    """Multiply in float32 (float64 when either side is) and round once, in as few passes as can be."""
    wide = torch.promote_types(torch.promote_types(source.dtype, target.dtype), torch.float32)
    if source.dtype in (target.dtype, wide):  # torch multiplies 16-bit floats by a number in float32
        torch.mul(source, scale, out=target)
    elif target.dtype == wide:
        target.copy_(source).mul_(scale)
    else:
        target.copy_(source.to(wide).mul_(scale))
