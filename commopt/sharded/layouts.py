# SPDX-License-Identifier: Apache-2.0
"""From what FSDP puts into a buffer to names and ranges: of each parameter a share, padded so that all are equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from commopt.errors import CommoptError
from commopt.feedback import Layout, Piece, Spans, joined_spans


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter: `here` of its whole `shape`, cut along `dim`, in `padded` elements of a buffer.

    Beside tensor parallelism `shape` is what that leaves to this rank.
    """

    name: str
    shape: tuple[int, ...]
    here: tuple[int, ...]
    dim: int
    padded: int

    @property
    def numel(self) -> int:
        """Number of elements on this rank, 0 where others have all of them."""
        return prod(self.here)

    def of(self, rank: int, count: int) -> Part:
        """Return what shard `rank` of `count` has of the same parameter."""
        extent = self.shape[self.dim] if self.shape else 1
        rows = -(-extent // count)
        own = min(max(extent - rank * rows, 0), rows)
        return replace(self, here=(*self.shape[: self.dim], own, *self.shape[self.dim + 1 :]))

    def called(self, rank: int, count: int) -> str:
        """Return its name, as shard `rank` of `count`.

        Cut along dim 0 it is a range of the parameter. Along another it is none: then it has a name and a shape of its
        own, and goes with this number of shards only.
        """
        return self.name if self.dim == 0 else f"{self.name} [part {rank}/{count} of dim {self.dim}]"

    def piece(self, rank: int, count: int) -> Piece:
        """Return what this is of the parameter, as shard `rank` of `count`."""
        if self.dim:
            return Piece(self.called(rank, count), 0, self.numel, self.here)
        begin = min(rank * self.padded, prod(self.shape))
        return Piece(self.name, begin, begin + self.numel, self.shape)


def layout_of(parts: Sequence[Part], rank: int, count: int) -> tuple[Layout, Spans]:
    """Return what shard `rank` of `count` has in a buffer of `parts`, and where: the rest is padding."""
    pieces, spans, offset = [], [], 0
    for part in parts:
        if part.numel:
            pieces.append(part.piece(rank, count))
            spans.append((offset, offset + part.numel))
        offset += part.padded
    return Layout(tuple(pieces)), joined_spans(spans)


def numels_of(parts: Iterable[Part], count: int) -> dict[str, int]:
    """Return the elements of all that `count` shards have, by name, alike on all of them."""
    numels: dict[str, int] = {}
    for part in parts:
        if part.dim == 0:
            numels[part.name] = prod(part.shape)
        else:
            numels |= {part.called(rank, count): part.numel for rank in range(count)}
    return numels


def require_length(parts: Iterable[Part], numel: int) -> None:
    """Raise CommoptError when a buffer of `numel` elements is not what FSDP makes of `parts`."""
    expected = sum(part.padded for part in parts)
    if expected != numel:
        raise CommoptError(f"FSDP's buffer has {numel} elements, its parameters {expected}; report this torch version")
