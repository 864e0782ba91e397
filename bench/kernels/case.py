"""One job of a kernel: who can do it, and the bytes that it must read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels.asked import Asked

KERNEL, REFERENCE = "kernel", "reference"

SCALE = 0.5
"""What values are multiplied by: with 1 there would be nothing to compute."""


@dataclass(frozen=True)
class Contender:
    """Somebody who does a case's job, with the arguments for it."""

    name: str
    call: Callable[[], object]
    overwritten: tuple[Tensor, ...] = ()
    """What a call writes from end to end, whatever was there before."""


@dataclass(frozen=True)
class Absent:
    """Somebody who could do the job but cannot be had here."""

    name: str
    why: str


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
    others: tuple[Contender | Absent, ...] = ()
    asked: tuple[Asked, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes read and written if each goes to or from memory once."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.read, *self.written))

    @property
    def overwritten(self) -> tuple[Tensor, ...]:
        """What is written and not read before."""
        return tuple(tensor for tensor in self.written if all(tensor is not other for other in self.read))

    def contenders(self, device: torch.device) -> list[Contender]:
        """Return what there is to be timed on this device."""
        own = {REFERENCE: self.reference}
        if device.type == "cuda":
            own = {KERNEL: self.kernel, **own}
        calls = [Contender(name, partial(each, *self.arguments), self.overwritten) for name, each in own.items()]
        return [*calls, *(other for other in self.others if isinstance(other, Contender))]

    def absent(self) -> list[Absent]:
        """Return who is missing."""
        return [other for other in self.others if isinstance(other, Absent)]


def rows(count: int, nbytes: int, device: torch.device) -> Tensor:
    """Return so many empty rows of payload."""
    return torch.zeros(count, nbytes, dtype=torch.uint8, device=device)
