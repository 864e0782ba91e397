"""Messages on the lanes of a rank, event by event: what runs when, and what waits for what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from commopt.cost import StageTimes

Stage = Literal["launch", "up", "across", "down"]
Key = tuple[int, int, Stage]
"""Message, chunk, stage."""


@dataclass(frozen=True)
class Message:
    """One bucket: ready at a time from the beginning of the step, launched at a cost, sent in chunks."""

    ready_us: float
    launch_us: float
    chunks: tuple[StageTimes, ...]


class Span(NamedTuple):
    """A stage as it ran; `lane` is 1 where it ran beside the others."""

    message: int
    chunk: int
    stage: Stage
    lane: int
    begin_us: float
    end_us: float


class _Operation(NamedTuple):
    key: Key
    lane: int
    time_us: float
    ready_us: float
    after: Key | None


def run(messages: Sequence[Message], lanes: int) -> list[Span]:
    """Return all stages of all messages as they run, in the order in which they end.

    A lane takes its operations in the order of the program: the messages as given, their chunks as
    `aggregate.pipeline.follow` has them. lanes: 2 to go across beside the way up of the next chunk; with 1 all take
    turns. A message is launched when the one before it has ended.
    """
    queues: dict[int, deque[_Operation]] = {0: deque(), 1: deque()}
    for operation in _program(messages, lanes):
        queues[operation.lane].append(operation)
    done: dict[Key | None, float] = {None: 0.0}
    ending: list[tuple[float, int, Span]] = []
    free_us = dict.fromkeys(queues, 0.0)
    busy: set[int] = set()
    spans: list[Span] = []
    while True:
        for lane, queue in queues.items():
            if lane not in busy and queue and queue[0].after in done:
                operation = queue.popleft()
                begin_us = max(free_us[lane], operation.ready_us, done[operation.after])
                span = Span(*operation.key, lane, begin_us, begin_us + operation.time_us)
                heappush(ending, (span.end_us, lane, span))
                busy.add(lane)
        if not ending:
            return spans
        end_us, lane, span = heappop(ending)
        done[span.message, span.chunk, span.stage] = free_us[lane] = end_us
        busy.discard(lane)
        spans.append(span)


def _program(messages: Sequence[Message], lanes: int) -> Iterator[_Operation]:
    far = 1 if lanes > 1 else 0
    for number, message in enumerate(messages):
        yield _Operation((number, 0, "launch"), 0, message.launch_us, message.ready_us, None)
        landing: _Operation | None = None
        for chunk, times in enumerate(message.chunks):
            yield _Operation((number, chunk, "up"), 0, times.up_us, 0.0, None)
            yield _Operation((number, chunk, "across"), far, times.across_us, 0.0, (number, chunk, "up"))
            if landing is not None:
                yield landing
            landing = _Operation((number, chunk, "down"), 0, times.down_us, 0.0, (number, chunk, "across"))
        if landing is not None:
            yield landing
