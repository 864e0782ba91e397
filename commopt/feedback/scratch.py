"""Buffers that live from bucket to bucket, so that none is allocated (and paged in) twice."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Scratch:
    """Uninitialized memory by tag; what a tag held is lost when it is taken again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self._halves: tuple[Scratch, Scratch] | None = None

    def half(self, number: int) -> Scratch:
        """Return memory apart for every other chunk: of a buffer's chunks two are on their way at once."""
        if self._halves is None:
            self._halves = Scratch(), Scratch()
        return self._halves[number % 2]

    def take(self, tag: str, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous tensor in the memory of `tag`, which grows to the largest ever asked for."""
        shape = (shape,) if isinstance(shape, int) else shape
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._buffers.get((tag, device))
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[tag, device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer[:nbytes].view(dtype).view(shape)
