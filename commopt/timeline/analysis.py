"""Where the time of a step goes, on each rank and in each message: means over typical steps.

Means, so that parts add up; of the half of the steps whose length is nearest the median, so that a step in which
something else happened (a checkpoint, an evaluation before it) does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from commopt.errors import ConfigurationError
from commopt.recording import StepRecord
from commopt.timeline.findings import Analysis, BucketTimes, MessageTimes, RankTimes, StepTimes
from commopt.timeline.gather import Timeline
from commopt.timeline.intervals import after, before, length
from commopt.timeline.lateness import Straggler, lateness_us, stand_out
from commopt.timeline.stages import STAGES, last_starts_us, segments, stays_inside

Steps = Sequence[Sequence[StepRecord]]  # [step][rank]
Times = Sequence[Sequence[float]]


def analyse(timeline: Timeline) -> Analysis:
    """Return what `timeline` shows; raises ConfigurationError when no step is complete on all ranks."""
    chosen = comparable(timeline)
    steps = [timeline.steps[place] for place in chosen]
    begins = [begins_us(timeline, place) for place in chosen]
    last = steps[-1][0]
    starts = [last_starts_us(step, timeline.nodes) for step in steps]
    by_rank = _step_times(steps, begins, starts)
    ready = np.array([[[bucket.ready_us for bucket in record.buckets] for record in step] for step in steps])
    since = ready - np.array(begins)[:, :, None]
    step_us = np.array([median(times.step_us for times in step) for step in by_rank])
    # Nodes that do not wait for each other drift apart: there a rank is late by what each step adds.
    apart = np.array([stays_inside(step) for step in steps])
    compared = np.where(apart[:, None, None], since, ready)
    late_us = np.median(lateness_us(compared), axis=0).max(axis=1)
    typical = _typical(step_us)
    ranks = [_mean([by_rank[step][place] for step in typical]) for place in range(len(timeline.ranks))]
    stragglers = [
        Straggler(
            timeline.ranks[place], amount, last.buckets[bucket].number if bucket else None, last.buckets[bucket].label
        )
        for place, bucket, amount in stand_out(compared, step_us, np.array(timeline.uncertainty_us))
    ]
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
        _message_times(
            [steps[step] for step in typical], [begins[step] for step in typical], [starts[step] for step in typical]
        ),
        tuple(stragglers),
    )


def comparable(timeline: Timeline) -> list[int]:
    """Return the places of the steps with the last one's buckets and messages: DDP and plans change them.

    Of these only the ones whose beginning is known, if there are any. Raises ConfigurationError when there is no step.
    """
    if not timeline.steps:
        raise ConfigurationError(
            "no step was recorded on all ranks; switch recording on, train some steps and ask between two of them"
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
    """Return when the step began on each rank: when the one before ended, if recorded, else with the forward pass.

    Where nobody noted that either, when its first bucket was ready.
    """
    if follows(timeline, place):
        return [record.completed_us for record in timeline.steps[place - 1]]
    step = timeline.steps[place]
    return [record.buckets[0].ready_us if record.forward_us is None else record.forward_us for record in step]


def follows(timeline: Timeline, place: int) -> bool:
    """Return whether the step before this one was recorded too."""
    return place > 0 and timeline.steps[place - 1][0].step == timeline.steps[place][0].step - 1


def _step_times(steps: Steps, begins: Times, starts: Sequence[Times]) -> list[list[StepTimes]]:
    """[step][rank]; `starts` are of [step][rank][message] as in `last_starts_us`."""
    return [
        [_times(*each) for each in zip(step, begin, start, strict=True)]
        for step, begin, start in zip(steps, begins, starts, strict=True)
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


def _message_times(steps: Steps, begins: Times, starts: Sequence[Times]) -> tuple[MessageTimes, ...]:
    found = []
    for number, message in enumerate(steps[-1][0].messages):
        rows = np.array(
            [
                [_message_row(record, number, begin_us, last[number]) for record, begin_us, last in each]
                for each in (zip(*step, strict=True) for step in zip(steps, begins, starts, strict=True))
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
    return [ready_us - begin_us, message.started_us - ready_us, message.finished_us - begin_us, *stages.values()]
