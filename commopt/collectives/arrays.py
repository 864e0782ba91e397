"""See torch, NumPy and CuPy arrays as torch tensors over the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from commopt.errors import UnsupportedTensorError

_FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGER = (torch.int64, torch.int32, torch.uint8, torch.int8)


@dataclass(frozen=True)
class Operand:
    """A caller's array, seen as a dense tensor."""

    array: Any
    tensor: Tensor
    # Set when no tensor can share the array's memory: copies the tensor back into it.
    write_back: Callable[[], None] | None = None

    def flat(self) -> Tensor:
        """Return the elements in logical order as a contiguous 1-D tensor: a view where possible, else a copy."""
        return self.tensor.contiguous().view(-1)

    def store(self, flat: Tensor) -> None:
        """Make `flat` the array's elements; free when it already is."""
        if flat.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(flat.view(self.tensor.shape))
        if self.write_back is not None:
            self.write_back()


def readable(array: Any) -> Operand:
    """Return an operand to read from; raises UnsupportedTensorError for what is no dense array."""
    if isinstance(array, torch.Tensor):
        _require_dense(array)
        return Operand(array, array.detach())
    if isinstance(array, np.ndarray):
        plain = array if array.flags.writeable and min(array.strides, default=0) >= 0 else array.copy()
        return Operand(array, _from_numpy(plain))
    if hasattr(array, "__dlpack__"):
        return Operand(array, torch.from_dlpack(array))
    raise UnsupportedTensorError(
        f"{type(array).__name__} is not an array; pass a torch tensor, a NumPy or CuPy array, or a DLPack object"
    )


def writable(array: Any) -> Operand:
    """Return an operand to write to, zero-copy where the memory allows.

    Raises UnsupportedTensorError for read-only memory and for elements that overlap each other.
    """
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise UnsupportedTensorError("the NumPy array is read-only and results are written in place; pass a copy()")
        if min(array.strides, default=0) < 0:  # torch has no negative strides
            copy = _from_numpy(array.copy())
            return Operand(array, copy, lambda: np.copyto(array, copy.numpy()))
    operand = readable(array)
    if _overlaps(operand.tensor):
        raise UnsupportedTensorError(
            f"elements of the array may share memory (shape {tuple(operand.tensor.shape)}, strides "
            f"{operand.tensor.stride()}), as after expand(); results are written in place: pass .contiguous()"
        )
    return operand


def require_reducible(tensor: Tensor, name: str = "the array") -> None:
    """Raise UnsupportedTensorError unless sums over ranks are defined and supported for `tensor`."""
    _require_dense(tensor, name)
    if tensor.is_complex():
        raise UnsupportedTensorError(
            f"{name} is {tensor.dtype}; sums of complex values are not supported: pass torch.view_as_real(x), or keep "
            f"such a parameter as a real one with a trailing dimension of 2"
        )
    if tensor.dtype not in _FLOATING + _INTEGER:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FLOATING + _INTEGER)
        raise UnsupportedTensorError(f"{name} is {tensor.dtype}, which cannot be summed; convert it to one of {names}")


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two elements may share memory: dimensions that do not nest count as overlapping."""
    if tensor.numel() == 0:
        return False
    span = 0  # distance to the last element reached by the dimensions looked at so far
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= span:
                return True
            span += stride * (length - 1)
    return False


def _require_dense(tensor: Tensor, name: str = "the array") -> None:
    if tensor.layout != torch.strided:
        raise UnsupportedTensorError(
            f"{name} is sparse ({tensor.layout}); pass x.to_dense(), or for gradients use nn.Embedding(sparse=False)"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedTensorError(f"{name} is on {tensor.device}; move it to a cpu or cuda device")


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise UnsupportedTensorError(f"NumPy array of dtype {array.dtype}: {error}") from None
