# SPDX-License-Identifier: Apache-2.0
"""The layout of a buffer: pieces of parameters by name, cut anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from commopt.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor

Spans = tuple[tuple[int, int], ...]
"""Elements [begin, end) of a buffer, several times."""


@dataclass(frozen=True)
class Piece:
    """Elements [begin, end) of the parameter `name`, whose whole `shape` is () when it is unknown."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    def __str__(self) -> str:
        return f"{self.name}[{self.begin}:{self.end}]"


@dataclass(frozen=True)
class Layout:
    """Pieces, one after the other, without gaps; in a whole buffer no name occurs twice."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of_parameters(cls, parameters: Iterable[tuple[str, int | Sequence[int]]]) -> Layout:
        """Lay out whole parameters, given as (name, shape), or (name, numel) where the shape does not matter."""
        pieces = []
        for name, size in parameters:
            numel, shape = (size, ()) if isinstance(size, int) else (prod(size), tuple(size))
            pieces.append(Piece(name, 0, numel, shape))
        return cls(tuple(pieces))

    @classmethod
    def of_gradients(cls, parameters: Mapping[str, Tensor]) -> Layout:
        """Lay out the gradients of whole parameters as DDP does: a dense one in the order of its strides."""
        return cls.of_parameters((name, _stored_shape(parameter)) for name, parameter in parameters.items())

    @classmethod
    def anonymous(cls, numel: int) -> Layout:
        """Describe a tensor that belongs to no model."""
        return cls((Piece("", 0, numel),))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a bucket may hold hundreds of pieces and is looked up at every step
        return hash(self.pieces)

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return sum(piece.numel for piece in self.pieces)

    @cached_property
    def names(self) -> frozenset[str]:
        """Parameters that occur."""
        return frozenset(piece.name for piece in self.pieces)

    @cached_property
    def title(self) -> str:
        """The first and the last parameter in it."""
        return " .. ".join(dict.fromkeys((self.pieces[0].name, self.pieces[-1].name))) if self.pieces else ""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each piece begins."""
        return (0, *accumulate(piece.numel for piece in self.pieces))[:-1]

    @cached_property
    def _by_name(self) -> dict[str, list[tuple[int, Piece]]]:
        """The pieces of each parameter, and where they begin."""
        found: dict[str, list[tuple[int, Piece]]] = {}
        for offset, piece in zip(self.offsets, self.pieces, strict=True):
            found.setdefault(piece.name, []).append((offset, piece))
        return found

    def common(self, other: Layout) -> list[tuple[int, int, int]]:
        """Return the elements that are in both, by their order in `other`.

        In runs: where each begins in this buffer, where in the other, and its length.
        """
        found = []
        for there, theirs in zip(other.offsets, other.pieces, strict=True):
            for here, own in self._by_name.get(theirs.name, ()):
                begin, end = max(own.begin, theirs.begin), min(own.end, theirs.end)
                if begin < end:
                    found.append((here + begin - own.begin, there + begin - theirs.begin, end - begin))
        return found

    def shares_names(self, other: Layout) -> bool:
        """Return whether any parameter occurs in both."""
        return not self.names.isdisjoint(other.names)

    def overlaps(self, other: Layout) -> bool:
        """Return whether any element is in both."""
        return self.shares_names(other) and bool(self.common(other))

    def cut(self, begin: int, end: int) -> Layout:
        """Return what lies in elements [begin, end) of the buffer; there is nothing behind its end."""
        return self.select([(begin, end)])

    def select(self, spans: Sequence[tuple[int, int]]) -> Layout:
        """Return what lies in the spans [begin, end), joined in their order."""
        chosen = []
        for begin, end in spans:
            for offset, piece in zip(self.offsets, self.pieces, strict=True):
                first, last = max(begin, offset), min(end, offset + piece.numel)
                if first < last:
                    begin_here, end_here = piece.begin + first - offset, piece.begin + last - offset
                    chosen.append(Piece(piece.name, begin_here, end_here, piece.shape))
        return Layout(tuple(chosen))

    def spans_of(self, part: Layout) -> list[tuple[int, int]]:
        """Return where the pieces of `part`, each lying within one of these, are in the buffer."""
        return [(here, here + numel) for here, _, numel in self.common(part)]


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a parameter's name matches any of the patterns, as in a shell."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def checked_patterns(whose: str, dense: object) -> tuple[str, ...]:
    """Return the patterns of parameter names that `whose` was given, as a tuple: a list could not be hashed.

    Raises ConfigurationError when they are none.
    """
    if not isinstance(dense, (tuple, list)) or not all(isinstance(pattern, str) for pattern in dense):
        raise ConfigurationError(f"{whose}(dense={dense!r}) must be a tuple of patterns, for example dense=('*.bias',)")
    return tuple(dense)


def joined_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return spans with neighbours joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return tuple(joined)


def gaps(taken: Iterable[tuple[int, int]], numel: int) -> Iterator[tuple[int, int]]:
    """Iterate over the gaps between sorted spans of `numel` elements."""
    done = 0
    for begin, end in [*taken, (numel, numel)]:
        if done < begin:
            yield done, begin
        done = end


def _stored_shape(parameter: Tensor) -> tuple[int, ...]:
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: strides[dim], reverse=True)
    return tuple(parameter.shape[dim] for dim in order)
