# SPDX-License-Identifier: Apache-2.0
"""Block quantization, sparse rows and copies on the CPU by `commopt._cpu`; without it plain torch computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt.kernels import loader
from commopt.kernels.loader import Arguments, Loader

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of values that these kernels take; plain torch takes the others."""

_CODECS = ("uniform8", "uniform4", "uniform2", "uniform8_stochastic", "uniform4_stochastic", "uniform2_stochastic")
_NUMBER = {name: number for number, name in enumerate((*_CODECS, "companded4", "centroids2", "sign_mean", "sign_rms"))}
_NUMBER["sign"] = _NUMBER["sign_mean"]  # decoded alike
_NO_RNG = (0, 0, 0)


@dataclass(frozen=True, eq=False)
class Scattered:
    """Elements of a 1-D contiguous buffer in parts, which the CPU's block kernels read and write where they are.

    parts: as of `parts_of`: where each begins in the buffer, where among the elements, and how many there are; in the
        order of the elements, of which none is missing.
    """

    buffer: Tensor
    parts: Tensor
    numel: int

    @property
    def arguments(self) -> tuple[int, int]:
        """What the kernels take."""
        return self.parts.data_ptr(), len(self.parts)


class CpuKernels(Loader):
    """Calls compiled functions at once, in as many threads as torch uses. scattered: the values, if they are that."""

    fix = "install commopt where there is a C++ compiler"

    def __init__(self, module: Any, scattered: Scattered | None = None) -> None:
        self._module = module
        self._parts = (0, 0) if scattered is None else scattered.arguments

    def queue(self, device: torch.device, kernel: str, grid: int, block: int, arguments: Arguments) -> None:
        """Run at once, unless there is nothing to do."""
        if grid:
            self.launch(kernel, grid, block, 0, arguments)

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        """See Loader; how to cut up the work is left to the function."""
        operation, _, codec = kernel.partition("_")
        rng = _NO_RNG if operation != "decode" and not codec.endswith("stochastic") else ()
        parts = () if operation == "recode" else self._parts
        getattr(self._module, operation)(_NUMBER[codec], *arguments, *rng, *parts, loader.cpu_threads())


def block_kernels(
    device: torch.device, dtype: torch.dtype = torch.float32, scattered: Scattered | None = None
) -> Loader | None:
    """Return what launches the kernels of block quantization for values of `dtype`, None where plain torch computes."""
    module = loader.cpu_kernels() if device.type == "cpu" and dtype in DTYPES else None
    return loader.loader_for(device, dtype) if module is None else CpuKernels(module, scattered)


def takes_scattered(dtype: torch.dtype) -> bool:
    """Return whether the block kernels can work on Scattered elements of a buffer of this dtype."""
    return dtype in DTYPES and loader.cpu_kernels() is not None


def readable(values: Tensor) -> Tensor:
    """Return values in a dtype that the block kernels take: a mean must not depend on the dtype of what it is of."""
    wide = values.device.type == "cpu" and values.dtype not in DTYPES and loader.cpu_kernels() is not None
    return values.float() if wide else values


def sparse_kernels(device: torch.device, *dtypes: torch.dtype) -> Any | None:
    """Return the module that selects, scatters and adds up sparse rows on the CPU; None where something else does.

    dtypes: of values, dense and in the rows.
    """
    return loader.cpu_kernels() if device.type == "cpu" and set(dtypes) <= set(DTYPES) else None


def parts_of(copies: Iterable[tuple[int, int, int]]) -> Tensor:
    """Return a table for `copy_parts`: the first element to copy, where it goes, and how many follow it."""
    return torch.tensor(list(copies), dtype=torch.int64, device="cpu").view(-1, 3)


def copy_parts(source: Tensor, target: Tensor, parts: Tensor) -> bool:
    """Copy parts of a contiguous tensor to another past the caches, or return False where the kernels cannot.

    torch reads what it overwrites first, which takes half as long again.
    """
    module = loader.cpu_kernels() if source.device.type == "cpu" and target.device.type == "cpu" else None
    if module is None or not source.dtype == target.dtype == torch.float32:
        return False
    module.copy(source.data_ptr(), target.data_ptr(), parts.data_ptr(), len(parts), loader.cpu_threads())
    return True
