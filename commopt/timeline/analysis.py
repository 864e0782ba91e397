# SPDX-License-Identifier: Apache-2.0
"""Times of a step on each rank and in each message, and the ranks that delay the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from commopt.errors import ConfigurationError
from commopt.recording import StepRecord
from commopt.timeline.recordings import STAGES, Timeline, last_starts_us, stages_us, stays_inside


@dataclass(frozen=True)
class StepBreakdown:
    """One step of one rank, or the mean of several.

    Waiting is the time in which this rank had started a message and the last of its ranks had not.

    step_us: from the end of the step before to the end of this one.
    compute_us: up to the last gradient.
    hidden_us: work of the lane before the last gradient.
    hidden_waiting_us: waiting within hidden_us.
    exposed_us: from the last gradient to the end of the last message: the time that communication adds to the step.
    exposed_waiting_us: waiting within exposed_us.
    """

    step_us: float
    compute_us: float
    hidden_us: float
    hidden_waiting_us: float
    exposed_us: float
    exposed_waiting_us: float

    @property
    def communication_us(self) -> float:
        """Hidden and exposed communication."""
        return self.hidden_us + self.exposed_us

    @property
    def hidden_transfer_us(self) -> float:
        """The hidden part without waiting."""
        return self.hidden_us - self.hidden_waiting_us

    @property
    def exposed_transfer_us(self) -> float:
        """The exposed part without waiting."""
        return self.exposed_us - self.exposed_waiting_us


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank.

    late_us: delay behind the median of the other ranks at its worst bucket, as a median over steps; may be negative.
    """

    rank: int
    node: int
    times: StepBreakdown
    late_us: float


@dataclass(frozen=True)
class BucketTimes:
    """One DDP bucket.

    ready_us: from the start of the step until the bucket is ready on the last rank.
    """

    number: int
    label: str
    nbytes: int
    ready_us: float


@dataclass(frozen=True)
class MessageTimes:
    """One message of a step, as a mean over ranks.

    ready_us: from the start of the step until its last bucket is ready.
    queue_us: from there to its start, behind other messages.
    finished_us: from the start of the step to its end.
    stages_us: the time from its start to its end, by STAGES.
    """

    buckets: tuple[int, ...]
    label: str
    nbytes: int
    ready_us: float
    queue_us: float
    finished_us: float
    stages_us: dict[str, float]


@dataclass(frozen=True)
class Analysis:
    """Figures of a timeline, from the steps that `comparable` returns.

    mean: mean over ranks and typical steps.
    last_exposed_us: communication after the last gradient of all ranks, which no faster rank would shorten.
    stragglers: ranks that delay the others, latest first.
    """

    first_step: int
    last_step: int
    compared_steps: int
    recorded_steps: int
    mean: StepBreakdown
    last_exposed_us: float
    ranks: tuple[RankTimes, ...]
    buckets: tuple[BucketTimes, ...]
    messages: tuple[MessageTimes, ...]
    stragglers: tuple[Straggler, ...]


Array = npt.NDArray[np.float64]

# A rank is a straggler if its median delay over steps, at its worst bucket, exceeds each of these:
_OF_A_STEP = 0.05  # times the step
_STANDARD_ERRORS = 6.0  # times how well that median is known, from how lateness differs from step to step,
_OF_STEP_SPREAD = 1.0  # times how much steps differ in length,
_OF_CLOCKS = 2.0  # times the uncertainty of the clocks.
_FEWEST_STEPS = 5

_SIGMA_PER_MAD = 1.4826  # of normally distributed values
_MEDIAN_ERROR = 1.2533  # standard error of a median in those of a mean


@dataclass(frozen=True)
class Straggler:
    """A rank that delays the others.

    late_us: delay behind the median of the others.
    bucket: DDP's number of the bucket by which half of the delay has occurred. None: the first bucket, so the cause is
        data loading, the forward pass or the start of backward.
    """

    rank: int
    late_us: float
    bucket: int | None
    label: str

    def __str__(self) -> str:
        if self.bucket is None:
            place = "before backward: already its first bucket is late (data loading, forward, start of backward)"
        else:
            place = f"in backward, by half of that or more up to bucket {self.bucket} ({self.label})"
        return f"rank {self.rank} is {self.late_us / 1000:.2f} ms behind the others; it falls behind {place}"


def lateness_us(ready_us: Array) -> Array:
    """Return ready times `[step, rank, bucket]` minus the median of the other ranks' ready times."""
    ranks = ready_us.shape[1]
    if ranks == 1:
        return np.zeros_like(ready_us)
    order = np.sort(ready_us, axis=1)
    place = ready_us.argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    others = ranks - 1

    def other(number: int) -> Array:
        """Return the ready time at this place among the other ranks, in order."""
        low, high = order[:, number : number + 1], order[:, number + 1 : number + 2]
        return np.where(place > number, low, high)

    median_of_others = (other((others - 1) // 2) + other(others // 2)) / 2
    return ready_us - median_of_others


def find_stragglers(ready_us: Array, step_us: Array, uncertainty_us: Array) -> list[tuple[int, int, float]]:
    """Return (rank, bucket by which half of the delay has occurred, delay) of late ranks, latest first.

    Only medians and median deviations are compared, so single slow steps have no effect.

    ready_us: [step, rank, bucket], buckets in the order in which they become ready.
    step_us: length of each step.
    uncertainty_us: uncertainty of each rank's clock.
    """
    steps = len(ready_us)
    if steps < _FEWEST_STEPS:
        return []
    late = lateness_us(ready_us)
    typical: Array = np.median(late, axis=0)
    spread = _SIGMA_PER_MAD * np.median(np.abs(late - typical), axis=0)
    step_spread = _SIGMA_PER_MAD * float(np.median(np.abs(step_us - np.median(step_us))))
    floor = max(_OF_A_STEP * float(np.median(step_us)), _OF_STEP_SPREAD * step_spread)
    found = []
    for rank, profile in enumerate(typical):
        worst = int(profile.argmax())
        amount = float(profile[worst])
        noise = max(float(spread[rank, worst]), float(np.median(spread)))
        needed = max(
            floor,
            noise * _STANDARD_ERRORS * _MEDIAN_ERROR / steps**0.5,
            _OF_CLOCKS * float(uncertainty_us[rank] + np.median(uncertainty_us)),
        )
        if amount > needed:
            found.append((rank, int((profile >= amount / 2).argmax()), amount))
    return sorted(found, key=lambda entry: -entry[2])


Steps = Sequence[Sequence[StepRecord]]  # [step][rank]
_EXPOSED = [field.name for field in fields(StepBreakdown)].index("exposed_us")


def analyse(timeline: Timeline) -> Analysis:
    """Return the figures of a timeline. Raises ConfigurationError when no step is complete on all ranks."""
    chosen = comparable(timeline)
    steps = [timeline.steps[place] for place in chosen]
    last = steps[-1][0]
    begin = np.array([begins_us(timeline, place) for place in chosen])
    last_start = np.array([last_starts_us(step, timeline.nodes) for step in steps])
    times = _times(steps, begin, last_start)
    step_us = np.median(times[:, :, 0], axis=1)
    typical = _typical(step_us)
    ready = _table(steps, lambda record: [bucket.ready_us for bucket in record.buckets])
    since = ready - begin[:, :, None]
    # Nodes that do not wait for each other drift apart: there only the delay within each step counts.
    apart = np.array([stays_inside(step) for step in steps])
    compared = np.where(apart[:, None, None], since, ready)
    late_us = np.median(lateness_us(compared), axis=0).max(axis=1)
    ranks = times[typical].mean(axis=0)
    stragglers = [
        Straggler(
            timeline.ranks[place], amount, last.buckets[bucket].number if bucket else None, last.buckets[bucket].label
        )
        for place, bucket, amount in find_stragglers(compared, step_us, np.array(timeline.uncertainty_us))
    ]
    rank_times = [StepBreakdown(*own) for own in ranks.tolist()]
    bucket_us = since[typical].max(axis=1).mean(axis=0).tolist()
    return Analysis(
        steps[0][0].step,
        last.step,
        len(steps),
        len(timeline.steps),
        StepBreakdown(*ranks.mean(axis=0).tolist()),
        float(times[typical, :, _EXPOSED].min(axis=1).mean()),
        tuple(map(RankTimes, timeline.ranks, timeline.nodes, rank_times, late_us.tolist())),
        tuple(
            BucketTimes(bucket.number, bucket.label, bucket.nbytes, ready_us)
            for bucket, ready_us in zip(last.buckets, bucket_us, strict=True)
        ),
        _message_times([steps[step] for step in typical], begin[typical], last_start[typical]),
        tuple(stragglers),
    )


def comparable(timeline: Timeline) -> list[int]:
    """Return the indices of the steps with the buckets and messages of the last one, which DDP and plans may change.

    If the beginning of some of them is known, only those. Raises ConfigurationError when there is no step.
    """
    if not timeline.steps:
        raise ConfigurationError(
            "no step was recorded on all ranks; enable recording, train some steps, and call this between two steps"
        )
    layout = timeline.steps[-1][0].layout
    alike = [place for place, step in enumerate(timeline.steps) if step[0].layout == layout]
    known = [
        place
        for place in alike
        if follows(timeline, place) or all(record.forward_us is not None for record in timeline.steps[place])
    ]
    return known or alike


def begins_us(timeline: Timeline, place: int) -> list[float]:
    """Return the beginning of the step on each rank: the end of the step before, if recorded, else its forward pass.

    If that was not noted either, the time at which the first bucket was ready.
    """
    if follows(timeline, place):
        return [record.completed_us for record in timeline.steps[place - 1]]
    step = timeline.steps[place]
    return [record.buckets[0].ready_us if record.forward_us is None else record.forward_us for record in step]


def typical_step(timeline: Timeline) -> int:
    """Return the index of the step whose length, as a median over ranks, is nearest to the median of all compared."""
    chosen = comparable(timeline)
    completed = _table([timeline.steps[place] for place in chosen], attrgetter("completed_us"))
    step_us = np.median(completed - np.array([begins_us(timeline, place) for place in chosen]), axis=1)
    return chosen[int(np.abs(step_us - np.median(step_us)).argmin())]


def typical_steps(timeline: Timeline) -> list[int]:
    """Return the indices of the half of the compared steps whose length is nearest to the median."""
    chosen = comparable(timeline)
    completed = _table([timeline.steps[place] for place in chosen], attrgetter("completed_us"))
    step_us = np.median(completed - np.array([begins_us(timeline, place) for place in chosen]), axis=1)
    return [chosen[place] for place in _typical(step_us)]


def follows(timeline: Timeline, place: int) -> bool:
    """Return whether the step before this one was recorded too."""
    return place > 0 and timeline.steps[place - 1][0].step == timeline.steps[place][0].step - 1


def _table(steps: Steps, value: Callable[[StepRecord], object]) -> Array:
    """Return an array of `value`, whose first axes are the steps and the ranks."""
    return np.array([[value(record) for record in step] for step in steps], dtype=np.float64)


def _times(steps: Steps, begin: Array, last_start: Array) -> Array:
    """Return the values of StepBreakdown, [step, rank, value]; a lane runs one message after the other."""
    started = _table(steps, lambda record: [message.started_us for message in record.messages])
    finished = _table(steps, lambda record: [message.finished_us for message in record.messages])
    computed, completed = (_table(steps, attrgetter(name)) for name in ("compute_end_us", "completed_us"))
    waited, hidden_until = np.minimum(finished, last_start), computed[:, :, None]
    hidden, hidden_waiting = (
        np.clip(np.minimum(ends, hidden_until) - started, 0, None).sum(axis=2) for ends in (finished, waited)
    )
    exposed_waiting = np.clip(waited - np.maximum(started, hidden_until), 0, None).sum(axis=2)
    values = completed - begin, computed - begin, hidden, hidden_waiting, completed - computed, exposed_waiting
    return np.stack(values, axis=2)


def _typical(step_us: npt.NDArray[np.float64]) -> list[int]:
    """Return the half of the steps whose length is nearest to the median."""
    distance = np.abs(step_us - np.median(step_us))
    return sorted(np.argsort(distance, kind="stable")[: (len(step_us) + 1) // 2].tolist())


def _message_times(steps: Steps, begins_us: Array, last_starts_us: Array) -> tuple[MessageTimes, ...]:
    found = []
    for number, message in enumerate(steps[-1][0].messages):
        rows = [
            _message_row(record, number, begin_us, last_start_us[number])
            for step, *others in zip(steps, begins_us, last_starts_us, strict=True)
            for record, begin_us, last_start_us in zip(step, *others, strict=True)
        ]
        ready_us, queue_us, finished_us, *stages_us = np.mean(rows, axis=0).tolist()
        stages = dict(zip(STAGES, stages_us, strict=True))
        found.append(
            MessageTimes(message.buckets, message.label, message.nbytes, ready_us, queue_us, finished_us, stages)
        )
    return tuple(found)


def _message_row(record: StepRecord, number: int, begin_us: float, last_start_us: float) -> list[float]:
    """Ready, time in the queue, finished, and the time of each stage."""
    message = record.messages[number]
    ready_us = max(bucket.ready_us for bucket in record.buckets if bucket.number in message.buckets)
    stages = stages_us(message, last_start_us).values()
    return [ready_us - begin_us, message.started_us - ready_us, message.finished_us - begin_us, *stages]
