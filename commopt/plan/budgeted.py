"""The best buckets and the best strategy for each of them, where all that strategies leave out has a limit.

A strategy s that loses something leaves the squared error E_s(u) in unit u, and a bucket sends all its units by one
strategy. The fewest bytes that this takes are L-GreCo's question (Markov et al., "L-GreCo: Layerwise-Adaptive Gradient
Compression for Efficient and Accurate Deep Learning", arXiv 2210.17357), answered there by a dynamic programme over
layers and discretised error. But a step is not as long as its bytes: messages hide behind backward, have a latency, and
go together. With r_j and f as in planner.py, f_s the time by strategy s, e whole steps of a grid of error, and
g_s(i, j) = ceil(error of the units i+1..j by s / grid),
    F(0, e) = 0,    F(j, e) = min over i < j and s of  max(F(i, e - g_s(i, j)), r_j) + f_s(i, j)
is the least finish of all partitions, and of all strategies for their buckets, whose rounded errors are e at most.
O(strategies * levels * n^2), in numpy.

What rounding costs: errors are rounded up once for each bucket, so that the limit holds, and a plan of b buckets that
stays below limit * (1 - b / levels) is never missed. So a limit larger by the factor levels / (levels - b) is never
later, while one that is larger by less may be, by what the other grid rounds. Errors count from the least that each
unit must suffer: exact strategies, and a limit that can just be met, are never rounded away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isnan

import numpy as np

from commopt.document import require_time, require_whole
from commopt.errors import ConfigurationError
from commopt.plan.cheapest import Cheapest
from commopt.plan.plan import Plan, Unit
from commopt.plan.planner import Programme
from commopt.plan.prices import Costs, Floats, Whole

MOST_GROUPS = 256


def best_plan_within(
    units: Sequence[Unit],
    costs: Costs,
    energies: Mapping[str, Sequence[float]],
    limit: float,
    max_bytes: int | None = None,
    levels: int = 200,
    spare: float = 0.01,
) -> Plan:
    """Return the plan that finishes first among those that leave out no more than `limit`.

    units, max_bytes: as for best_plan. energies: for every strategy that has a price, the squared error that each unit
        suffers by it: 0 for exact ones, inf where it may not be used. limit: of their sum; inf for none.
    spare: of the plans that finish later than the least by up to this share, the one with the least error, so that only
        what is exposed is compressed; and of the partitions that then send every unit in the same way, no later than
        that, the one with fewest buckets.
    Chunks are taken where they save 3 % of the time of the same strategy. Of more than 256 units the neighbours that
    are smallest together are first merged into that many groups, as far as max_bytes and dtypes allow. A group has one
    strategy; where buckets end is decided by units again.
    Raises ConfigurationError where even the least errors are above the limit.
    """
    _check(units, costs, energies, limit)
    require_whole(levels, 1, "levels")
    require_time(spare, "spare")
    if max_bytes is not None:
        require_whole(max_bytes, 1, "max_bytes")
    ways = [Cheapest({key: table for key, table in costs.prices.items() if key[0] == name}) for name in energies]
    begins = _groups(units, max_bytes)
    groups = [_joined(units[begin:end]) for begin, end in zip(begins, [*begins[1:], len(units)], strict=True)]
    by_unit = np.array([list(energies[name]) for name in energies], dtype=np.float64)
    programmes = [Programme(groups, costs, [way] * len(groups), max_bytes) for way in ways]
    by_group = np.add.reduceat(by_unit, begins, axis=1)
    chosen, deadline_us = _strategies(programmes, by_group, limit, levels, spare)
    of_unit = np.repeat(chosen, np.diff([*begins, len(units)]))
    return Programme(units, costs, [ways[choice] for choice in of_unit], max_bytes).plan(deadline_us)


def _strategies(
    programmes: Sequence[Programme], energies: Floats, limit: float, levels: int, spare: float
) -> tuple[Whole, float]:
    """Return the strategy of each group, and when the plan has to have finished.

    Where much less error than the limit will do, a grid up to what was found tells small errors apart.
    """
    search = _Search(programmes, _Errors.of(energies, limit, levels))
    deadline_us = search.least_us * (1 + spare)
    found, places = search.chosen(deadline_us), np.arange(energies.shape[1])
    assert found is not None  # the one that finishes first
    chosen, error, before = found, float(energies[found, places].sum()), np.inf
    while 0 < 2 * error <= before:  # it at least halves: a few times, in practice
        found = _Search(programmes, _Errors.of(energies, error, levels)).chosen(deadline_us)
        if found is None:
            break
        chosen, error, before = found, float(energies[found, places].sum()), error
    return chosen, deadline_us


@dataclass(frozen=True)
class _Errors:
    """Errors by strategy and group, beyond the least that each group must suffer, in steps of a grid.

    before: [strategies, groups + 1], the sum over all groups before, in steps but not rounded. top: the most steps that
    are allowed.
    """

    before: Floats
    top: int

    @classmethod
    def of(cls, energies: Floats, limit: float, levels: int) -> _Errors:
        """Make a grid of so many levels up to `limit`, or up to the largest errors there are if these are lower."""
        least = energies.min(axis=0)
        must = float(least.sum())
        if must > limit or must == np.inf:
            raise ConfigurationError(
                f"best_plan_within: even with the strategy of the least error for each, the {len(least)} units lose "
                f"{must:.6g}, and the limit is {limit:.6g}; raise the limit, or add a strategy that loses less"
            )
        excess = energies - least
        largest = float(np.where(np.isfinite(excess), excess, 0.0).max(axis=0).sum())
        binding = limit - must < largest
        budget = limit - must if binding else largest
        # Without a limit that binds, rounding up must not make one: it adds less than a step for each bucket.
        top = (levels if budget else 0) + (0 if binding else len(least))
        with np.errstate(over="ignore"):
            steps = excess * levels / budget if budget else np.where(excess > 0, np.inf, 0.0)
        steps = np.minimum(steps, top + 1)  # too much is too much
        return cls(np.concatenate([np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)], axis=1), top)

    def steps(self, first: int, j: int) -> Whole:
        """Return g(i, j) for every strategy and i = first..j-1: [strategies, j - first]; top + 1 if that or more."""
        steps = np.ceil(self.before[:, j, None] - self.before[:, first:j])
        return np.minimum(steps, self.top + 1).astype(np.int64)


@dataclass(frozen=True)
class _Candidates:
    """Last buckets for a prefix: from which group on, by which strategy, at what error, and how long they take."""

    begin: Whole
    strategy: Whole
    steps: Whole
    lane_us: Floats


@dataclass(frozen=True)
class _Search:
    """The dynamic programme. programmes: one for each strategy, all of the same groups."""

    programmes: Sequence[Programme]
    errors: _Errors

    @property
    def least_us(self) -> float:
        """When the plan that finishes first does."""
        return float(self._finish[-1, -1])

    def chosen(self, deadline_us: float) -> Whole | None:
        """Return the strategy of each group, in the plan with the least error that meets the deadline, if one does."""
        if self.least_us > deadline_us:
            return None
        finish = self._finish
        pad = self.errors.top + 1
        chosen = np.zeros(len(finish) - 1, dtype=np.int64)
        end, left = len(chosen), int(np.argmax(finish[-1, pad:] <= deadline_us))
        while end:
            last = self._candidates(end)
            finishes = np.maximum(finish[last.begin, pad + left - last.steps], self._ready[end - 1]) + last.lane_us
            best = int(np.argmin(finishes))
            begin = int(last.begin[best])
            chosen[begin:end] = last.strategy[best]
            end, left = begin, left - int(last.steps[best])
        return chosen

    @cached_property
    def _finish(self) -> Floats:
        """F(j, e) for e = 0..top, behind as many columns and one more of infinity: what too much error leads to."""
        pad, groups = self.errors.top + 1, len(self._ready)
        finish = np.full((groups + 1, 2 * pad), np.inf)
        finish[0, pad:] = 0.0
        shifted = np.lib.stride_tricks.sliding_window_view(finish, pad, axis=1)
        for j in range(1, groups + 1):
            last = self._candidates(j)
            finishes = shifted[last.begin, pad - last.steps]
            np.maximum(finishes, self._ready[j - 1], out=finishes)
            finishes += last.lane_us[:, None]
            finish[j, pad:] = finishes.min(axis=0)
        return finish

    @cached_property
    def _ready(self) -> Floats:
        return self.programmes[0].ready

    def _candidates(self, j: int) -> _Candidates:
        """Return the buckets that end with group j and leave out no more than is allowed in all."""
        first = self.programmes[0].first[j]
        steps = self.errors.steps(first, j)
        lane_us = np.array([programme.lane_us(j) for programme in self.programmes])
        strategy, place = np.nonzero(steps <= self.errors.top)
        return _Candidates(first + place, strategy, steps[strategy, place], lane_us[strategy, place])


def _groups(units: Sequence[Unit], max_bytes: int | None) -> list[int]:
    """Return where groups of units begin: the two neighbours that are smallest together are merged, again and again."""
    begins = np.arange(len(units))
    nbytes = np.array([unit.nbytes for unit in units], dtype=np.float64)
    dtypes = np.unique([unit.dtype for unit in units], return_inverse=True)[1]
    while len(begins) > MOST_GROUPS:
        together = nbytes[:-1] + nbytes[1:]
        together[dtypes[:-1] != dtypes[1:]] = np.inf
        if max_bytes is not None:
            together[together > max_bytes] = np.inf
        place = int(np.argmin(together))
        if together[place] == np.inf:
            break
        nbytes[place] = together[place]
        begins, nbytes = np.delete(begins, place + 1), np.delete(nbytes, place + 1)
        dtypes = np.delete(dtypes, place + 1)
    return [int(begin) for begin in begins]


def _joined(members: Sequence[Unit]) -> Unit:
    names = tuple(name for unit in members for name in unit.names)
    ready_us = max(unit.ready_us for unit in members)
    return Unit(names, sum(unit.nbytes for unit in members), ready_us, members[0].dtype)


def _check(units: Sequence[Unit], costs: Costs, energies: Mapping[str, Sequence[float]], limit: float) -> None:
    """Raise ConfigurationError unless every strategy has prices, and an error for each unit."""
    if not units:
        raise ConfigurationError("best_plan_within: no units; give at least one")
    if not limit >= 0:  # nor is NaN
        raise ConfigurationError(f"best_plan_within: limit is {limit!r}; it must be a number >= 0, inf for no limit")
    priced = {strategy for strategy, _ in costs.prices}
    if priced != set(energies):
        raise ConfigurationError(
            f"best_plan_within: prices for {sorted(priced)}, errors for {sorted(energies)}; give both for each strategy"
        )
    for name, by_unit in energies.items():
        if len(by_unit) != len(units):
            raise ConfigurationError(
                f"best_plan_within: {len(by_unit)} errors of {name!r} for {len(units)} units; give one for each unit"
            )
        for unit, energy in zip(units, by_unit, strict=True):
            if isnan(energy) or energy < 0:
                raise ConfigurationError(
                    f"best_plan_within: the error of {unit.names[0]!r} by {name!r} is {energy!r}; it must be a number "
                    f">= 0, inf where the strategy may not be used"
                )
    for place, unit in enumerate(units):
        if all(by_unit[place] == float("inf") for by_unit in energies.values()):
            raise ConfigurationError(
                f"best_plan_within: no strategy may be used for {unit.names[0]!r}; give one an error that is finite"
            )
