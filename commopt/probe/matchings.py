# SPDX-License-Identifier: Apache-2.0
"""Which nodes are measured with each other, and when: matchings, whose pairs are disjoint and send at once.

Orders come from hashes, not from Python's random numbers, so that ranks with different Pythons agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256

Pair = tuple[int, int]
"""Two nodes, the smaller first."""
Matching = tuple[Pair, ...]
"""Disjoint pairs."""
Group = tuple[int, ...]


def pair(one: int, other: int) -> Pair:
    """Return two nodes as a pair."""
    return (one, other) if one < other else (other, one)


def tournament(nodes: int, turn: int) -> Iterator[Matching]:
    """Iterate over matchings in which every node meets every other one once (the circle method).

    nodes - 1 of them for an even number of nodes, else `nodes`, in each of which one node rests. Another `turn` has
    other pairs beside each other.
    """
    seats: list[int | None] = [*shuffled(range(nodes), f"tournament {turn}")]
    if nodes % 2:
        seats.append(None)
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield tuple(pair(a, b) for a, b in opposite if a is not None and b is not None)
        seats.insert(1, seats.pop())


def inside(groups: Iterable[Group], turn: int) -> Matching:
    """Return pairs inside each group: as many as there can be."""
    pairs: list[Pair] = []
    for group in groups:
        mixed = shuffled(group, f"inside {turn}")
        pairs += [pair(a, b) for a, b in zip(mixed[::2], mixed[1::2], strict=False)]
    return tuple(pairs)


def across(groups: Iterable[Group], turn: int) -> Matching:
    """Return pairs of nodes of different groups: as many as there can be."""
    waiting = [shuffled(group, f"across {turn}") for group in groups]
    order = shuffled(range(len(waiting)), f"across {turn}")
    pairs: list[Pair] = []
    while True:
        # The two longest: a long group that waits until the end would find nobody.
        longest = sorted((place for place in order if waiting[place]), key=lambda place: -len(waiting[place]))[:2]
        if len(longest) < 2:
            return tuple(pairs)
        pairs.append(pair(*(waiting[place].pop() for place in longest)))


def alone(groups: Iterable[Group], turn: int) -> Matching:
    """Return pairs of nodes of different groups, one of each group at most."""
    return across([tuple(shuffled(group, f"alone {turn}")[:1]) for group in groups], turn)


def shuffled(places: Sequence[int], purpose: str) -> list[int]:
    """Return the places in an order that depends on nothing but them and the purpose."""
    return sorted(places, key=lambda place: sha256(f"{purpose}/{place}".encode()).digest())
