"""Reduce gradients in other buckets than DDP's: those of a checkpoint, until DDP makes the same ones again.

What a value is rounded to depends on its neighbours in the buffer, so a resumed run takes the same way, bit by bit,
only if it starts with the buckets the old one had. A new DDP model begins with buckets of its own and finds the old
ones after a step or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.feedback import Layout
from commopt.lanes import Ticket

_PATIENCE_STEPS = 3


class Rebucketing:
    """Holds DDP's buckets until a step is complete; then its gradients can be laid out as `target` has them."""

    def __init__(self, target: Sequence[Layout]) -> None:
        self.target = tuple(target)
        self._held: list[tuple[Layout, Tensor]] = []
        self._tickets: list[Ticket] = []
        self._steps = 0
        self._agrees = False

    def ends(self) -> bool:
        """Return whether the step that begins needs it no more; asked at every step.

        DDP's buckets were those of the target in the last one, or do not become so within a few steps.
        """
        self._held, self._tickets = [], []  # those of a backward that raised
        self._steps += 1
        return self._agrees or self._steps > _PATIENCE_STEPS

    def hold(self, layout: Layout, bucket: Tensor) -> Ticket:
        """Keep a bucket, not the last of its step, and return what will tell when it is reduced."""
        self._held.append((layout, bucket.view(-1)))
        self._tickets.append(Ticket(bucket))
        return self._tickets[-1]

    def complete(self, layout: Layout, bucket: Tensor) -> tuple[Gradients, list[Ticket]]:
        """Add the last bucket of a step; return the work to do, and the tickets of the buckets before."""
        held, tickets = [*self._held, (layout, bucket.view(-1))], self._tickets
        self._held, self._tickets = [], []
        self._agrees = tuple(own for own, _ in held) == self.target
        present = {piece.name: piece.numel for own, _ in held for piece in own.pieces}
        wanted = {piece.name: piece.numel for own in self.target for piece in own.pieces}
        # Other parameters train now: then there is nothing to follow.
        layouts = self.target if present == wanted else tuple(own for own, _ in held)
        return Gradients(layouts, held), tickets


@dataclass(frozen=True)
class Gradients:
    """The gradients in some of DDP's buckets, and how to lay them out for the reduction."""

    layouts: tuple[Layout, ...]
    held: list[tuple[Layout, Tensor]]

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each buffer that `pack` will make."""
        by_name = {piece.name: buffer.dtype for layout, buffer in self.held for piece in layout.pieces}
        return [by_name[layout.pieces[0].name] for layout in self.layouts]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(layout.numel for layout in self.layouts)

    def pack(self) -> list[tuple[Layout, Tensor]]:
        """Return the gradients as `layouts` has them, copied unless that is how they are; runs on the lane."""
        if self.layouts == tuple(layout for layout, _ in self.held):
            return self.held
        views = _by_name(self.held)
        return [(layout, torch.cat([views[piece.name] for piece in layout.pieces])) for layout in self.layouts]

    def unpack(self, packed: list[tuple[Layout, Tensor]]) -> None:
        """Copy the gradients back into the buckets they came from."""
        if packed is self.held:
            return
        values = _by_name(packed)
        for name, view in _by_name(self.held).items():
            view.copy_(values[name])


def _by_name(buffers: list[tuple[Layout, Tensor]]) -> dict[str, Tensor]:
    return {
        piece.name: buffer[offset : offset + piece.numel]
        for layout, buffer in buffers
        for offset, piece in zip(layout.offsets, layout.pieces, strict=True)
    }
