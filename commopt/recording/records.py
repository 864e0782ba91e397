# SPDX-License-Identifier: Apache-2.0
"""One step as plain data. All times (`_us`) are microseconds of this rank's time.perf_counter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class Span:
    """One collective inside a message.

    level: "world", "intra" or "inter"; with sites also "inter.intra", "inter.inter" and so on.
    """

    level: str
    name: str
    nbytes: int
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """One message on the lane.

    buckets: numbers of the DDP buckets in it.
    queued_us: time of its submission.
    started_us: time at which the lane began it.
    finished_us: time at which the lane ended it.
    spans: its collectives.
    """

    buckets: tuple[int, ...]
    label: str
    nbytes: int
    queued_us: float
    started_us: float
    finished_us: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class BucketRecord:
    """One DDP bucket, and the time at which its gradients were ready."""

    number: int
    label: str
    nbytes: int
    ready_us: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One backward with its communication.

    forward_us: start of the forward on the host; None if it was not noted.
    compute_end_us: time at which the last gradient was ready.
    """

    step: int
    forward_us: float | None
    compute_end_us: float
    buckets: tuple[BucketRecord, ...]
    messages: tuple[MessageRecord, ...]

    @property
    def completed_us(self) -> float:
        """Time at which the last message had finished; never before compute_end_us."""
        return max(self.compute_end_us, *(message.finished_us for message in self.messages))

    @property
    def layout(self) -> tuple[Any, ...]:
        """Buckets and messages without times. Steps with equal layouts can be compared bucket by bucket."""
        return (
            tuple((bucket.number, bucket.label, bucket.nbytes) for bucket in self.buckets),
            tuple((message.buckets, message.label, message.nbytes) for message in self.messages),
        )

    def times_us(self) -> list[Any]:
        """Return all times of the step in the order of the fields."""
        found: list[Any] = []
        _map_times(self, found.append)
        return found

    def at(self, times_us: Iterable[float]) -> StepRecord:
        """Return the same step with other times, in the order of `times_us`."""
        in_order = iter(times_us)
        return _map_times(self, lambda _: next(in_order))

    def shifted(self, by_us: float) -> StepRecord:
        """Return the same step on a clock that shows `by_us` more."""
        return self.at(time_us + by_us for time_us in self.times_us())

    def to_lists(self) -> Sequence[Any]:
        """Return nested lists for JSON, without field names."""
        return astuple(self)

    @staticmethod
    def from_lists(lists: Sequence[Any]) -> StepRecord:
        """Return the step of a result of to_lists()."""
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
    """Return a record with `change` applied to all its times, also those of nested records, in their order."""

    def changed(name: str, value: Any) -> Any:
        if name.endswith("_us"):
            return None if value is None else change(value)
        if isinstance(value, tuple):
            return tuple(_map_times(each, change) if is_dataclass(each) else each for each in value)
        return value

    described: Any = record  # mypy does not know that it is a dataclass
    changes = {each.name: changed(each.name, getattr(record, each.name)) for each in fields(described)}
    return cast(_Record, replace(described, **changes))
