"""The best groups for one FIFO lane, by an exact dynamic programme.

Units 1..n in the order of backward, unit j ready at r_j (made non-decreasing by a running maximum: a message waits for
all its units), C_j the bytes of the first j. A message of the units i+1..j keeps the lane busy for
    f(i, j) = overhead + price(C_j - C_i),
and the first j units are reduced, at best, at
    F(0) = 0,    F(j) = min over i < j of  max(F(i), r_j) + f(i, j),
over those i that leave a message of one dtype and at most max_bytes. F(n) is the least finish time of all 2^(n-1)
partitions: what follows a prefix is never later because the prefix is earlier. Nothing is assumed of the prices, not
even that they grow with size. O(n^2) in time; in memory O(n) for each group of the result.

Where finishes up to a share later will do, the least number of groups that meets that is found first, k; then
    F(0, m) = 0,    F(j, m) = min over i < j of  max(F(i, m-1), r_j) + f(i, j)    for m = 1..k,
and F(n, k) is the least finish time of all partitions into at most that many: O(k n^2) more.

MG-WFBP (Shi, Chu, Li: "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019,
arXiv 1811.11141) decides the same question greedily, pair by pair, for one price alpha + beta * bytes: it merges a
gradient into the next if that is ready less than alpha after the first could start. It never looks at what a merge does
to later messages; tests/test_plan_planner.py has it for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from commopt.document import require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.schedule.plan import Plan, Unit, simulate
from commopt.schedule.prices import Costs, Floats, Whole

SPARE = 0.01
"""Each message also costs backward a little, which no price has in it: a step may take so much longer by prediction."""
_ROUNDING = 1e-11


def best_plan(units: Sequence[Unit], costs: Costs, max_bytes: int | None = None, spare: float = 0.0) -> Plan:
    """Return the plan that finishes first, all by one strategy; of equal ones the strategy that comes first.

    units: in the order of backward; only neighbours are merged. A unit above max_bytes is a group of its own.
    spare: a finish later by up to this share of the least will do, if it saves messages: of the plans that are no
        later, those with fewest groups; of those the first to finish, then the one with the earliest boundaries.
    """
    if not units:
        raise ConfigurationError("best_plan: no units; give at least one")
    if max_bytes is not None:
        require_whole(max_bytes, 1, "max_bytes")
    require_time(spare, "spare")
    programmes = [_Programme(units, costs, strategy, max_bytes) for strategy in costs.prices]
    best = min(programmes, key=lambda programme: float(programme.finish[-1]))
    return best.plan(best.finish[-1] * (1 + spare))


@dataclass(frozen=True)
class _Programme:
    """Which neighbours may share a message, what that costs, and which of them do best."""

    units: Sequence[Unit]
    costs: Costs
    strategy: str
    max_bytes: int | None

    def plan(self, deadline_us: float) -> Plan:
        """Return the plan of fewest groups that finishes by then or, if that cannot be, as early as it can."""
        ends = self._best_ends(deadline_us)
        groups = tuple(
            tuple(name for unit in self.units[begin:end] for name in unit.names)
            for begin, end in zip((0, *ends), ends, strict=False)
        )
        predicted = simulate(self.units, groups, self.strategy, self.costs)
        return Plan(groups, self.strategy, "measured", predicted)

    @cached_property
    def ready(self) -> Floats:
        """When each unit and all before it are ready."""
        return np.maximum.accumulate(np.array([unit.ready_us for unit in self.units], dtype=np.float64))

    @cached_property
    def bytes_before(self) -> Whole:
        return np.cumsum([0, *(unit.nbytes for unit in self.units)], dtype=np.int64)

    @cached_property
    def first(self) -> list[int]:
        """For every j (no group ends at 0) the least i of a group i+1..j."""
        first, run = [0], 0
        for j in range(1, len(self.units) + 1):
            if self.units[j - 1].dtype != self.units[run].dtype:
                run = j - 1
            least = run
            if self.max_bytes is not None:
                fits = int(np.searchsorted(self.bytes_before, self.bytes_before[j] - self.max_bytes))
                least = max(run, min(fits, j - 1))
            first.append(least)
        return first

    def lane_us(self, j: int) -> Floats:
        """Return f(i, j) for i = first[j]..j-1."""
        nbytes = self.bytes_before[j] - self.bytes_before[self.first[j] : j]
        return self.costs.table(self.strategy).times_us(nbytes) + self.costs.overhead_us

    @cached_property
    def finish(self) -> Floats:
        """F(0)..F(n)."""
        finish = np.zeros(len(self.units) + 1)
        for j in range(1, len(finish)):
            finish[j] = np.min(np.maximum(finish[self.first[j] : j], self.ready[j - 1]) + self.lane_us(j))
        return finish

    def _best_ends(self, deadline_us: float) -> tuple[int, ...]:
        """Return where the groups of the best partition end."""
        least_us = float(self.finish[-1])
        layers = self._latest(self.finish, max(deadline_us, least_us))
        if deadline_us > least_us:
            layers = self._latest(self.finish, self._finish_of_few(len(layers) - 1))
        return self._earliest(layers)

    def _finish_of_few(self, most: int) -> float:
        """Return F(n, most), the least finish time with at most so many groups."""
        finish = np.full((most + 1, len(self.units) + 1), np.inf)
        finish[:, 0] = 0.0
        for j in range(1, len(self.units) + 1):
            begin = np.maximum(finish[:-1, self.first[j] : j], self.ready[j - 1])
            finish[1:, j] = np.min(begin + self.lane_us(j), axis=1)
        return float(finish[-1, -1])

    def _latest(self, finish: Floats, deadline_us: float) -> list[Floats]:
        """Return for k = 0, 1, .. when at the latest each prefix must be reduced if k groups are to follow in time.

        The last entry is the first that leaves time for the empty prefix: that many groups are needed. What no prefix
        can meet is -inf. Only prefixes to which the last group added something can add to the next.
        """
        n = len(self.units)
        slack = _ROUNDING * finish[n]
        noticed = slack / (4 * n)  # n gains that are overlooked stay below the slack
        latest = np.full(n + 1, -np.inf)
        latest[n] = deadline_us + slack
        layers, changed = [latest], [n]
        while layers[-1][0] < -slack:
            before, after = layers[-1], layers[-1].copy()
            for j in changed:
                span = slice(self.first[j], j)
                begin = before[j] - self.lane_us(j)
                possible = (begin >= finish[span] - slack) & (begin >= self.ready[j - 1] - slack)
                np.maximum(after[span], begin, out=after[span], where=possible & (begin > before[span] + noticed))
            changed = np.flatnonzero(after > before).tolist()
            layers.append(after)
        return layers

    def _earliest(self, layers: list[Floats]) -> tuple[int, ...]:
        """Follow the layers from the front, each time with the shortest group that still leaves enough time."""
        ends, time_us = [0], 0.0
        first = np.array(self.first)
        for latest in reversed(layers[:-1]):
            begin = ends[-1]
            reachable = begin + 1 + np.flatnonzero((first[begin + 1 :] <= begin) & (latest[begin + 1 :] > -np.inf))
            nbytes = self.bytes_before[reachable] - self.bytes_before[begin]
            lane = self.costs.table(self.strategy).times_us(nbytes) + self.costs.overhead_us
            finishes = np.maximum(time_us, self.ready[reachable - 1]) + lane
            late = finishes - latest[reachable]
            choice = int(np.argmax(late <= max(float(late.min()), 0.0)))  # the first; rounding may leave none in time
            ends.append(int(reachable[choice]))
            time_us = float(finishes[choice])
        return tuple(ends[1:])
