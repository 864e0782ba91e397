"""How often each size is repeated, and where to stop, when there is only so much time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

_LEAST_WARM_UP = 1
_LEAST_ITERATIONS = 3
_LEAST_POINTS = 4
_GROWTH_SHARE = 0.85  # of the time; the rest is for what has to be measured again
_AGAIN = 3
_CLEARLY = 1.1
_FAR = 1.5
_SETTLED_US = 30e3


@dataclass(frozen=True)
class Repeats:
    """Calls before time is taken, and calls that are timed."""

    warm_up: int
    iterations: int


_LEAST = Repeats(_LEAST_WARM_UP, _LEAST_ITERATIONS)


@dataclass(frozen=True)
class Measured:
    """One size: the median time of a call, and what measuring it took in all."""

    time_us: float
    spent_us: float


Measure = Callable[[int, Repeats], Measured]
"""Bytes of a message, and how often."""


@dataclass(frozen=True)
class Sweep:
    """The points of one curve, (bytes, microseconds); `skipped` are the sizes that the time did not suffice for."""

    points: tuple[tuple[int, float], ...]
    skipped: tuple[int, ...]
    spent_us: float


def repeats(predicted_us: float, left_us: float, wanted: Repeats) -> Repeats | None:
    """Return how often to repeat a call that should take `predicted_us`, None when there is no time for it.

    Short calls are repeated up to ten times as often as wanted, since what disturbs them is longer than they are. A
    size may take a quarter of what is left, so that larger ones have a chance, which need few repeats; the last one
    may take all of it.
    """
    portion_us = left_us / 4
    often = min(int(_SETTLED_US / predicted_us), 10 * wanted.iterations)
    full = Repeats(wanted.warm_up, max(often, wanted.iterations))
    if predicted_us * (full.warm_up + full.iterations) <= portion_us:
        return full
    affordable = int(portion_us / predicted_us) - _LEAST_WARM_UP
    if affordable >= _LEAST_ITERATIONS:
        return Repeats(_LEAST_WARM_UP, min(affordable, full.iterations))
    if predicted_us * (_LEAST_WARM_UP + _LEAST_ITERATIONS) <= left_us:
        return _LEAST
    return None


def sweep(sizes: Sequence[int], share_us: float, wanted: Repeats, measure: Measure) -> Sweep:
    """Measure `sizes` in order until `share_us` is used up.

    The first size is tried before it is measured, which also makes connections. A call is predicted to take as much
    longer than the one before as it is larger, which no latency exceeds. The first four sizes are measured in any case:
    less makes no curve. What was disturbed is measured again, and the least median counts: a message that took far
    longer than predicted, once and at once; one that took longer than a larger one, up to three times in the end.
    Deterministic: ranks that measure equal times decide alike.
    """
    taken = _Taken(share_us, measure)
    before_nbytes, before_us = sizes[0], taken.once(sizes[0], _LEAST).time_us
    for nbytes in sizes:
        predicted_us = before_us * nbytes / before_nbytes
        often = repeats(predicted_us, _GROWTH_SHARE * share_us - taken.spent_us, wanted)
        if often is None and len(taken.found) >= _LEAST_POINTS:
            break
        taken.take(nbytes, often or _LEAST)
        if taken.times_us[nbytes] > _FAR * predicted_us:
            taken.again(nbytes)
        before_nbytes, before_us = nbytes, taken.times_us[nbytes]
    for _ in range(_AGAIN):
        for nbytes in disturbed(taken.times_us):
            taken.again(nbytes)
    points = tuple(taken.times_us.items())
    return Sweep(points, tuple(sizes[len(points) :]), taken.spent_us)


class _Taken:
    """What was measured of one curve, and the time it took."""

    def __init__(self, share_us: float, measure: Measure) -> None:
        self._share_us = share_us
        self._measure = measure
        self.spent_us = 0.0
        self.found: dict[int, tuple[Repeats, Measured]] = {}

    @property
    def times_us(self) -> dict[int, float]:
        """The time of each size, smallest first."""
        return {nbytes: measured.time_us for nbytes, (_, measured) in self.found.items()}

    def once(self, nbytes: int, often: Repeats) -> Measured:
        """Measure without keeping it."""
        measured = self._measure(nbytes, often)
        self.spent_us += measured.spent_us
        return measured

    def take(self, nbytes: int, often: Repeats) -> None:
        """Measure a new size."""
        self.found[nbytes] = (often, self.once(nbytes, often))

    def again(self, nbytes: int) -> None:
        """Measure a size once more if there is time for it, and keep the least."""
        often, measured = self.found[nbytes]
        if self.spent_us + measured.spent_us <= self._share_us:
            self.found[nbytes] = (often, min(measured, self.once(nbytes, often), key=lambda each: each.time_us))


def disturbed(times_us: Mapping[int, float]) -> list[int]:
    """Return the sizes, of increasing ones, that took clearly longer than some larger size."""
    found: list[int] = []
    least_us = inf
    for nbytes, time_us in reversed(list(times_us.items())):
        if time_us > _CLEARLY * least_us:
            found.append(nbytes)
        least_us = min(least_us, time_us)
    return found[::-1]
