# SPDX-License-Identifier: Apache-2.0
"""A network that is not there: a tree of rates, in which transfers share links fairly; for tests of the probe."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from commopt.probe.matchings import Matching, Pair
from commopt.probe.nearness import PairRate


@dataclass(frozen=True)
class Part:
    """Nodes behind one link to the others, in Gb/s in each direction: parts of parts, or one node.

    us: the latency of its link.
    """

    gbps: float
    parts: tuple[Part, ...] = ()
    us: float = 20.0

    @property
    def count(self) -> int:
        return sum(part.count for part in self.parts) or 1


Path = tuple[int, ...]


@dataclass
class ModelNetwork:
    """Measures as the probe does, with noise, and counts. `order` is the node at each place of the tree.

    noise: the relative spread of a rate. disturbed: the share of transfers that something else makes much slower.
    most: matchings after which time is over.
    """

    root: Part
    order: Sequence[int]
    noise: float = 0.05
    disturbed: float = 0.01
    seed: int = 0
    most: int | None = None
    matchings: list[Matching] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.paths: dict[int, Path] = {}
        self._links: dict[Path, Part] = {}
        self._place(self.root, ())

    def _place(self, part: Part, path: Path) -> None:
        self._links[path] = part
        if not part.parts:
            self.paths[self.order[len(self.paths)]] = path
        for number, inner in enumerate(part.parts):
            self._place(inner, (*path, number))

    def measure(self, matchings: Sequence[Matching]) -> list[dict[Pair, PairRate]]:
        found = []
        for matching in matchings:
            if self.most is not None and len(self.matchings) >= self.most:
                break
            nodes = [node for pair in matching for node in pair]
            assert len(nodes) == len(set(nodes)), "pairs of a matching are disjoint"
            assert all(a < b for a, b in matching)
            self.matchings.append(matching)
            found.append(self._at_once(matching))
        return found

    def _at_once(self, matching: Matching) -> dict[Pair, PairRate]:
        rates = self.shares(matching)
        return {pair: PairRate(gbps * self._noise(), self._us(pair)) for pair, gbps in rates.items()}

    def _noise(self) -> float:
        if self._random.random() < self.disturbed:
            return self._random.uniform(0.2, 0.6)
        return max(0.3, self._random.gauss(1.0, self.noise))

    def _way(self, pair: Pair) -> list[Path]:
        one, other = (self.paths[node] for node in pair)
        joint = next((depth for depth, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        return [path[:depth] for path in (one, other) for depth in range(joint + 1, len(path) + 1)]

    def _us(self, pair: Pair) -> float:
        return sum(self._links[link].us for link in self._way(pair)) * self._random.uniform(1.0, 1.5)

    def shares(self, matching: Matching) -> dict[Pair, float]:
        """Return the rates of pairs that exchange at once, in each direction: max-min fair."""
        ways = {pair: self._way(pair) for pair in matching}
        left = {path: part.gbps for path, part in self._links.items()}
        rates: dict[Pair, float] = {}
        while ways:
            users = {link: [pair for pair, way in ways.items() if link in way] for link in left}
            tight = min((link for link in left if users[link]), key=lambda link: left[link] / len(users[link]))
            share = left[tight] / len(users[tight])
            for pair in users[tight]:
                rates[pair] = share
                for link in ways.pop(pair):
                    left[link] -= share
        return rates
