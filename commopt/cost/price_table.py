# SPDX-License-Identifier: Apache-2.0
"""The price of a message by its length, as a table that answers for many lengths at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from commopt.document import require_time, require_whole
from commopt.errors import ConfigurationError

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

_SMALLEST_BYTES = 256
_PER_OCTAVE = 8


@dataclass(frozen=True)
class PriceTable:
    """The time of a message by its length: straight lines between points.

    Below the first point a message costs as much as there. Beyond the last one the line goes on, but never falls.

    nbytes: lengths, in increasing order.
    time_us: the time at each of them.
    """

    nbytes: tuple[int, ...]
    time_us: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.nbytes or len(self.nbytes) != len(self.time_us):
            raise ConfigurationError(
                f"price table: {len(self.nbytes)} sizes and {len(self.time_us)} times; give as many of both, at least 1"
            )
        for size, time_us in zip(self.nbytes, self.time_us, strict=True):
            require_whole(size, 0, "price table: a size")
            require_time(time_us, f"price table: the time of {size} bytes")
        if any(left >= right for left, right in zip(self.nbytes, self.nbytes[1:], strict=False)):
            raise ConfigurationError(f"price table: sizes {list(self.nbytes)} must increase")

    @classmethod
    def of(cls, price: Callable[[int], float], largest_bytes: int) -> PriceTable:
        """Tabulate `price`, bytes of one message to microseconds, up to the largest message it is needed for.

        Where it is a straight line the table is exact; a bend is cut off within 1/8 of an octave.
        """
        require_whole(largest_bytes, 1, "largest_bytes")
        octaves = np.log2(max(largest_bytes / _SMALLEST_BYTES, 1.0))
        steps = _SMALLEST_BYTES * 2 ** (np.arange(int(octaves * _PER_OCTAVE) + 1) / _PER_OCTAVE)
        sizes = sorted({1, largest_bytes, *(int(size) for size in steps if size < largest_bytes)})
        return cls(tuple(sizes), tuple(float(price(size)) for size in sizes))

    @cached_property
    def _points(self) -> tuple[Floats, Floats]:
        return np.array(self.nbytes, dtype=np.float64), np.array(self.time_us, dtype=np.float64)

    @cached_property
    def last_slope(self) -> float:
        """Microseconds a byte beyond the last point."""
        slopes = np.diff(self.time_us) / np.diff(self.nbytes)
        return float(slopes[-1:].sum().clip(0.0))

    def times_us(self, nbytes: Whole) -> Floats:
        """Return the time of each of these sizes."""
        sizes, times = self._points
        inside = np.interp(nbytes, sizes, times)
        return np.asarray(inside + self.last_slope * np.maximum(nbytes - sizes[-1], 0.0), dtype=np.float64)

    def __call__(self, nbytes: int) -> float:
        """Return the time of one message."""
        return float(self.times_us(np.array([nbytes]))[0])

    def along(self, factor: float, overhead_us: float) -> PriceTable:
        """Return the table of factor * time + overhead_us."""
        return PriceTable(self.nbytes, tuple(factor * time_us + overhead_us for time_us in self.time_us))
