"""Time calls on every rank at once; what counts is the slowest rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, pairwise
from statistics import median
from time import perf_counter

import torch

from commopt import lanes
from commopt.groups import Membership, Team
from commopt.probe.budget import Measured, Repeats
from commopt.recording import Mark, clock_for

Call = Callable[[], None]
Prepare = Callable[[], Call]
_LEAST_US = 0.1  # finer than any clock here: a time of nothing has no logarithm


class AloneTimer:
    """Times work of one process that no other takes part in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(self, prepare: Prepare, repeats: Repeats) -> Measured:
        """Return the median time of the call that `prepare` returns."""
        started = perf_counter()
        durations_us = _each_us(prepare(), repeats, self.device)
        return Measured(_typical(durations_us), (perf_counter() - started) * 1e6)


class LaneTimer:
    """Times what all ranks of a membership do on their lanes; every method is collective over them."""

    def __init__(self, membership: Membership) -> None:
        team = membership.team
        self.device = team.default_device
        if self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._membership = membership
        self._owner = f"probe {next(membership.owners)}"
        self._sequence = count()
        self._compared = perf_counter()

    def time(self, prepare: Prepare, repeats: Repeats) -> Measured:
        """Return the median time of the call that `prepare` returns, made by every rank by itself: the slowest rank's.

        All ranks are at it at the same time, but no call of one has to do with a call of another.
        """
        durations_us: list[float] = []

        def work() -> None:
            call = prepare()  # on the lane: that one rank has no memory for it is news to all
            self._barrier(self._membership.team)
            durations_us.extend(_each_us(call, repeats, self.device))

        self._run("work by itself", work)
        slowest_us, spent_us = self._slowest([_typical(durations_us)])
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
        them. Others begin at a barrier, over all ranks where several teams are to be at it at once, and the longest
        duration on any rank counts.
        """
        clock = clock_for(self.device)
        marks: list[Mark] = []
        everyone = self._membership.team
        together = not (closed and alone)
        meeting = team if alone else everyone

        def work() -> None:
            call = _nothing if team is None else prepare(team)
            for _ in range(repeats.warm_up):
                call()
            self._barrier(everyone)
            marks.append(clock.mark())
            for _ in range(repeats.iterations):
                if together:
                    if meeting is not None:
                        self._barrier(meeting)
                    marks.append(clock.mark())
                call()
                marks.append(clock.mark())

        self._run(what, work)
        (times_us,) = clock.times_us([marks])
        since_us = [0.0 if team is None else time_us - times_us[0] for time_us in times_us]
        own_us = _durations(since_us) if together else since_us[1:]
        slowest_us, spent_us = self._slowest(own_us)
        if not together:
            slowest_us = [end - begin for begin, end in pairwise([0.0, *slowest_us])]
        return Measured(_typical(slowest_us), spent_us)

    def _slowest(self, own_us: Sequence[float]) -> tuple[list[float], float]:
        """Return the largest of all ranks' times, place by place, and of the time since the last comparison.

        The same bits on every rank.
        """
        team = self._membership.team
        now = perf_counter()
        mine = torch.tensor([*own_us, (now - self._compared) * 1e6], dtype=torch.float64, device=self.device)
        self._compared = now
        everyone = mine.new_empty(team.size * mine.numel())
        self._run("comparison of times", lambda: team.all_gather(everyone, mine), everyone)
        *slowest_us, spent_us = everyone.view(team.size, -1).amax(0).tolist()
        return slowest_us, spent_us

    def _run(self, what: str, work: Call, result: torch.Tensor | None = None) -> None:
        result = torch.empty(1, dtype=torch.float32, device=self.device) if result is None else result
        number = next(self._sequence)
        kind = self.device.type
        operation = lanes.Operation(self._membership, self._owner, number, what, result.numel(), kind)
        lanes.lane_for(self.device).submit(operation, work, result).wait()

    def _barrier(self, team: Team) -> None:
        team.all_reduce(torch.zeros(1, dtype=torch.float32, device=self.device))


def _each_us(call: Call, repeats: Repeats, device: torch.device) -> list[float]:
    for _ in range(repeats.warm_up):
        call()
    clock = clock_for(device)
    marks = [clock.mark()]
    for _ in range(repeats.iterations):
        call()
        marks.append(clock.mark())
    (times_us,) = clock.times_us([marks])
    return [end - begin for begin, end in pairwise(times_us)]


def _typical(durations_us: Sequence[float]) -> float:
    return max(median(durations_us), _LEAST_US)


def _nothing() -> None:
    """Wait for the others."""


def _durations(marks_us: Sequence[float]) -> list[float]:
    """Return how long each iteration took, whose begin and end are marked after the first moment."""
    return [end - begin for begin, end in zip(marks_us[1::2], marks_us[2::2], strict=True)]
