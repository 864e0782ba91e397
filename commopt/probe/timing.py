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

Call = Callable[[], None]
_LEAST_US = 0.1  # finer than any clock here: a time of nothing has no logarithm


class Stopwatch:
    """Marks moments, on CUDA of the current stream; the host waits for them only when the times are read."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark this moment."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._moments.append(perf_counter())

    @property
    def marks(self) -> int:
        """How many moments were marked."""
        return len(self._events) + len(self._moments)

    def times_us(self) -> list[float]:
        """Return when each moment was, counted from the first."""
        if self._on_gpu:
            self._events[-1].synchronize()
            return [self._events[0].elapsed_time(event) * 1e3 for event in self._events]
        return [(moment - self._moments[0]) * 1e6 for moment in self._moments]


class AloneTimer:
    """Times work of one process that no other takes part in."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(self, call: Call, repeats: Repeats) -> Measured:
        """Return the median time of `call`."""
        started = perf_counter()
        durations_us = _each_us(call, repeats, self.device)
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

    def time(self, call: Call, repeats: Repeats) -> Measured:
        """Return the median time of `call`, which every rank makes by itself: that of the slowest rank.

        All ranks are at it at the same time, but no call of one has to do with a call of another.
        """
        durations_us: list[float] = []

        def work() -> None:
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
        watch = Stopwatch(self.device)
        everyone = self._membership.team
        together = not (closed and alone)
        meeting = team if alone else everyone

        def work() -> None:
            call = _nothing if team is None else prepare(team)
            for _ in range(repeats.warm_up):
                call()
            self._barrier(everyone)
            watch.mark()
            for _ in range(repeats.iterations):
                if together:
                    if meeting is not None:
                        self._barrier(meeting)
                    watch.mark()
                call()
                watch.mark()

        self._run(what, work)
        marks_us = [0.0] * watch.marks if team is None else watch.times_us()
        own_us = _durations(marks_us) if together else marks_us[1:]
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
        result = torch.empty(1, device=self.device) if result is None else result
        number = next(self._sequence)
        kind = self.device.type
        operation = lanes.Operation(self._membership, self._owner, number, what, result.numel(), kind)
        lanes.lane_for(self.device).submit(operation, work, result).wait()

    def _barrier(self, team: Team) -> None:
        team.all_reduce(torch.zeros(1, device=self.device))


def _each_us(call: Call, repeats: Repeats, device: torch.device) -> list[float]:
    for _ in range(repeats.warm_up):
        call()
    watch = Stopwatch(device)
    watch.mark()
    for _ in range(repeats.iterations):
        call()
        watch.mark()
    return [end - begin for begin, end in pairwise(watch.times_us())]


def _typical(durations_us: Sequence[float]) -> float:
    return max(median(durations_us), _LEAST_US)


def _nothing() -> None:
    """Wait for the others."""


def _durations(marks_us: Sequence[float]) -> list[float]:
    """Return how long each iteration took, whose begin and end are marked after the first moment."""
    return [end - begin for begin, end in zip(marks_us[1::2], marks_us[2::2], strict=True)]
