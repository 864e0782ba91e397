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
    initial: factors of both sides to begin with, at hand also because they keep a direction from getting lost.
    """

    layout: Layout
    columns: tuple[int, ...]
    rights: Tensor
    initial: dict[Side, Tensor]

    def each(self) -> Iterator[tuple[Piece, Tensor]]:
        """Iterate over the matrices, each with its factor."""
        yield from zip(self.layout.pieces, self.rights.split(self.columns), strict=True)


@dataclass(frozen=True, eq=False)
class Kept:
    """The right factor [columns, r] of one matrix, in store until its rows, or others of its parameter, are sent."""

    piece: Piece
    right: Tensor


@dataclass(eq=False)
class FactorStore:
    """The factors of one registration. Equal on all ranks that reduce the same buffers among each other.

    They stay on their rank: rows that another rank of the node sends from now on begin with random ones there.
    Changed by one thread at a time, as residuals are; any thread may ask what there is.
    """

    _used: dict[tuple[str, Layout], Factors] = field(default_factory=dict)
    _kept: dict[str, dict[str, list[Kept]]] = field(default_factory=dict)  # by path and name
    _lock: RLock = field(default_factory=RLock, repr=False)

    def take(self, path: str, layout: Layout, matrix_rank: int, columns: tuple[int, ...], make: Make) -> Factors:
        """Return the factors of a buffer's matrices: as they were for the same rows, else the nearest known ones.

        A right factor suits all blocks of rows of a parameter: that of the first block known starts the others. What
        nobody knows, or only with another `matrix_rank`, begins with what `make` returns.
        """
        key = (path, layout)
        if key in self._used and self._used[key].rights.shape[1] == matrix_rank:
            return self._used[key]
        with self._lock:
            self.release(path, layout.names)
            initial: dict[Side, Tensor] = {"left": make("left"), "right": make("right")}
            factors = self._used[key] = Factors(layout, columns, initial["right"].clone(), initial)
            known = self._kept.get(path, {})
            for piece, right in factors.each():
                suiting = [kept for kept in known.get(piece.name, []) if kept.right.shape == right.shape]
                same = [kept for kept in suiting if (kept.piece.begin, kept.piece.end) == (piece.begin, piece.end)]
                if suiting:
                    right.copy_(same[0].right if same else min(suiting, key=lambda kept: kept.piece.begin).right)
            for name in layout.names:
                known.pop(name, None)
            return factors

    def release(self, path: str, names: Iterable[str]) -> None:
        """Take apart the factors of buffers with any of these parameters, and keep them until they are asked for."""
        names = frozenset(names)
        with self._lock:
            for key, factors in list(self._used.items()):
                if key[0] == path and not factors.layout.names.isdisjoint(names):
                    del self._used[key]
                    for piece, right in factors.each():
                        self.keep(path, Kept(piece, right))

    def forget(self, path: str, names: Iterable[str]) -> None:
        """Keep nothing of these parameters, whose rows others of the node send from now on."""
        names = frozenset(names)
        with self._lock:
            self.release(path, names)
            for name in names:
                self._kept.get(path, {}).pop(name, None)

    def keep(self, path: str, kept: Kept) -> None:
        """Keep the factor of one matrix until it is asked for."""
        with self._lock:
            self._kept.setdefault(path, {}).setdefault(kept.piece.name, []).append(kept)

    def everything(self) -> list[tuple[str, Kept]]:
        """Return what there is, with its path."""
        with self._lock:
            used = [
                (path, Kept(piece, right))
                for (path, _), factors in self._used.items()
                for piece, right in factors.each()
            ]
            return used + [
                (path, kept) for path, by_name in self._kept.items() for each in by_name.values() for kept in each
            ]

    # --------------------------------------------------------------------------------------- facts

    @property
    def nbytes(self) -> int:
        """Bytes kept, initial factors included."""
        with self._lock:
            initial = [tensor for factors in self._used.values() for tensor in factors.initial.values()]
            return sum(tensor.nbytes for tensor in [*initial, *(kept.right for _, kept in self.everything())])
