"""Refuse gradients that no aggregator can average, by parameter name and before anything can hang."""

from __future__ import annotations

from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commopt.errors import UnsupportedTensorError

_REDUCIBLE = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def require_supported_parameters(module: nn.Module) -> None:
    """Raise UnsupportedTensorError when a parameter of `module` will have a complex or a sparse gradient."""
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            raise _sparse(f"parameter '{name}.weight'" if name else "parameter 'weight'")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            _require_dtype(parameter, f"parameter '{name}'")


def require_supported_bucket(bucket: dist.GradBucket, buffer: Tensor, module: ref[nn.Module] | None) -> None:
    """Raise UnsupportedTensorError when the bucket's `buffer` is sparse or of a dtype that cannot be averaged."""
    if buffer.layout == torch.strided and buffer.dtype in _REDUCIBLE:
        return
    known = None if module is None else module()
    names: dict[Tensor, str] = {}
    if known is not None:
        names = {parameter: name for name, parameter in known.named_parameters()}
    label = ", ".join(f"'{names[p]}'" if p in names else f"of shape {tuple(p.shape)}" for p in bucket.parameters())
    if buffer.layout != torch.strided:
        raise _sparse(f"parameter {label}")
    _require_dtype(buffer, f"parameter {label}")


def _require_dtype(tensor: Tensor, name: str) -> None:
    if tensor.is_complex():
        raise UnsupportedTensorError(
            f"{name} is {tensor.dtype}, and complex gradients are not supported; keep it as a real parameter with a "
            f"trailing dimension of 2 and use torch.view_as_complex in forward"
        )
    if tensor.dtype not in _REDUCIBLE:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _REDUCIBLE)
        raise UnsupportedTensorError(f"{name} is {tensor.dtype}; gradients can be {known}")


def _sparse(name: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"{name} has a sparse gradient, which no aggregator can average; use sparse=False, or leave it out of DDP "
        f"with DDP._set_params_and_buffers_to_ignore_for_model and average it yourself"
    )
