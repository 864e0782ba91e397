# SPDX-License-Identifier: Apache-2.0
"""Memory for the work on one message, used again by the next: two stacks on each device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 512  # as the memory of a CUDA tensor
# In every 32nd step the error of compression is measured, which may take more. CUDA graphs end with freed memory.
_REMEMBERED_STEPS = 64


class Scratch:
    """Uninitialized memory by tag that lives from bucket to bucket; its contents last until the tag is taken again.

    They also end with the `frame` in which the tag was taken, and with the bucket: two tags that are never in use at
    the same time share memory. What is taken as `lasting` outlives frames.
    Tensors are parts of larger ones: whoever keeps one, as a CUDA graph may, keeps its memory from being freed, but
    later buckets write to it.
    """

    version: object  # another one whenever memory is freed

    def __init__(self) -> None:
        self.version = object()
        self._stacks: dict[tuple[torch.device, bool], _Stack] = {}

    def take(
        self, tag: str, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device, *, lasting: bool = False
    ) -> Tensor:
        """Return a contiguous tensor in the memory of `tag`."""
        shape = (shape,) if isinstance(shape, int) else shape
        stack = self._stacks.get((device, lasting))
        if stack is None:
            stack = self._stacks[device, lasting] = _Stack(device)
        return stack.take(tag, prod(shape) * dtype.itemsize).view(dtype).view(shape)

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Let go, at the end, of what was taken meanwhile and is not lasting."""
        opened = [stack for (_, lasting), stack in self._stacks.items() if not lasting]
        for stack in opened:
            stack.open()
        try:
            yield
        finally:
            for (_, lasting), stack in self._stacks.items():
                if stack in opened:
                    stack.close()
                elif not lasting:  # first used in this frame
                    stack.reset()

    def end_bucket(self) -> None:
        """Let go of everything that was taken, also after an error; the memory stays for the next bucket."""
        for stack in self._stacks.values():
            if stack.reset():
                self.version = object()

    def end_step(self) -> None:
        """Free the memory that no bucket of recent steps has needed."""
        for stack in self._stacks.values():
            if stack.trim():
                self.version = object()

    def clear(self) -> None:
        """Free all memory; the next buckets have other lengths."""
        self._stacks.clear()
        self.version = object()

    def tensors(self) -> list[Tensor]:
        """Return all of the memory."""
        return [block for stack in self._stacks.values() for block in stack.blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of all memory."""
        return sum(stack.nbytes for stack in tuple(self._stacks.values()))


class _Stack:
    """Memory that is let go in the reverse order of its use.

    It is one block, as long as the step with the longest messages needs. While that is not known blocks are added.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.blocks: list[Tensor] = []
        self._frames: list[tuple[int, int, int, dict[str, Tensor]]] = []
        self._needed = 0  # the most bytes that were in use at once, in this step
        self._recent: deque[int] = deque(maxlen=_REMEMBERED_STEPS)
        self._longest = 0  # of this step and recent ones
        self._clear()

    def _clear(self) -> None:
        self._number = self._end = self._used = 0  # the block in use, its bytes in use, the bytes of all in use
        self._tags: dict[str, Tensor] = {}

    def take(self, tag: str, nbytes: int) -> Tensor:
        """Return uint8 [nbytes]."""
        known = self._tags.get(tag)
        if known is not None and known.numel() >= nbytes:
            return known[:nbytes]
        length = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._make_room(length)
        taken = self._tags[tag] = self.blocks[self._number][self._end : self._end + nbytes]
        self._end += length
        self._used += length
        self._needed = max(self._needed, self._used)
        return taken

    def _make_room(self, length: int) -> None:
        """Go on to the next block if this one is too short; blocks that are too short and not in use are freed."""
        blocks = self.blocks
        if self._number < len(blocks) and self._end > 0:
            if self._end + length <= len(blocks[self._number]):
                return
            self._number, self._end = self._number + 1, 0
        while self._number < len(blocks) and len(blocks[self._number]) < length:
            del blocks[self._number]
        if self._number == len(blocks):
            length = length if blocks else max(length, self._longest)
            blocks.append(torch.empty(length, dtype=torch.uint8, device=self._device))

    def open(self) -> None:
        self._frames.append((self._number, self._end, self._used, dict(self._tags)))

    def close(self) -> None:
        self._number, self._end, self._used, self._tags = self._frames.pop()

    def reset(self) -> bool:
        """Let go of everything; return whether that frees memory."""
        self._frames.clear()
        self._clear()
        self._longest = max(self._longest, self._needed)
        freed = len(self.blocks) > 1
        if freed:
            self.blocks.clear()
        return freed

    def trim(self) -> bool:
        """Free memory that recent steps had no need of; return whether there was any."""
        self._recent.append(self._needed)
        self._needed, self._longest = 0, max(self._recent)
        freed = self.nbytes > self._longest
        if freed:
            self.blocks.clear()
        return freed

    @property
    def nbytes(self) -> int:
        return sum(block.numel() for block in self.blocks)
