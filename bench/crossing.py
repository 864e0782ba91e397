"""When a falling curve gets down to a level."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, isfinite


def first_below(curve: Iterable[tuple[float, float]], level: float) -> float | None:
    """Return the x at which a curve of (x, y) is first down at `level`, None if it never is.

    Straight lines join the points; where the point before is not finite, that of the first one below counts.
    """
    x_before, y_before = -inf, inf
    for x, y in curve:
        if y <= level:
            if not isfinite(y_before):
                return x
            return x_before + (y_before - level) / (y_before - y) * (x - x_before)
        x_before, y_before = x, y
    return None
