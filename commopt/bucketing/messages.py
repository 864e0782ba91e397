"""Gradients that travel together: some of DDP's buckets, and the buffers they are laid out in on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commopt.feedback import Layout
from commopt.feedback.scratch import Scratch
from commopt.kernels.pack import pack, unpack
from commopt.lanes import Work


@dataclass(eq=False)
class Held:
    """One of DDP's buckets; `ticket` tells when it is reduced if it was handed out before there was an operation."""

    number: int
    layout: Layout
    bucket: Tensor
    ticket: Work | None = None


@dataclass(frozen=True)
class Message:
    """What one operation of the lane reduces: `held` as they came, in buffers of `layouts`.

    shares: which bucket of the plan each buffer belongs to, None where there is no plan for it.
    """

    held: tuple[Held, ...]
    layouts: tuple[Layout, ...]
    shares: tuple[int | None, ...]

    @classmethod
    def joined(cls, held: Sequence[Held], share: int | None = None) -> Message:
        """Put buckets one after the other, those of each dtype in a buffer of their own."""
        if len(held) == 1:
            return cls(tuple(held), (held[0].layout,), (share,))
        by_dtype: dict[torch.dtype, list[Held]] = {}
        for each in held:
            by_dtype.setdefault(each.bucket.dtype, []).append(each)
        layouts = (_joined(tuple(part.layout for part in parts)) for parts in by_dtype.values())
        return cls(tuple(held), tuple(layouts), (share,) * len(by_dtype))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(layout.numel for layout in self.layouts)

    @property
    def title(self) -> str:
        """The first and the last parameter in it."""
        names = [name for layout in self.layouts for name in layout.title.split(" .. ")]
        return " .. ".join(dict.fromkeys((names[0], names[-1])))

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(each.bucket.numel() * each.bucket.element_size() for each in self.held)

    @property
    def numbers(self) -> tuple[int, ...]:
        """DDP's numbers of the buckets in it."""
        return tuple(each.number for each in self.held)

    def dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each buffer."""
        if len(self.layouts) == len(self.held) == 1:
            return [self.held[0].bucket.dtype]
        by_name = {piece.name: each.bucket.dtype for each in self.held for piece in each.layout.pieces}
        return [by_name[layout.pieces[0].name] for layout in self.layouts]

    def parts(self) -> Iterator[list[Tensor]]:
        """Yield for each buffer the pieces of DDP's buckets that make it up, neighbours in one piece."""
        buckets = [each.bucket.view(-1) for each in self.held]
        came = tuple(each.layout for each in self.held)
        if self.layouts == came:
            yield from ([bucket] for bucket in buckets)
            return
        for runs in _runs(came, self.layouts):
            yield [buckets[place][begin:end] for place, begin, end in runs]


@contextmanager
def packed(parts: Sequence[Tensor], scratch: Scratch) -> Iterator[Tensor]:
    """Give 1-D `parts` as one buffer and write its values back afterwards: copies unless there is only one.

    Runs on the lane, one buffer at a time.
    """
    if len(parts) == 1:
        yield parts[0]
        return
    numel = sum(part.numel() for part in parts)
    buffer = scratch.take("packed buckets", numel, parts[0].dtype, parts[0].device)
    pack(parts, buffer)
    yield buffer
    unpack(buffer, parts)


# The same few in every step, with hundreds of pieces in each: what is known of a layout is worked out once.
@lru_cache(maxsize=1024)
def _joined(layouts: tuple[Layout, ...]) -> Layout:
    if len(layouts) == 1:
        return layouts[0]
    return Layout(tuple(piece for layout in layouts for piece in layout.pieces))


@lru_cache(maxsize=1024)
def _runs(sources: tuple[Layout, ...], targets: tuple[Layout, ...]) -> list[list[tuple[int, int, int]]]:
    """Return which elements [begin, end) of which source make up each target."""
    homes = {
        piece.name: (place, offset)
        for place, layout in enumerate(sources)
        for offset, piece in zip(layout.offsets, layout.pieces, strict=True)
    }
    found = []
    for layout in targets:
        runs: list[tuple[int, int, int]] = []
        for piece in layout.pieces:
            place, begin = homes[piece.name]
            if runs and runs[-1][0] == place and runs[-1][2] == begin:
                runs[-1] = (place, runs[-1][1], begin + piece.numel)
            else:
                runs.append((place, begin, begin + piece.numel))
        found.append(runs)
    return found
