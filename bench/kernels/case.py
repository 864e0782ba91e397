"""One call of a kernel: what runs it, and the bytes that it must read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

KERNEL, REFERENCE = "kernel", "reference"


@dataclass(frozen=True)
class Case:
    """A kernel with its arguments; `variant` tells calls of one kernel apart."""

    name: str
    variant: str
    kernel: Callable[..., object]
    """The wrapper in commopt.kernels, which on the CPU is the reference."""
    reference: Callable[..., object]
    arguments: tuple[Any, ...]
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes read and written if each goes to or from memory once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.read, *self.written))

    def calls(self, device: torch.device) -> Mapping[str, Callable[[], object]]:
        """Return what there is to be timed on this device, by implementation."""
        implementations = {REFERENCE: self.reference}
        if device.type == "cuda":
            implementations = {KERNEL: self.kernel, **implementations}
        return {name: partial(function, *self.arguments) for name, function in implementations.items()}


def rows(count: int, nbytes: int, device: torch.device) -> Tensor:
    """Return so many empty rows of payload."""
    return torch.zeros(count, nbytes, dtype=torch.uint8, device=device)
