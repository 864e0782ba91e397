"""One step as plain data; all times are microseconds on this rank's clock (that of time.perf_counter)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """One collective inside a message; `level` is "world", "intra" or "inter"."""

    level: str
    name: str
    nbytes: int
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """One piece of lane work: DDP's buckets it carries, when it was queued, and when the lane worked on it."""

    buckets: tuple[int, ...]
    label: str
    nbytes: int
    queued_us: float
    started_us: float
    finished_us: float
    spans: tuple[Span, ...]

    def shifted(self, by_us: float) -> MessageRecord:
        """Return the same message on a clock that shows `by_us` more."""
        return replace(
            self,
            queued_us=self.queued_us + by_us,
            started_us=self.started_us + by_us,
            finished_us=self.finished_us + by_us,
            spans=tuple(
                replace(span, begin_us=span.begin_us + by_us, end_us=span.end_us + by_us) for span in self.spans
            ),
        )


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """One of DDP's buckets and when its gradients existed."""

    number: int
    label: str
    nbytes: int
    ready_us: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One backward with its communication; `forward_us` is the host's time, None where nobody noted it."""

    step: int
    forward_us: float | None
    compute_end_us: float
    buckets: tuple[BucketRecord, ...]
    messages: tuple[MessageRecord, ...]

    @property
    def completed_us(self) -> float:
        """When the last message had finished and the gradients were there: never before compute_end_us."""
        return max(self.compute_end_us, *(message.finished_us for message in self.messages))

    @property
    def layout(self) -> tuple[Any, ...]:
        """What a step must have in common with another one to be compared with it bucket by bucket."""
        return (
            tuple((bucket.number, bucket.label, bucket.nbytes) for bucket in self.buckets),
            tuple((message.buckets, message.label, message.nbytes) for message in self.messages),
        )

    def shifted(self, by_us: float) -> StepRecord:
        """Return the same step on a clock that shows `by_us` more."""
        return StepRecord(
            self.step,
            None if self.forward_us is None else self.forward_us + by_us,
            self.compute_end_us + by_us,
            tuple(replace(bucket, ready_us=bucket.ready_us + by_us) for bucket in self.buckets),
            tuple(message.shifted(by_us) for message in self.messages),
        )

    def to_lists(self) -> list[Any]:
        """Return nested lists for JSON, without the names of fields."""
        buckets = [[bucket.number, bucket.label, bucket.nbytes, bucket.ready_us] for bucket in self.buckets]
        messages = [
            [
                list(message.buckets),
                message.label,
                message.nbytes,
                message.queued_us,
                message.started_us,
                message.finished_us,
                [[span.level, span.name, span.nbytes, span.begin_us, span.end_us] for span in message.spans],
            ]
            for message in self.messages
        ]
        return [self.step, self.forward_us, self.compute_end_us, buckets, messages]

    @staticmethod
    def from_lists(lists: Sequence[Any]) -> StepRecord:
        """Return the step that to_lists() described."""
        step, forward_us, compute_end_us, buckets, messages = lists
        return StepRecord(
            step,
            forward_us,
            compute_end_us,
            tuple(BucketRecord(*bucket) for bucket in buckets),
            tuple(
                MessageRecord(
                    tuple(numbers), label, nbytes, queued, started, ended, tuple(Span(*span) for span in spans)
                )
                for numbers, label, nbytes, queued, started, ended, spans in messages
            ),
        )
