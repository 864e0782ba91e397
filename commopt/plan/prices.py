"""What a message costs: its time by size for every strategy, and what comes on top of it in each bucket."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from commopt.document import require_text, require_time, require_whole
from commopt.errors import ConfigurationError

Key = tuple[str, int]  # strategy, chunks
Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

_SMALLEST_BYTES = 256
_PER_OCTAVE = 8


@dataclass(frozen=True)
class PriceTable:
    """Time of a message by its bytes: straight lines between points.

    Below the first point a message costs what it costs there; beyond the last the line goes on, but never falls.
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
        """Tabulate `price`, bytes of one message to microseconds, up to the largest bucket it is needed for.

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
        if len(self.nbytes) == 1:
            return 0.0
        return max(0.0, (self.time_us[-1] - self.time_us[-2]) / (self.nbytes[-1] - self.nbytes[-2]))

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


@dataclass(frozen=True)
class Costs:
    """What buckets cost on the lane.

    prices: by (strategy, chunks); every strategy needs one with chunks 1.
    overhead_us: of each bucket, beside its message. pack_us_per_byte: of bringing several units into one buffer and
        back; a bucket of one unit is sent where it lies.
    """

    prices: Mapping[Key, PriceTable]
    overhead_us: float = 0.0
    pack_us_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not self.prices:
            raise ConfigurationError("costs: no prices; give one for at least one strategy")
        require_time(self.overhead_us, "costs: overhead_us")
        require_time(self.pack_us_per_byte, "costs: pack_us_per_byte")
        for strategy, chunks in self.prices:
            require_text(strategy, "costs: a strategy")
            require_whole(chunks, 1, f"costs: chunks of {strategy!r}")
            if (strategy, 1) not in self.prices:
                raise ConfigurationError(
                    f"costs: {strategy!r} has a price for {chunks} chunks but none for 1; give ({strategy!r}, 1) too"
                )

    def only(self, strategies: Collection[str]) -> Costs:
        """Return the costs of some of the strategies."""
        return replace(self, prices={key: table for key, table in self.prices.items() if key[0] in strategies})

    def transfer_us(self, nbytes: int, strategy: str, chunks: int) -> float:
        """Return the price of a message; raises ConfigurationError for a strategy that has none."""
        table = self.prices.get((strategy, chunks))
        if table is None:
            known = ", ".join(f"{name!r} with {count}" for name, count in self.prices)
            raise ConfigurationError(f"costs: no price for {strategy!r} with {chunks} chunks; there are {known}")
        return table(nbytes)

    def lane_us(self, nbytes: int, strategy: str, chunks: int, units: int) -> float:
        """Return how long a bucket of so many units keeps the lane busy."""
        pack_us = self.pack_us_per_byte * nbytes if units > 1 else 0.0
        return self.overhead_us + self.transfer_us(nbytes, strategy, chunks) + pack_us
