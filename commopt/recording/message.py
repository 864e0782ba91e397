"""A message while it is under way: marks that become a MessageRecord once all is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from commopt.recording.clock import Mark
from commopt.recording.records import MessageRecord, Span


class Message:
    """Work submitted to a lane; `spans` grows while it runs, from every thread that works for it."""

    __slots__ = ("buckets", "finished", "label", "mark", "nbytes", "queued", "spans", "started")

    def __init__(self, buckets: tuple[int, ...], label: str, nbytes: int, mark: Callable[[], Mark]) -> None:
        self.buckets = buckets
        self.label = label
        self.nbytes = nbytes
        self.mark = mark
        self.queued = mark()
        self.started: Mark | None = None
        self.finished: Mark | None = None
        self.spans: list[tuple[str, str, int, Mark, Mark]] = []

    def marks(self) -> Iterator[Mark]:
        """Yield all marks, in the order in which `record` takes their times."""
        yield from (self.queued, self.started, self.finished)
        for _, _, _, begin, end in self.spans:
            yield from (begin, end)

    def record(self, times_us: Iterator[float]) -> MessageRecord:
        """Return what happened; `times_us` are those of `marks()`."""
        queued_us, started_us, finished_us = next(times_us), next(times_us), next(times_us)
        spans = [Span(level, name, nbytes, next(times_us), next(times_us)) for level, name, nbytes, _, _ in self.spans]
        spans.sort(key=lambda span: span.begin_us)
        return MessageRecord(self.buckets, self.label, self.nbytes, queued_us, started_us, finished_us, tuple(spans))
