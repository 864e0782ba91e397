"""Which parameters are worth compressing, and which travel dense."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from math import ceil

import torch

from commopt.compress import Compressor
from commopt.feedback.layout import Layout, Piece

Spans = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def split(layout: Layout, compressor: Compressor, dtype: torch.dtype, dense: tuple[str, ...]) -> tuple[Spans, Spans]:
    """Return the spans of a buffer to compress and those to send as they are; neighbours are joined.

    A piece travels dense when its name matches a pattern of `dense` (as in a shell: "*.bias"), when its payload would
    not be smaller than its `dtype` values, or when the compressor does not want parameters of its shape.
    """
    compressed: list[tuple[int, int]] = []
    kept: list[tuple[int, int]] = []
    for offset, piece in zip(layout.offsets, layout.pieces, strict=True):
        worth_it = compressor.suits(piece.shape) and _shrinks(piece, compressor, dtype)
        spans = compressed if worth_it and not matches(piece.name, dense) else kept
        begin, end = offset, offset + piece.numel
        if spans and spans[-1][1] == begin:
            begin = spans.pop()[0]
        spans.append((begin, end))
    return tuple(compressed), tuple(kept)


def _shrinks(piece: Piece, compressor: Compressor, dtype: torch.dtype) -> bool:
    granularity = compressor.granularity
    return compressor.payload_nbytes(ceil(piece.numel / granularity) * granularity) < piece.numel * dtype.itemsize


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a parameter's name matches any of the patterns, as in a shell."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
