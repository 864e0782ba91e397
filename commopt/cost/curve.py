# SPDX-License-Identifier: Apache-2.0
"""The cost of a message by its length: latency and bandwidth, segment by segment, fitted to measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from math import inf, isfinite, nan, sqrt
from statistics import fmean, median

import numpy as np

from commopt.errors import ConfigurationError

Point = tuple[float, float]
"""Bytes of a message, and the microseconds it took."""

_MOST_SEGMENTS = 3
_FEWEST_POINTS = 3  # of a segment, when there are several: two would be fitted exactly, noise and all
_WORSE = 1.25  # how much worse the error of fewer segments may be
_NEGLIGIBLE = 0.005  # relative error that no further segment is needed for
_REACH = 4.0  # how far a curve is trusted, over the largest measured message


@dataclass(frozen=True)
class LineSegment:
    """The time of messages of `from_nbytes` and more, up to the next segment: alpha_us + beta_us_per_byte * nbytes."""

    from_nbytes: float
    alpha_us: float
    beta_us_per_byte: float

    def time_us(self, nbytes: float) -> float:
        """Return the time of a message."""
        return self.alpha_us + self.beta_us_per_byte * nbytes


@dataclass(frozen=True)
class Curve:
    """Time against bytes, in 1 to 3 segments; a larger message never costs less.

    segments: by increasing bytes.
    points: the measurements, by increasing bytes; none for a curve that was not measured.
    note: the difference from the curve that was requested, "" if there is none.
    """

    segments: tuple[LineSegment, ...]
    points: tuple[Point, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        starts = [segment.from_nbytes for segment in self.segments]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ConfigurationError(f"segments begin at {starts} bytes; the first must begin at 0, the others later")
        for segment in self.segments:
            for name in ("from_nbytes", "alpha_us", "beta_us_per_byte"):
                value = getattr(segment, name)
                if not (isfinite(value) and value >= 0):
                    raise ConfigurationError(f"{segment}: {name} must be a finite number, 0 or more")
        _checked(self.points)

    @classmethod
    def linear(cls, alpha_us: float, beta_us_per_byte: float) -> Curve:
        """Return the curve of one latency and one bandwidth."""
        return cls((LineSegment(0.0, alpha_us, beta_us_per_byte),))

    @classmethod
    def fit(cls, points: Iterable[Point]) -> Curve:
        """Fit to measured times, in any order; of several of one message the median counts.

        Least squares of the relative error. Break points are searched over the measured sizes; the fewest segments
        count whose error is not much worse than that of more. Raises ConfigurationError for fewer than two sizes.
        """
        times: dict[float, list[float]] = {}
        for nbytes, time_us in points:
            times.setdefault(nbytes, []).append(time_us)
        merged = tuple((nbytes, median(times[nbytes])) for nbytes in sorted(times))
        _checked(merged)
        if len(merged) < 2:
            raise ConfigurationError(
                f"{len(merged)} message sizes cannot tell latency from bandwidth; measure two or more"
            )
        best = [
            min((cls(segments, merged) for segments in choices), key=lambda curve: curve._deviation)
            for choices in _choices(merged)
        ]
        least = min(curve._deviation for curve in best)
        return next(curve for curve in best if curve._deviation <= max(_WORSE * least, _NEGLIGIBLE))

    def time_us(self, nbytes: float) -> float:
        """Return the time of a message; 0 for an empty one."""
        if nbytes <= 0:
            return 0.0
        time_us = 0.0
        for segment, end in zip(self.segments, self._ends, strict=True):
            if segment.from_nbytes > nbytes:
                break
            time_us = max(time_us, segment.time_us(min(nbytes, end)))
        return time_us

    @property
    def largest_nbytes(self) -> float:
        """The largest message that was measured; infinite when none was."""
        return self.points[-1][0] if self.points else inf

    def extrapolates(self, nbytes: float) -> bool:
        """Return whether a message is more than 4 times as large as the largest that was measured."""
        return nbytes > _REACH * self.largest_nbytes

    @cached_property
    def r_squared(self) -> float:
        """The share of the variance of the measured times that the curve explains; NaN when nothing was measured."""
        if not self.points:
            return nan
        mean = fmean(time for _, time in self.points)
        spread = sum((time - mean) ** 2 for _, time in self.points)
        left = sum((time - self.time_us(nbytes)) ** 2 for nbytes, time in self.points)
        return 1 - left / spread if spread else float(left == 0)

    @cached_property
    def mape(self) -> float:
        """The mean of the relative errors (0.05 is 5 %); NaN when nothing was measured."""
        return fmean(map(abs, self._errors)) if self.points else nan

    def scaled(self, alpha_factor: float, beta_factor: float, note: str) -> Curve:
        """Return the curve of a like operation with other latency and bandwidth."""
        segments = tuple(
            LineSegment(each.from_nbytes, each.alpha_us * alpha_factor, each.beta_us_per_byte * beta_factor)
            for each in self.segments
        )
        like = Curve(segments)
        moved = tuple((nbytes, time * like.time_us(nbytes) / self.time_us(nbytes)) for nbytes, time in self.points)
        return replace(like, points=moved, note=note)

    @cached_property
    def _ends(self) -> tuple[float, ...]:
        return (*(segment.from_nbytes for segment in self.segments[1:]), inf)

    @cached_property
    def _errors(self) -> tuple[float, ...]:
        return tuple(self.time_us(nbytes) / time - 1 for nbytes, time in self.points)

    @property
    def _deviation(self) -> float:
        """Root mean square of the relative errors, for as many points as are free."""
        spent = 3 * len(self.segments) - 1
        return sqrt(sum(error**2 for error in self._errors) / max(len(self.points) - spent, 1))


def _checked(points: tuple[Point, ...]) -> None:
    for nbytes, time_us in points:
        if not (isfinite(nbytes) and nbytes > 0 and isfinite(time_us) and time_us > 0):
            raise ConfigurationError(f"a message of {nbytes} bytes in {time_us} us: both must be finite and above 0")
    if any(a >= b for (a, _), (b, _) in pairwise(points)):
        raise ConfigurationError("points must come by increasing bytes, each size once")


def _choices(points: tuple[Point, ...]) -> Iterator[list[tuple[LineSegment, ...]]]:
    """Yield all ways to cut the points into one segment, into two, into three, as far as there are points for it."""
    lines = {
        (first, last): _line(points[first:last])
        for first, last in combinations(range(len(points) + 1), 2)
        if last - first >= _FEWEST_POINTS or last - first == len(points)
    }
    for count in range(1, _MOST_SEGMENTS + 1):
        bounds = ((0, *inner, len(points)) for inner in combinations(range(1, len(points)), count - 1))
        cuts = (list(pairwise(each)) for each in bounds)
        choices = [_joined(points, cut, [lines[each] for each in cut]) for cut in cuts if lines.keys() >= set(cut)]
        if choices:
            yield choices


def _joined(points: tuple[Point, ...], cut: list[tuple[int, int]], lines: list[LineSegment]) -> tuple[LineSegment, ...]:
    """Let each line begin where it meets the one before, if that is between the points of the two."""
    found = [lines[0]]
    for (first, _), line in zip(cut[1:], lines[1:], strict=True):
        before, (left, _), (right, _) = found[-1], points[first - 1], points[first]
        steeper = before.beta_us_per_byte - line.beta_us_per_byte
        if line.time_us(right) >= before.time_us(right):
            start = right
        elif steeper > 0 and line.time_us(left) >= before.time_us(left):  # parallel lines cross by rounding alone
            start = (line.alpha_us - before.alpha_us) / steeper
        else:  # the curve must not fall: it is level until the line has come up
            start = left
        found.append(replace(line, from_nbytes=min(max(start, left), right)))
    return tuple(found)


def _line(points: tuple[Point, ...]) -> LineSegment:
    """Return the line of alpha, beta >= 0 that minimizes the sum of squares of (alpha + beta n) / t - 1."""
    sizes, times = np.array(points).T
    rows = np.stack([np.ones(len(sizes)), sizes / sizes[-1]], axis=1) / times[:, None]

    def fitted(columns: list[int]) -> tuple[float, float, float]:
        """Return the remaining error, and the line, if only these columns may count."""
        line = np.zeros(2)
        line[columns] = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        return float(((rows @ line - 1) ** 2).sum()), float(line[0]), float(line[1] / sizes[-1])

    _, *free = fitted([0, 1])
    if min(free) < 0:
        _, *free = min(fitted([0]), fitted([1]))
    return LineSegment(0.0, *free)
