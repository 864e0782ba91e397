"""Stretches of time: unions, parts and lengths of (begin, end) pairs."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches without overlap, in order; empty ones are dropped."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return how long they are together, overlap counted once."""
    return sum(end - begin for begin, end in union(intervals))


def before(intervals: Iterable[Interval], time: float) -> list[Interval]:
    """Return the parts that lie before `time`."""
    return [(begin, min(end, time)) for begin, end in intervals if begin < time]


def after(intervals: Iterable[Interval], time: float) -> list[Interval]:
    """Return the parts that lie after `time`."""
    return [(max(begin, time), end) for begin, end in intervals if end > time]
