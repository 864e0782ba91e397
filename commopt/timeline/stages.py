"""What the lane did during a message: wait for the last rank, work of its own, or a collective of some level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from commopt.recording import MessageRecord, StepRecord

WAITING = "waiting"
LOCAL = "local"
STAGES = (WAITING, LOCAL, "intra", "inter", "world")

# Where collectives overlap (levels pipelined by chunks), the time is that of the slower network.
_FIRST = ("inter", "world", "intra")


@dataclass(frozen=True)
class Segment:
    """A part of a message during which the lane was in one stage."""

    stage: str
    begin_us: float
    end_us: float


def stays_inside(step: Sequence[StepRecord]) -> bool:
    """Return whether each node kept to itself throughout a step, as with LocalSGD: no collective left one."""
    return all(map(_stays_inside, _by_message(step)))


def last_starts_us(step: Sequence[StepRecord], nodes: Sequence[int]) -> list[list[float]]:
    """Return [rank][message] when the last of the ranks in it started the message: before that it cannot have ended.

    nodes: of each rank. All ranks are in a message, but for those that stay inside the nodes.
    """
    columns = []
    for same in _by_message(step):
        parts = nodes if _stays_inside(same) else [0] * len(nodes)
        last_us = dict.fromkeys(parts, -inf)
        for part, message in zip(parts, same, strict=True):
            last_us[part] = max(last_us[part], message.started_us)
        columns.append([last_us[part] for part in parts])
    return [list(row) for row in zip(*columns, strict=True)]


def _by_message(step: Sequence[StepRecord]) -> list[tuple[MessageRecord, ...]]:
    """Return each message as all ranks recorded it."""
    return list(zip(*(record.messages for record in step), strict=True))


def _stays_inside(same: Iterable[MessageRecord]) -> bool:
    return all(span.level == "intra" for message in same for span in message.spans)


def segments(message: MessageRecord, last_start_us: float) -> list[Segment]:
    """Return the message's time cut into stages, in order and without gaps.

    Up to `last_start_us` it counts as waiting, whatever this rank did meanwhile.
    """
    begin_us, end_us = message.started_us, message.finished_us
    edges = {time for span in message.spans for time in (span.begin_us, span.end_us)} | {last_start_us}
    cuts = sorted({begin_us, end_us, *(time for time in edges if begin_us < time < end_us)})
    found: list[Segment] = []
    for begin, end in pairwise(cuts):
        stage = WAITING if begin < last_start_us else _stage(message, (begin + end) / 2)
        if found and found[-1].stage == stage:
            begin = found.pop().begin_us
        found.append(Segment(stage, begin, end))
    return found


def _stage(message: MessageRecord, time_us: float) -> str:
    levels = {span.level for span in message.spans if span.begin_us <= time_us < span.end_us}
    return next((level for level in _FIRST if level in levels), LOCAL)
