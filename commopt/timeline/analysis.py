"""Where the time of a step goes, on each rank and in each message: means over typical steps.

Means, so that parts add up; of the half of the steps whose length is nearest the median, so that a step in which
something else happened (a checkpoint, an evaluation before it) does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from commopt.errors import ConfigurationError
from commopt.recording import StepRecord
from commopt.timeline.gather import Timeline
from commopt.timeline.intervals import after, before, length
from commopt.timeline.lateness import Straggler, lateness_us, stand_out
from commopt.timeline.stages import STAGES, last_starts_us, segments


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, or the mean of several.

    step_us: from the end of the step before to the end of this one. compute_us: up to the last gradient.
    exposed_us: from there to the end of the last message, by which communication makes the step longer.
    hidden_us: when the lane was at work before. Of both, waiting is the time in which this rank had started a message
    that the last rank had not.
    """

    step_us: float
    compute_us: float
    hidden_us: float
    hidden_waiting_us: float
    exposed_us: float
    exposed_waiting_us: float

    @property
    def communication_us(self) -> float:
        """All of it."""
        return self.hidden_us + self.exposed_us

    @property
    def hidden_transfer_us(self) -> float:
        """What of the hidden part is not waiting."""
        return self.hidden_us - self.hidden_waiting_us

    @property
    def exposed_transfer_us(self) -> float:
        """What of the exposed part is not waiting."""
        return self.exposed_us - self.exposed_waiting_us


@dataclass(frozen=True)
class RankTimes:
    """One rank. `late_us`: behind the median of the others at its worst bucket, median over steps; may be negative."""

    rank: int
    node: int
    times: StepTimes
    late_us: float


@dataclass(frozen=True)
class BucketTimes:
    """One of DDP's buckets; `ready_us` since the step began, on the last of the ranks."""

    number: int
    label: str
    nbytes: int
    ready_us: float


@dataclass(frozen=True)
class MessageTimes:
    """One message of a step, mean over ranks; ready and finished are since the step began.

    queue_us: ready but behind other messages. `stages_us` cuts the time from start to finish into STAGES.
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
    """What a timeline shows; of the steps recorded only those with the last one's buckets are compared.

    last_exposed_us: communication after the last gradient of all ranks, the part that no faster rank would shorten.
    """

    first_step: int
    last_step: int
    compared_steps: int
    recorded_steps: int
    mean: StepTimes
    last_exposed_us: float
    ranks: tuple[RankTimes, ...]
    buckets: tuple[BucketTimes, ...]
    messages: tuple[MessageTimes, ...]
    stragglers: tuple[Straggler, ...]


def analyse(timeline: Timeline) -> Analysis:
    """Return what `timeline` shows; raises ConfigurationError when no step is complete on all ranks."""
    chosen = comparable(timeline)
    steps = [timeline.steps[place] for place in chosen]
    begins = [begins_us(timeline, place) for place in chosen]
    last = steps[-1][0]
    by_rank = _step_times(steps, begins)
    ready = np.array([[[bucket.ready_us for bucket in record.buckets] for record in step] for step in steps])
    step_us = np.array([median(times.step_us for times in step) for step in by_rank])
    late_us = np.median(lateness_us(ready), axis=0).max(axis=1)
    typical = _typical(step_us)
    ranks = [_mean([by_rank[step][place] for step in typical]) for place in range(len(timeline.ranks))]
    stragglers = [
        Straggler(
            timeline.ranks[place], amount, last.buckets[bucket].number if bucket else None, last.buckets[bucket].label
        )
        for place, bucket, amount in stand_out(ready, step_us, np.array(timeline.uncertainty_us))
    ]
    since = ready - np.array(begins)[:, :, None]
    return Analysis(
        steps[0][0].step,
        last.step,
        len(steps),
        len(timeline.steps),
        _mean(ranks),
        fmean(min(times.exposed_us for times in by_rank[step]) for step in typical),
        tuple(map(RankTimes, timeline.ranks, timeline.nodes, ranks, late_us.tolist())),
        tuple(
            BucketTimes(bucket.number, bucket.label, bucket.nbytes, ready_us)
            for bucket, ready_us in zip(last.buckets, since[typical].max(axis=1).mean(axis=0).tolist(), strict=True)
        ),
        _message_times([steps[step] for step in typical], [begins[step] for step in typical]),
        tuple(stragglers),
    )


def comparable(timeline: Timeline) -> list[int]:
    """Return the places of the steps with the last one's buckets and messages: DDP and plans change them.

    Raises ConfigurationError when there is no step at all.
    """
    if not timeline.steps:
        raise ConfigurationError(
            "no step was recorded on all ranks; switch recording on, train some steps and ask between two of them"
        )
    layout = timeline.steps[-1][0].layout
    return [place for place, step in enumerate(timeline.steps) if step[0].layout == layout]


def begins_us(timeline: Timeline, place: int) -> list[float]:
    """Return when the step began on each rank: when the one before ended, if recorded, else with the forward pass."""
    step = timeline.steps[place]
    if place > 0 and timeline.steps[place - 1][0].step == step[0].step - 1:
        return [record.completed_us for record in timeline.steps[place - 1]]
    return [record.buckets[0].ready_us if record.forward_us is None else record.forward_us for record in step]


def _step_times(steps: Sequence[Sequence[StepRecord]], begins: Sequence[Sequence[float]]) -> list[list[StepTimes]]:
    """[step][rank]."""
    return [
        [_times(record, begin_us, last_starts_us(step)) for record, begin_us in zip(step, begin, strict=True)]
        for step, begin in zip(steps, begins, strict=True)
    ]


def _times(record: StepRecord, begin_us: float, last_starts: Sequence[float]) -> StepTimes:
    busy = [(message.started_us, message.finished_us) for message in record.messages]
    waiting = [(begin, min(end, last)) for (begin, end), last in zip(busy, last_starts, strict=True)]
    end_us = record.compute_end_us
    return StepTimes(
        record.completed_us - begin_us,
        end_us - begin_us,
        length(before(busy, end_us)),
        length(before(waiting, end_us)),
        record.completed_us - end_us,
        length(after(waiting, end_us)),
    )


def _typical(step_us: npt.NDArray[np.float64]) -> list[int]:
    """Return the half of the steps whose length is nearest the median."""
    distance = np.abs(step_us - np.median(step_us))
    return sorted(np.argsort(distance, kind="stable")[: (len(step_us) + 1) // 2].tolist())


def _mean(times: Sequence[StepTimes]) -> StepTimes:
    return StepTimes(*(fmean(getattr(each, field.name) for each in times) for field in fields(StepTimes)))


def _message_times(
    steps: Sequence[Sequence[StepRecord]], begins: Sequence[Sequence[float]]
) -> tuple[MessageTimes, ...]:
    found = []
    for number, message in enumerate(steps[-1][0].messages):
        rows = np.array(
            [
                [
                    _message_row(record, number, begin_us, last_start_us)
                    for record, begin_us in zip(step, begin, strict=True)
                ]
                for step, begin, last_start_us in zip(steps, begins, _last_starts_us(steps, number), strict=True)
            ]
        )
        ready_us, queue_us, finished_us, *stages_us = rows.mean(axis=(0, 1)).tolist()
        stages = dict(zip(STAGES, stages_us, strict=True))
        found.append(
            MessageTimes(message.buckets, message.label, message.nbytes, ready_us, queue_us, finished_us, stages)
        )
    return tuple(found)


def _message_row(record: StepRecord, number: int, begin_us: float, last_start_us: float) -> list[float]:
    """Ready, time in the queue, finished, and the time of each stage."""
    message = record.messages[number]
    ready_us = max(bucket.ready_us for bucket in record.buckets if bucket.number in message.buckets)
    stages = dict.fromkeys(STAGES, 0.0)
    for segment in segments(message, last_start_us):
        stages[segment.stage] += segment.end_us - segment.begin_us
    queue_us = message.started_us - message.queued_us
    return [ready_us - begin_us, queue_us, message.finished_us - begin_us, *stages.values()]


def _last_starts_us(steps: Sequence[Sequence[StepRecord]], number: int) -> list[float]:
    return [max(record.messages[number].started_us for record in step) for step in steps]
