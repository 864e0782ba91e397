# SPDX-License-Identifier: Apache-2.0
"""Which elements of a buffer are matrices worth a low-rank approximation, and how they are spread over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import ceil, prod, sqrt

import torch
from torch import Tensor

from commopt.feedback import Layout, Piece, Side, Spans, gaps, joined_spans, matches
from commopt.kernels.lowrank import MatrixTable

_OVERSAMPLING = 8
_MOST_PADDED = 4  # times the height of a factor
_COLUMNS_AT_ONCE = 16  # products with odd numbers of columns take several times as long


@dataclass(frozen=True)
class RankRule:
    """When a matrix is compressed: its factors have fewer than 1/rate of its elements and no pattern has its name."""

    matrix_rank: int
    min_compression_rate: float
    dense: tuple[str, ...]

    def compresses(self, name: str, rows: int, cols: int) -> bool:
        """Return whether a matrix of the parameter `name` is worth it."""
        cost = (rows + cols) * self.matrix_rank * self.min_compression_rate
        return cost < rows * cols and not matches(name, self.dense)


@dataclass(frozen=True)
class Matrix:
    """Whole rows of a parameter: elements [begin, end) of the buffer."""

    piece: Piece
    begin: int
    rows: int
    cols: int

    @property
    def end(self) -> int:
        """Where in the buffer it ends."""
        return self.begin + self.rows * self.cols


@dataclass(frozen=True)
class MatrixGroup:
    """Matrices of one shape, stacked.

    rows, cols: of each matrix.
    offset: the element of the stacked matrices, and of their residual, at which they begin.
    left_row: the row of all left factors at which theirs begin.
    right_row: the same of right factors.
    """

    matrices: tuple[Matrix, ...]
    rows: int
    cols: int
    offset: int
    left_row: int
    right_row: int

    @cached_property
    def count(self) -> int:
        """Number of matrices."""
        return len(self.matrices)

    def cut(self, numel: int) -> Iterator[MatrixGroup]:
        """Iterate over parts of about `numel` elements, each of whole matrices."""
        at_once = max(numel // (self.rows * self.cols), 1)
        for first in range(0, self.count, at_once):
            yield MatrixGroup(
                self.matrices[first : first + at_once],
                self.rows,
                self.cols,
                self.offset + first * self.rows * self.cols,
                self.left_row + first * self.rows,
                self.right_row + first * self.cols,
            )

    @cached_property
    def ranges(self) -> tuple[tuple[Matrix, int, int], ...]:
        """The matrices, each with its first element and its end among all that are stacked."""
        numel = self.rows * self.cols
        return tuple(
            (matrix, self.offset + number * numel, self.offset + (number + 1) * numel)
            for number, matrix in enumerate(self.matrices)
        )

    def stack(self, stacked: Tensor) -> Tensor:
        """Return the matrices of this shape among all that are `stacked` (1-D): [count, rows, cols]."""
        numel = self.count * self.rows * self.cols
        return stacked[self.offset : self.offset + numel].view(self.count, self.rows, self.cols)

    def factors(self, side: Side, factors: Tensor) -> Tensor:
        """Return the group's of all the plan's left or right factors [rows of all, r]: [count, rows or cols, r]."""
        begin, height = (self.left_row, self.rows) if side == "left" else (self.right_row, self.cols)
        return factors[begin : begin + self.count * height].view(self.count, height, -1)


@dataclass(frozen=True)
class MatrixPlan:
    """The matrices of a buffer, grouped by shape, and the spans of everything else."""

    layout: Layout
    groups: tuple[MatrixGroup, ...]
    dense_spans: Spans

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """All of them, in the order in which they are stacked."""
        return tuple(matrix for group in self.groups for matrix in group.matrices)

    @cached_property
    def heights(self) -> dict[Side, tuple[int, ...]]:
        """Rows of the left, and of the right factor of each matrix."""
        matrices = self.matrices
        return {"left": tuple(each.rows for each in matrices), "right": tuple(each.cols for each in matrices)}

    @cached_property
    def table(self) -> Tensor:
        """The matrices as the kernels for CPUs take them: int64 [matrices, 6], see csrc/cpu/kernels.hpp."""
        rows = []
        for group in self.groups:
            for n, (matrix, first, _) in enumerate(group.ranges):
                factors = group.left_row + n * group.rows, group.right_row + n * group.cols
                rows.append((matrix.begin, first, group.rows, group.cols, *factors))
        return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 6)

    def table_on(self, device: torch.device) -> MatrixTable:
        """Return the same as the kernels of a GPU take it."""
        if device not in self._tables:
            self._tables[device] = MatrixTable.of(self.table, device)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, MatrixTable]:
        return {}

    @cached_property
    def height_table(self) -> dict[Side, Tensor]:
        """`heights` as tensors: int64 [matrices]."""
        return {side: torch.tensor(each, dtype=torch.int64, device="cpu") for side, each in self.heights.items()}

    @cached_property
    def stacked(self) -> Layout:
        """The layout of the stacked matrices."""
        return Layout(tuple(matrix.piece for matrix in self.matrices))

    @cached_property
    def everything(self) -> Layout:
        """The layout of the stacked matrices, with the dense elements behind them."""
        return Layout(self.stacked.pieces + self.dense.pieces)

    @cached_property
    def splits(self) -> bool:
        """Whether a parameter is a matrix in part: all its residuals are in one slot, which holds the rest too."""
        return not self.stacked.names.isdisjoint(self.dense.names)

    @cached_property
    def dense(self) -> Layout:
        """The layout of the dense spans."""
        return self.layout.select(self.dense_spans)

    def parts(self, numel: int) -> tuple[MatrixGroup, ...]:
        """Return the groups in parts of about `numel` elements."""
        if numel not in self._parts:
            self._parts[numel] = tuple(part for group in self.groups for part in group.cut(numel))
        return self._parts[numel]

    @cached_property
    def _parts(self) -> dict[int, tuple[MatrixGroup, ...]]:
        return {}

    @cached_property
    def rows(self) -> dict[Side, int]:
        """Rows of all left, and of all right factors together."""
        return {side: sum(heights) for side, heights in self.heights.items()}

    @cached_property
    def by_height(self) -> dict[Side, tuple[tuple[int, Spans], ...]]:
        """Where, among the rows of all left or right factors, those of one height are: (height, spans)."""
        found: dict[Side, tuple[tuple[int, Spans], ...]] = {}
        for side, heights in self.heights.items():
            spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for height, end in zip(heights, accumulate(heights), strict=True):
                spans[height].append((end - height, end))
            found[side] = tuple((height, joined_spans(each)) for height, each in spans.items())
        return found

    @cached_property
    def padded(self) -> dict[Side, PaddedFactors]:
        """How the kernels of a GPU take all left, and all right factors at once."""
        return {side: PaddedFactors(heights) for side, heights in self.heights.items()}


class PaddedFactors:
    """Factors of several heights in stacks of one height, with zeros below the shorter ones: a kernel for a stack.

    Zero rows leave every sum of a factor's columns what it is. A factor stands beside others up to four times as high.

    stacks: the first row, the number of factors and the height of each stack.
    rows: of all stacks.
    """

    def __init__(self, heights: tuple[int, ...]) -> None:
        self._heights = heights
        self._slots: dict[torch.device, Tensor] = {}
        self.stacks: list[tuple[int, int, int]] = []
        self.rows = 0
        self._first = [0] * len(heights)  # row of each factor
        self._beside = [0] * len(heights)  # the height of its stack
        waiting = sorted(range(len(heights)), key=lambda number: -heights[number])
        while waiting:
            height = heights[waiting[0]]
            taken = [number for number in waiting if _MOST_PADDED * heights[number] >= height]
            self.stacks.append((self.rows, len(taken), height))
            for number in taken:
                self._first[number], self._beside[number] = self.rows, height
                self.rows += height
            waiting = waiting[len(taken) :]

    def slots(self, device: torch.device) -> Tensor:
        """Return the row of the stacks of each row of all factors, int64."""
        if device not in self._slots:
            each = [
                torch.arange(first, first + height, device="cpu")
                for first, height in zip(self._first, self._heights, strict=True)
            ]
            self._slots[device] = torch.cat(each).to(device)
        return self._slots[device]

    def noise(self, initial: Tensor) -> Tensor:
        """Return initial factors [rows of all, r] in stacks [rows, r], in such a unit that the stack's noise suits."""
        parts = initial.split(self._heights)
        weights = (sqrt(own / stack) for own, stack in zip(self._heights, self._beside, strict=True))
        padded = initial.new_zeros(self.rows, initial.shape[1])
        scaled = torch.cat([part * weight for part, weight in zip(parts, weights, strict=True)])
        return padded.index_copy_(0, self.slots(initial.device), scaled)


@lru_cache(maxsize=1024)
def matrix_plan(layout: Layout, rule: RankRule) -> MatrixPlan:
    """Find the matrices in a buffer: whole rows of parameters with two dimensions or more, where `rule` says so.

    A parameter's columns are those of the split of its shape that has the fewest rows and columns together. Everything
    else travels dense, also a row of which the buffer holds a part.
    """
    by_shape: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
    for offset, piece in zip(layout.offsets, layout.pieces, strict=True):
        matrix = _matrix(piece, offset)
        if matrix is not None and rule.compresses(piece.name, matrix.rows, matrix.cols):
            by_shape[matrix.rows, matrix.cols].append(matrix)
    groups = []
    numel = left_row = right_row = 0
    for (rows, cols), matrices in sorted(by_shape.items()):
        groups.append(MatrixGroup(tuple(matrices), rows, cols, numel, left_row, right_row))
        numel += len(matrices) * rows * cols
        left_row += len(matrices) * rows
        right_row += len(matrices) * cols
    taken = sorted((matrix.begin, matrix.end) for group in groups for matrix in group.matrices)
    return MatrixPlan(layout, tuple(groups), tuple(gaps(taken, layout.numel)))


@lru_cache(maxsize=1024)
def divide(layout: Layout, rule: RankRule, parts: int) -> tuple[Spans, ...]:
    """Spread a buffer over `parts` ranks: whole matrices, the largest first, each to the rank that has the least.

    A matrix larger than an equal share is cut by rows, as far as `rule` still compresses the blocks. Dense elements
    fill up, cut anywhere. The same everywhere.
    """
    whole = matrix_plan(layout, rule)
    share = ceil(layout.numel / parts)
    blocks = sorted(
        (block for matrix in whole.matrices for block in _row_blocks(matrix, rule, share)),
        key=lambda block: (block[0] - block[1], block[0]),
    )
    segments: list[list[tuple[int, int]]] = [[] for _ in range(parts)]
    filled = [0] * parts
    for begin, end in blocks:
        emptiest = filled.index(min(filled))
        segments[emptiest].append((begin, end))
        filled[emptiest] += end - begin
    room = max(share, *filled)
    place = 0
    for begin, end in whole.dense_spans:
        while begin < end:
            taken = min(end - begin, room - filled[place])
            if taken:
                segments[place].append((begin, begin + taken))
                filled[place] += taken
                begin += taken
            else:
                place += 1
    return tuple(joined_spans(sorted(spans)) for spans in segments)


def column_count(shape: tuple[int, ...]) -> int:
    """Return the columns of a parameter's matrix, 0 for a shape that is unknown or has fewer than two dimensions."""
    if len(shape) < 2:
        return 0
    splits = [(prod(shape[:dim]), prod(shape[dim:])) for dim in range(1, len(shape))]
    return min(splits, key=sum)[1]


def _matrix(piece: Piece, offset: int) -> Matrix | None:
    """Return the whole rows of a piece that begins at element `offset` of the buffer."""
    cols = column_count(piece.shape)
    if cols == 0:
        return None
    first, last = ceil(piece.begin / cols), piece.end // cols
    if first >= last:
        return None
    rows = Piece(piece.name, first * cols, last * cols, piece.shape)
    return Matrix(rows, offset + first * cols - piece.begin, last - first, cols)


def _row_blocks(matrix: Matrix, rule: RankRule, share: int) -> Iterator[tuple[int, int]]:
    """Cut a matrix by rows into equal blocks of about `share` elements or less, or into larger ones."""
    count = ceil((matrix.end - matrix.begin) / share)
    while count > 1 and not rule.compresses(matrix.piece.name, matrix.rows // count, matrix.cols):
        count -= 1
    for number in range(count):
        first, last = number * matrix.rows // count, (number + 1) * matrix.rows // count
        yield matrix.begin + first * matrix.cols, matrix.begin + last * matrix.cols


@torch.no_grad()
def beyond_rank(matrix: Tensor, rank: int) -> float:
    """Return the squared error of the best approximation of a matrix [rows, cols] by `rank`, 0 where it has no more.

    Randomized subspace iteration (Halko, Martinsson, Tropp, "Finding structure with randomness", SIAM Review 2011,
    arXiv 0909.4061, algorithm 4.4), two passes there and back. The singular values are those within the subspace, hence
    never too large; the error is too small by rounding only.
    """
    largest = float(matrix.abs().amax()) or 1.0
    values = matrix.float() / largest  # squares neither overflow nor vanish
    columns = ceil((rank + _OVERSAMPLING) / _COLUMNS_AT_ONCE) * _COLUMNS_AT_ONCE
    draws = torch.Generator(values.device).manual_seed(0)
    start = torch.randn(
        values.shape[1], min(columns, *values.shape), generator=draws, dtype=torch.float32, device=values.device
    )
    basis = torch.linalg.qr(values.mT @ torch.linalg.qr(values @ start).Q).Q
    inside = values.mT @ torch.linalg.qr(values @ basis).Q
    squares = torch.linalg.eigvalsh((inside.mT @ inside).double()).flip(0)[:rank]
    whole = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    return max(float(whole - squares.sum()), 0.0) * largest**2
