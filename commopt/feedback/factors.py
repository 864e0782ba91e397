# SPDX-License-Identifier: Apache-2.0
"""Factors of low-rank approximations that the next step starts from, by level, parameter and range of elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import RLock
from typing import Literal

from torch import Tensor

from commopt.feedback.layout import Layout, Piece

Side = Literal["left", "right"]
Make = Callable[[Side], Tensor]


@dataclass(eq=False)
class Factors:
    """The right factors of every matrix in a buffer, one after the other: [columns of all, r], float32.

    layout: the elements of each matrix, whole rows of a parameter.
    columns: of each matrix.
    rights: the factors.
    initial: factors of both sides to begin with; also the noise that saves a direction from vanishing.
    padded: the initial factors, as the kernels of a GPU take them; of the sides that have been asked for.
    """

    layout: Layout
    columns: tuple[int, ...]
    rights: Tensor
    initial: dict[Side, Tensor]
    padded: dict[Side, Tensor] = field(default_factory=dict)

    def each(self) -> Iterator[tuple[Piece, Tensor]]:
        """Iterate over the matrices, each with its factor."""
        yield from zip(self.layout.pieces, self.rights.split(self.columns), strict=True)


@dataclass(frozen=True, eq=False)
class RightFactor:
    """The right factor [columns, r] of one matrix: waits until its rows, or others of its parameter, are sent."""

    piece: Piece
    right: Tensor


@dataclass(eq=False)
class FactorStore:
    """The factors of one registration. Equal on all ranks that reduce the same buffers among each other.

    A factor is in use by a buffer, or waits at a path, as a residual does. Factors stay on their rank: rows that
    another rank of the node sends from now on begin with random ones there. Changed by one thread at a time; any thread
    may ask for them.
    """

    version: object = field(default_factory=object)  # another one whenever a buffer gets other factors
    _in_use: dict[tuple[str, Layout], Factors] = field(default_factory=dict)
    _waiting: dict[str, dict[str, list[RightFactor]]] = field(default_factory=dict)  # by path and name
    _lock: RLock = field(default_factory=RLock, repr=False)

    def take(self, path: str, layout: Layout, matrix_rank: int, columns: tuple[int, ...], make: Make) -> Factors:
        """Return the factors of a buffer's matrices: as they were for the same rows, else the nearest known ones.

        A right factor suits all blocks of rows of a parameter: that of the first block known starts the others. One
        that is unknown, or known with another `matrix_rank` only, begins with the result of `make`.
        """
        key = (path, layout)
        if key in self._in_use and self._in_use[key].rights.shape[1] == matrix_rank:
            return self._in_use[key]
        with self._lock:
            self.release(path, layout.names)
            self.version = object()
            initial: dict[Side, Tensor] = {"left": make("left"), "right": make("right")}
            factors = self._in_use[key] = Factors(layout, columns, initial["right"].clone(), initial)
            known = self._waiting.get(path, {})
            for piece, right in factors.each():
                suiting = [each for each in known.get(piece.name, []) if each.right.shape == right.shape]
                same = [each for each in suiting if (each.piece.begin, each.piece.end) == (piece.begin, piece.end)]
                if suiting:
                    right.copy_(same[0].right if same else min(suiting, key=lambda each: each.piece.begin).right)
            for name in layout.names:
                known.pop(name, None)
            return factors

    def release(self, path: str, names: Iterable[str]) -> None:
        """Let the factors of buffers with any of these parameters wait."""
        names = frozenset(names)
        with self._lock:
            for key, factors in list(self._in_use.items()):
                if key[0] == path and not factors.layout.names.isdisjoint(names):
                    del self._in_use[key]
                    self.version = object()
                    for piece, right in factors.each():
                        self.add(path, RightFactor(piece, right))

    def forget(self, path: str, names: Iterable[str]) -> None:
        """Drop the factors of these parameters, whose rows others of the node send from now on."""
        names = frozenset(names)
        with self._lock:
            self.release(path, names)
            for name in names:
                self._waiting.get(path, {}).pop(name, None)

    def add(self, path: str, factor: RightFactor) -> None:
        """Let the factor of one matrix wait."""
        with self._lock:
            self._waiting.setdefault(path, {}).setdefault(factor.piece.name, []).append(factor)

    def everything(self) -> list[tuple[str, RightFactor]]:
        """Return all factors, in use and waiting, each with its path."""
        with self._lock:
            used = [
                (path, RightFactor(piece, right))
                for (path, _), factors in self._in_use.items()
                for piece, right in factors.each()
            ]
            return used + [
                (path, each) for path, by_name in self._waiting.items() for known in by_name.values() for each in known
            ]

    # --------------------------------------------------------------------------------------- facts

    @property
    def nbytes(self) -> int:
        """Bytes of all factors, initial ones included."""
        with self._lock:
            kept = [(*factors.initial.values(), *factors.padded.values()) for factors in self._in_use.values()]
            initial = [tensor for tensors in kept for tensor in tensors]
            return sum(tensor.nbytes for tensor in [*initial, *(each.right for _, each in self.everything())])
