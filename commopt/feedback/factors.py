"""Factors of low-rank approximations that the next step starts from, by level, parameter and range of elements."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from commopt.feedback.layout import Layout, Piece

Side = Literal["left", "right"]
Shapes = Sequence[tuple[str, int, int]]
"""Right factors of parameters: name, columns and r of each."""

Make = Callable[[Side], Tensor]


@dataclass(eq=False)
class Factors:
    """Both factors of every matrix in a buffer, one after the other: [rows of all, r] and [columns of all, r], float32.

    layout: the elements of each matrix, whole rows of a parameter. shapes: rows and columns of each.
    initial: the ones to begin with, at hand also because they keep a direction from getting lost.
    """

    layout: Layout
    shapes: tuple[tuple[int, int], ...]
    now: dict[Side, Tensor]
    initial: dict[Side, Tensor]

    @property
    def matrix_rank(self) -> int:
        """The r of all of them."""
        return self.now["right"].shape[1]

    def each(self) -> Iterator[tuple[Piece, Tensor, Tensor]]:
        """Iterate over the matrices, each with its left and its right factor."""
        lefts = self.now["left"].split([rows for rows, _ in self.shapes])
        rights = self.now["right"].split([cols for _, cols in self.shapes])
        yield from zip(self.layout.pieces, lefts, rights, strict=True)


@dataclass(frozen=True, eq=False)
class Kept:
    """The factors of one matrix, in store for whoever asks.

    `held`: this rank had it in use, as no other rank of its node did. Otherwise it is a copy, which any may have.
    """

    piece: Piece
    left: Tensor | None  # [rows, r]; None when only the columns are known to be the same
    right: Tensor  # [cols, r]
    held: bool


@dataclass(eq=False)
class FactorStore:
    """The factors of one registration. Equal on all ranks that reduce the same buffers among each other."""

    _used: dict[tuple[str, Layout], Factors] = field(default_factory=dict)
    _kept: dict[str, dict[str, list[Kept]]] = field(default_factory=dict)  # by path and name

    def take(
        self, path: str, layout: Layout, matrix_rank: int, shapes: tuple[tuple[int, int], ...], make: Make
    ) -> Factors:
        """Return the factors of a buffer's matrices: as they were for the same rows, else the nearest known ones.

        A right factor suits all blocks of rows of a parameter: that of the first block known starts the others. What
        nobody knows begins with what `make` returns, as do left factors of other rows than before, and those that were
        of another rank.
        """
        key = (path, layout)
        if key not in self._used or self._used[key].matrix_rank != matrix_rank:
            self.release(path, layout.names)
            initial: dict[Side, Tensor] = {"left": make("left"), "right": make("right")}
            factors = Factors(layout, shapes, {side: values.clone() for side, values in initial.items()}, initial)
            known = self._kept.get(path, {})
            for piece, left, right in factors.each():
                _fill(left, right, piece, known.get(piece.name, []))
            for name in layout.names:
                known.pop(name, None)
            self._used[key] = factors
        return self._used[key]

    def release(self, path: str, names: Iterable[str]) -> None:
        """Take apart the factors of buffers with any of these parameters, and keep them until they are asked for."""
        names = frozenset(names)
        for key, factors in list(self._used.items()):
            if key[0] == path and not factors.layout.names.isdisjoint(names):
                del self._used[key]
                for piece, left, right in factors.each():
                    self.keep(path, Kept(piece, left, right, held=True))

    def keep(self, path: str, kept: Kept) -> None:
        """Keep the factors of one matrix until they are asked for."""
        self._kept.setdefault(path, {}).setdefault(kept.piece.name, []).append(kept)

    def everything(self) -> Iterator[tuple[str, Kept]]:
        """Iterate over what there is, with its path."""
        for (path, _), factors in self._used.items():
            for piece, left, right in factors.each():
                yield path, Kept(piece, left, right, held=True)
        for path, by_name in self._kept.items():
            for kepts in by_name.values():
                yield from ((path, kept) for kept in kepts)

    # -------------------------------------------------------------------------------------- moving

    def first_rights(self, path: str, shapes: Shapes, device: torch.device) -> Tensor:
        """Return the right factors of the first rows of parameters, joined, zeros for those that this rank had not.

        Of the ranks among which a parameter is divided one holds its first rows, so that adding up moves them exactly.
        """
        self.release(path, (name for name, _, _ in shapes))
        joined = torch.zeros(
            sum(cols * matrix_rank for _, cols, matrix_rank in shapes), dtype=torch.float32, device=device
        )
        for (name, _, _), part in zip(shapes, _parts(joined, shapes), strict=True):
            for kept in self._kept.get(path, {}).get(name, []):
                if kept.held and kept.piece.begin == 0 and kept.right.shape == part.shape:
                    part.copy_(kept.right)
        return joined

    def keep_rights(self, path: str, shapes: Shapes, joined: Tensor, here: Container[str]) -> None:
        """Keep the sum of what all ranks' `first_rights` returned, for the parameters that this rank will have rows of.

        What it had itself stays for the case that it gets the same rows again.
        """
        by_name = self._kept.setdefault(path, {})
        for (name, _, _), part in zip(shapes, _parts(joined, shapes), strict=True):
            before = by_name.pop(name, [])
            if name in here:
                known = bool(part.any())  # else nobody had it; a host sync, but when buffers change only
                moved = [Kept(Piece(name, 0, 0), None, part.clone(), held=False)] if known else []
                own = [replace(kept, held=False) for kept in before if kept.held or not known]
                by_name[name] = moved + own

    # --------------------------------------------------------------------------------------- facts

    @property
    def nbytes(self) -> int:
        """Bytes kept, initial factors included."""
        tensors = [
            tensor for used in self._used.values() for side in (used.now, used.initial) for tensor in side.values()
        ]
        for by_name in self._kept.values():
            for kept in (kept for kepts in by_name.values() for kept in kepts):
                tensors += [tensor for tensor in (kept.left, kept.right) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def save(self) -> list[dict[str, Any]]:
        """Return copies in host memory."""
        return [
            {
                "path": path,
                "piece": [kept.piece.name, kept.piece.begin, kept.piece.end],
                "left": None if kept.left is None else kept.left.detach().to("cpu", copy=True),
                "right": kept.right.detach().to("cpu", copy=True),
                "held": kept.held,
            }
            for path, kept in self.everything()
        ]

    def restore(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Keep what `save` returned on this rank, in host memory: see feedback.restore."""
        for entry in saved:
            left = None if entry["left"] is None else entry["left"].cpu()
            self.keep(entry["path"], Kept(Piece(*entry["piece"]), left, entry["right"].cpu(), entry["held"]))

    def spread(self, ranks: Iterable[Iterable[Mapping[str, Any]]]) -> None:
        """Keep copies of what all ranks of another world held; nodes held the same."""
        held = {(entry["path"], *entry["piece"]): entry for saved in ranks for entry in saved if entry["held"]}
        self.restore({**entry, "held": False} for entry in held.values())


def _fill(left: Tensor, right: Tensor, piece: Piece, known: list[Kept]) -> None:
    """Overwrite a block's factors with those known to suit it."""
    suiting = [kept for kept in known if kept.right.shape == right.shape]
    for kept in suiting:
        same = (kept.piece.begin, kept.piece.end) == (piece.begin, piece.end)
        if same and kept.left is not None and kept.left.shape == left.shape:
            left.copy_(kept.left)
            right.copy_(kept.right)
            return
    if suiting:
        right.copy_(min(suiting, key=lambda kept: kept.piece.begin).right)


def _parts(joined: Tensor, shapes: Shapes) -> list[Tensor]:
    ends = [0, *accumulate(cols * matrix_rank for _, cols, matrix_rank in shapes)]
    return [
        joined[begin:end].view(cols, matrix_rank)
        for begin, end, (_, cols, matrix_rank) in zip(ends[:-1], ends[1:], shapes, strict=True)
    ]
