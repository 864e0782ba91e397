# SPDX-License-Identifier: Apache-2.0
"""One step as plain data; all times (`_us`) are microseconds on this rank's clock (that of time.perf_counter)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

_Record = TypeVar("_Record")


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

    def times_us(self) -> list[Any]:
        """Return all times of the step, in the order of the fields."""
        found: list[Any] = []
        _map_times(self, found.append)
        return found

    def at(self, times_us: Iterable[float]) -> StepRecord:
        """Return the same step at other times, in that order."""
        in_order = iter(times_us)
        return _map_times(self, lambda _: next(in_order))

    def shifted(self, by_us: float) -> StepRecord:
        """Return the same step on a clock that shows `by_us` more."""
        return self.at(time_us + by_us for time_us in self.times_us())

    def to_lists(self) -> Sequence[Any]:
        """Return nested lists for JSON, without the names of fields."""
        return astuple(self)

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


def _map_times(record: _Record, change: Callable[[Any], object]) -> _Record:
    """Return a record with `change` made to each of its times, and to those of the records in it, in their order."""

    def changed(name: str, value: Any) -> Any:
        if name.endswith("_us"):
            return None if value is None else change(value)
        if isinstance(value, tuple):
            return tuple(_map_times(each, change) if is_dataclass(each) else each for each in value)
        return value

    described: Any = record  # which mypy cannot know to be a dataclass
    changes = {each.name: changed(each.name, getattr(record, each.name)) for each in fields(described)}
    return cast(_Record, replace(described, **changes))
