# SPDX-License-Identifier: Apache-2.0
"""Time calls on every rank at once, where the slowest rank counts: the loop, and sweeps within a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from statistics import median
from time import perf_counter

import torch

from commopt import lanes
from commopt.groups import Membership, Team
from commopt.recording import Clock, Mark, clock_for

Call = Callable[[], object]
Prepare = Callable[[], Call]

_LEAST_WARM_UP, _LEAST_ITERATIONS, _LEAST_POINTS = 1, 3, 4
_GROWTH_SHARE = 0.85  # of the time; the rest is for sizes that have to be measured again
_RETRIES = 3
_DISTURBED = 1.1
_FAR_OFF = 1.5
_SETTLED_US = 30e3
_LEAST_US = 0.1  # finer than any clock here: a time of nothing has no logarithm


@dataclass(frozen=True)
class Repeats:
    """Calls before time is taken, and calls that are timed."""

    warm_up: int
    iterations: int


@dataclass(frozen=True)
class Measured:
    """One size: the median time of a call, and the time of the whole measurement."""

    time_us: float
    spent_us: float


Measure = Callable[[int, Repeats], Measured]
"""Bytes of a message, and how often."""

# ------------------------------------------------------------------------------------------------- sweeps

_LEAST = Repeats(_LEAST_WARM_UP, _LEAST_ITERATIONS)


@dataclass(frozen=True)
class Sweep:
    """The points of one curve, (bytes, microseconds); `skipped` are the sizes that the time did not suffice for."""

    points: tuple[tuple[int, float], ...]
    skipped: tuple[int, ...]
    spent_us: float


def repeats(predicted_us: float, left_us: float, wanted: Repeats) -> Repeats | None:
    """Return how often to repeat a call that should take `predicted_us`, None when there is no time for it.

    Short calls are repeated up to ten times as often as wanted, since disturbances last longer than they do. A
    size may take a quarter of the time left, so that larger ones have a chance, which need few repeats; the last one
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
    return _LEAST if predicted_us * (_LEAST_WARM_UP + _LEAST_ITERATIONS) <= left_us else None


def sweep(sizes: Sequence[int], share_us: float, wanted: Repeats, measure: Measure) -> Sweep:
    """Measure `sizes` in order until `share_us` is used up.

    The first size is tried before it is measured, which also makes connections. A call is predicted to take as much
    longer than the one before as it is larger, which no latency exceeds. The first four sizes are measured in any case:
    less makes no curve. What was disturbed is measured again, and the least median counts: a message that took far
    longer than predicted, once and at once; one that took longer than a larger one, up to three times in the end.
    Deterministic: ranks that measure equal times decide alike.
    """
    often: dict[int, Repeats] = {}
    found: dict[int, Measured] = {}
    spent_us = 0.0

    def take(nbytes: int) -> Measured:
        nonlocal spent_us
        measured = measure(nbytes, often.get(nbytes, _LEAST))
        spent_us += measured.spent_us
        return measured

    def retake(nbytes: int) -> None:
        if spent_us + found[nbytes].spent_us <= share_us:
            found[nbytes] = min(found[nbytes], take(nbytes), key=lambda each: each.time_us)

    before_nbytes, before_us = sizes[0], take(sizes[0]).time_us
    for nbytes in sizes:
        predicted_us = before_us * nbytes / before_nbytes
        affordable = repeats(predicted_us, _GROWTH_SHARE * share_us - spent_us, wanted)
        if affordable is None and len(found) >= _LEAST_POINTS:
            break
        often[nbytes] = affordable or _LEAST
        found[nbytes] = take(nbytes)
        if found[nbytes].time_us > _FAR_OFF * predicted_us:
            retake(nbytes)
        before_nbytes, before_us = nbytes, found[nbytes].time_us
    for _ in range(_RETRIES):
        for nbytes in disturbed({nbytes: measured.time_us for nbytes, measured in found.items()}):
            retake(nbytes)
    points = tuple((nbytes, measured.time_us) for nbytes, measured in found.items())
    return Sweep(points, tuple(sizes[len(points) :]), spent_us)


def disturbed(times_us: Mapping[int, float]) -> list[int]:
    """Return the sizes, of increasing ones, that took clearly longer than some larger size."""
    found: list[int] = []
    least_us = inf
    for nbytes, time_us in reversed(list(times_us.items())):
        if time_us > _DISTURBED * least_us:
            found.append(nbytes)
        least_us = min(least_us, time_us)
    return found[::-1]


# --------------------------------------------------------------------------------------------------- loop


def _nothing() -> None:
    pass


def loop(
    call: Call, repeats: Repeats, clock: Clock, barrier: Call = _nothing, before_each: Call | None = None
) -> list[Mark]:
    """Make the calls; return the marks of when the timed ones began, after `barrier`, and of when each ended.

    before_each: precedes every timed call, and then its own beginning is marked too.
    """
    for _ in range(repeats.warm_up):
        call()
    barrier()
    marks = [clock.mark()]
    for _ in range(repeats.iterations):
        if before_each is not None:
            before_each()
            marks.append(clock.mark())
        call()
        marks.append(clock.mark())
    return marks


def since_begin_us(clock: Clock, marks: Sequence[Mark]) -> list[float]:
    """Return the times of all marks but the first, counted from it; waits for the device."""
    ((begin_us, *times_us),) = clock.times_us([marks])
    return [time_us - begin_us for time_us in times_us]


def durations_us(ends_us: Sequence[float]) -> list[float]:
    """Return how long each call took that began when the one before had ended; they add up to the loop."""
    return [end - begin for begin, end in pairwise([0.0, *ends_us])]


# -------------------------------------------------------------------------------------------------- timer


class LaneTimer:
    """Times calls of all ranks of a membership on their lanes; every method is collective over them."""

    def __init__(self, membership: Membership) -> None:
        team = membership.team
        self.device = team.default_device
        self._client = lanes.LaneClient(membership, f"probe {next(membership.owners)}")
        self._compared = perf_counter()

    def time(self, prepare: Prepare, repeats: Repeats) -> Measured:
        """Return the median time of the call that `prepare` returns, made by every rank by itself: the slowest rank's.

        All ranks run at the same time, but their calls are independent.
        """

        def ready() -> Call:
            call = prepare()
            self._barrier(self._client.team)
            return call

        ends_us = self._loop_us("work by itself", ready, repeats)
        slowest_us, spent_us = self._slowest([_median_us(durations_us(ends_us))])
        return Measured(slowest_us[0], spent_us)

    def time_collective(
        self,
        prepare: Callable[[Team], Call],
        team: Team | None,
        what: str,
        repeats: Repeats,
        *,
        closed: bool,
        alone: bool,
    ) -> Measured:
        """Return the median time from the start of a collective until the last rank of the last team has ended it.

        team: None on a rank that only waits. Calls of one team (`alone`) that no rank can leave before all have entered
        (`closed`) follow each other, and each lasts from when the last rank has ended the one before: no barrier blurs
        them. Others begin at a barrier, over all ranks where several teams are to run at once, and the longest
        duration on any rank counts.
        """
        everyone = self._client.team
        together = team if alone else everyone
        meet = _nothing if together is None else partial(self._barrier, together)
        ready = partial(prepare, team) if team is not None else lambda: _nothing
        chained = closed and alone
        times_us = self._loop_us(what, ready, repeats, partial(self._barrier, everyone), None if chained else meet)
        times_us = [0.0 if team is None else time_us for time_us in times_us]
        if chained:
            ends_us, spent_us = self._slowest(times_us)
            return Measured(_median_us(durations_us(ends_us)), spent_us)
        own_us = [end - begin for begin, end in zip(times_us[::2], times_us[1::2], strict=True)]
        slowest_us, spent_us = self._slowest(own_us)
        return Measured(_median_us(slowest_us), spent_us)

    def _loop_us(
        self, what: str, prepare: Prepare, repeats: Repeats, barrier: Call = _nothing, before_each: Call | None = None
    ) -> list[float]:
        """Return the times of a loop on the lane, since it began."""
        clock = clock_for(self.device)
        marks: list[Mark] = []

        def work() -> None:  # prepares too: a rank without memory for it fails like any operation on the lane
            marks.extend(loop(prepare(), repeats, clock, barrier, before_each))

        self._run(what, work)
        return since_begin_us(clock, marks)

    def _slowest(self, own_us: Sequence[float]) -> tuple[list[float], float]:
        """Return the largest of all ranks' times, place by place, and of the time since the last comparison.

        The same bits on every rank.
        """
        team = self._client.team
        now = perf_counter()
        mine = torch.tensor([*own_us, (now - self._compared) * 1e6], dtype=torch.float64, device=self.device)
        self._compared = now
        everyone = mine.new_empty(team.size * mine.numel())
        self._run("comparison of times", lambda: team.all_gather(everyone, mine))
        *slowest_us, spent_us = everyone.view(team.size, -1).amax(0).tolist()
        return slowest_us, spent_us

    def _run(self, what: str, work: Callable[[], None]) -> None:
        self._client.run(work, what, self.device).wait()

    def _barrier(self, team: Team) -> None:
        team.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device))


def _median_us(times_us: Sequence[float]) -> float:
    return max(median(times_us), _LEAST_US)
