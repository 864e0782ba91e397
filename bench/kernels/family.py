"""Cases that share their tensors, which exist only while these cases are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from bench.kernels.case import Case
from commopt.kernels.codec import ErrorFeedback


@dataclass(frozen=True)
class Setting:
    """What cases are made for: about `numel` elements of gradient, rows from `peers` ranks, and a device."""

    numel: int
    peers: int
    device: torch.device

    @cached_property
    def values(self) -> Tensor:
        """A gradient, float32 [numel]."""
        return self.random(self.numel)

    @cached_property
    def carry(self) -> ErrorFeedback:
        """A residual for it, smaller than it is."""
        return ErrorFeedback(self.random(self.numel) / 8, torch.empty(self.numel, device=self.device))

    def random(self, *shape: int) -> Tensor:
        """Return normal values, float32, the next ones of this setting."""
        return torch.randn(*shape, generator=self._generator, device=self.device)

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)


@dataclass(frozen=True)
class Family:
    """A title, the names that its cases have, and how they are made; what one case needs may be the work of another."""

    title: str
    names: tuple[str, ...]
    build: Callable[[Setting], Iterator[Case]]
