# SPDX-License-Identifier: Apache-2.0
"""The best groups for one FIFO lane, by an exact dynamic programme.

Units 1..n in the order of backward, unit j ready at r_j (made non-decreasing by a running maximum: a message waits for
all its units), C_j the bytes of the first j. A message of the units i+1..j keeps the lane busy for
    f(i, j) = cost(C_j - C_i),
and the first j units are reduced, at best, at
    F(0) = 0,    F(j) = min over i < j of  max(F(i), r_j) + f(i, j),
over those i that leave a message of one dtype and at most max_bytes. F(n) is the least finish time of all 2^(n-1)
partitions: an earlier prefix never makes the rest later. Nothing is assumed of the prices, not
even that they grow with size. O(n^2).

Where finishes up to a share later will do, F(j, m) is the same over partitions into at most m groups,
    F(0, m) = 0,    F(j, m) = min over i < j of  max(F(i, m-1), r_j) + f(i, j),
and the least k with F(n, k) in time is the number of groups: O(k n^2).

MG-WFBP (Shi, Chu, Li: "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms", INFOCOM 2019,
arXiv 1811.11141) decides the same question greedily, pair by pair, for one price alpha + beta * bytes: it merges a
gradient into the next if that is ready less than alpha after the first could start. It ignores the effect of a merge on
later messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from commopt.cost.price_table import Floats
from commopt.document import require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.schedule.costs import Costs
from commopt.schedule.plan import Plan, Unit
from commopt.schedule.simulation import simulate

SPARE = 0.01
"""How much longer a step may take, by prediction, to save messages: each slows backward a little, beyond its price."""
_ROUNDING = 1e-12
_FEW_GROUPS = 16


def best_plan(units: Sequence[Unit], costs: Costs, max_bytes: int | None = None, spare: float = 0.0) -> Plan:
    """Return the plan that finishes first, all by one strategy; of equal ones the strategy that comes first.

    units: in the order of backward; only neighbours are merged.
    max_bytes: of a group of several units.
    spare: a plan may finish later by up to this share of the least time, if it saves messages. Of the plans that are no
        later, those with fewest groups count, and of these the first to finish.
    """
    if not units:
        raise ConfigurationError("best_plan: no units; give at least one")
    if max_bytes is not None:
        require_whole(max_bytes, 1, "max_bytes")
    require_time(spare, "spare")
    groups_by = {strategy: _Groups(units, costs, strategy, max_bytes) for strategy in costs.prices}
    least_us = {strategy: float(groups.finish(None)[0, -1]) for strategy, groups in groups_by.items()}
    strategy = min(least_us, key=lambda strategy: least_us[strategy])
    ends = groups_by[strategy].ends(least_us[strategy] * (1 + spare) * (1 + _ROUNDING))
    groups = tuple(tuple(name for unit in units[i:j] for name in unit.names) for i, j in pairwise((0, *ends)))
    return Plan(groups, strategy, "measured", simulate(units, groups, strategy, costs))


class _Groups:
    """The groups that neighbours may form, and their costs, by one strategy."""

    def __init__(self, units: Sequence[Unit], costs: Costs, strategy: str, max_bytes: int | None) -> None:
        self._ready = np.maximum.accumulate([unit.ready_us for unit in units])
        self._bytes_before = np.cumsum([0, *(unit.nbytes for unit in units)], dtype=np.int64)
        self._table = costs.table(strategy)
        self._first = [0]  # for every j (no group ends at 0) the least i of a group i+1..j
        run = 0
        for j, unit in enumerate(units, 1):
            if unit.dtype != units[run].dtype:
                run = j - 1
            nbytes = self._bytes_before[j] - (self._bytes_before[j] if max_bytes is None else max_bytes)
            fits = int(np.searchsorted(self._bytes_before, nbytes))
            self._first.append(max(run, min(fits, j - 1)))

    def _ends_at(self, finish: Floats, j: int) -> Floats:
        """Return when a group i+1..j is reduced, for i = first[j]..j-1, after prefixes that are at `finish`."""
        span = slice(self._first[j], j)
        lane_us = self._table.times_us(self._bytes_before[j] - self._bytes_before[span])
        return np.asarray(np.maximum(finish[..., span], self._ready[j - 1]) + lane_us)

    def finish(self, most: int | None) -> Floats:
        """Return F(j, m) for m = 0..most as rows; without a limit F(j) as the only one."""
        finish = np.full((1 if most is None else most + 1, len(self._first)), np.inf)
        finish[:, 0] = 0.0
        for j in range(1, len(self._first)):
            if most is None:
                finish[0, j] = self._ends_at(finish[0], j).min()
            else:
                finish[1:, j] = self._ends_at(finish[:-1], j).min(axis=1)
        return finish

    def ends(self, deadline_us: float) -> list[int]:
        """Return where the groups of the best partition end, of the fewest that are reduced by then."""
        n = len(self._first) - 1
        most = min(_FEW_GROUPS, n)
        while most < n and self.finish(most)[-1, -1] > deadline_us:
            most = min(4 * most, n)
        finish = self.finish(most)
        groups = int(np.argmax(finish[:, -1] <= deadline_us))
        ends, j = [], n
        while j:
            ends.append(j)
            groups -= 1
            j = self._first[j] + int(np.argmin(self._ends_at(finish[groups], j)))
        return ends[::-1]
