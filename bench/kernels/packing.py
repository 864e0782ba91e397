"""Lists of gradients to one flat buffer and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.kernels.asked import of_copy
from bench.kernels.case import SCALE, Case
from bench.kernels.family import Family, Setting
from commopt.kernels import pack, reference, unpack
from commopt.simulate.model_zoo import Model

_NAMES = ("pack", "unpack")
_TENSORS = 64
_LEAST_OF_COPY = 0.85


def of_model(model: Model) -> Family:
    """Return the gradients of a model, whatever the setting's number of elements."""

    def build(setting: Setting) -> Iterator[Case]:
        gradients = [setting.random(*parameter.shape) for parameter in model.parameters]
        return _cases(gradients, f"{model.name}: {len(gradients)} tensors")

    return Family(f"gradients of {model.name}", _NAMES, build)


def _even(setting: Setting) -> Iterator[Case]:
    return _cases([piece.clone() for piece in setting.values.tensor_split(_TENSORS)], f"{_TENSORS} tensors")


EVEN = Family(f"{_TENSORS} tensors of one length", _NAMES, _even)


def _cases(tensors: list[Tensor], title: str) -> Iterator[Case]:
    numel, every, asked = sum(tensor.numel() for tensor in tensors), tuple(tensors), (of_copy(_LEAST_OF_COPY),)
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.empty(numel, dtype=dtype, device=tensors[0].device)
        reference.pack(tensors, flat)
        variant = f"{title}, float32 and {str(dtype).removeprefix('torch.')}"
        yield Case("pack", variant, pack, reference.pack, (tensors, flat, SCALE), every, (flat,), asked=asked)
        yield Case("unpack", variant, unpack, reference.unpack, (flat, tensors, SCALE), (flat,), every, asked=asked)
