# SPDX-License-Identifier: Apache-2.0
"""Block quantization, sparse rows and copies on the CPU by `commopt._cpu`; without it plain torch computes."""

from __future__ import annotations

from collections.abc import Iterable
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


class CpuKernels(Loader):
    """Calls compiled functions at once, in as many threads as torch uses."""

    fix = "install commopt where there is a C++ compiler"

    def __init__(self, module: Any) -> None:
        self._module = module

    def queue(self, device: torch.device, kernel: str, grid: int, block: int, arguments: Arguments) -> None:
        """Run at once, unless there is nothing to do."""
        if grid:
            self.launch(kernel, grid, block, 0, arguments)

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        """See Loader; how to cut up the work is left to the function."""
        operation, _, codec = kernel.partition("_")
        rng = _NO_RNG if operation != "decode" and not codec.endswith("stochastic") else ()
        last = len(arguments) - (0 if operation == "recode" else 2)  # behind them come the parts of the values
        before, parts = arguments[:last], arguments[last:]
        getattr(self._module, operation)(_NUMBER[codec], *before, *rng, *parts, loader.cpu_threads())


def block_kernels(device: torch.device, dtype: torch.dtype = torch.float32) -> Loader | None:
    """Return what launches the kernels of block quantization for values of `dtype`, None where plain torch computes."""
    module = loader.cpu_kernels() if device.type == "cpu" and dtype in DTYPES else None
    return loader.loader_for(device, dtype) if module is None else CpuKernels(module)


def takes_scattered(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether there are block kernels for Scattered elements of a buffer of this dtype."""
    return block_kernels(device, dtype) is not None


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
