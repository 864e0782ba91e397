# SPDX-License-Identifier: Apache-2.0
"""Two loaders of kernels compared byte by byte, whatever the kernels do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from commopt.kernels.loader import Arguments, Loader


class Memory(TorchDispatchMode):
    """Knows all memory of one kind of device that torch hands out while this is entered, as long as it is in use."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._tensors: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._watching = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if self._watching and isinstance(tensor, Tensor) and tensor.device.type == self._device:
                self._tensors[id(tensor)] = tensor
        return result

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let tensors be made meanwhile that do not count, as copies of those that do."""
        self._watching = False
        try:
            yield
        finally:
            self._watching = True

    def contents(self) -> list[Tensor]:
        """Return a copy of every byte."""
        return [each.clone() for each in self._bytes()]

    def put_back(self, contents: list[Tensor]) -> None:
        """Make every byte what it was."""
        for now, before in zip(self._bytes(), contents, strict=True):
            now.copy_(before)

    def ranges(self) -> list[tuple[int, int]]:
        """Return where the bytes begin and end, in ascending order."""
        return sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in self._bytes())

    def _bytes(self) -> list[Tensor]:
        storages = (tensor.untyped_storage() for tensor in self._tensors.values())
        used = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        return [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in used.values()]


class CompareLoaders(Loader):
    """Launches everything with two loaders, from the same memory, and compares what they leave."""

    fix = "install both loaders"

    def __init__(self, one: Loader, other: Loader, memory: Memory) -> None:
        self._one, self._other, self._memory = one, other, memory
        self.compared: set[str] = set()

    def launch(self, kernel: str, grid: int, block: int, stream: int, arguments: Arguments) -> None:
        """See Loader. Raises AssertionError where any byte differs."""
        with self._memory.unwatched():
            before = self._memory.contents()
            self._one.launch(kernel, grid, block, stream, arguments)
            wanted = self._memory.contents()
            self._memory.put_back(before)
            self._other.launch(kernel, grid, block, stream, arguments)
            got = self._memory.contents()
            for number, (mine, theirs) in enumerate(zip(wanted, got, strict=True)):
                differing = int((mine != theirs).sum())
                assert differing == 0, f"{kernel}: {differing} of {mine.numel()} bytes differ in tensor {number}"
            if any(not torch.equal(mine, was) for mine, was in zip(wanted, before, strict=True)):
                self.compared.add(kernel)  # where there is nothing to do, nothing is shown
