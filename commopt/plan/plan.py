"""What is sent together, by which strategy and when: plain data that rank 0 makes and every rank follows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from commopt.document import field, load, require_text, require_time, require_whole
from commopt.errors import ConfigurationError

_FORMAT = 1


@dataclass(frozen=True)
class Unit:
    """The smallest thing that can be sent: one gradient, or one of DDP's buckets.

    ready_us: from the beginning of the step, on the slowest rank.
    dtype: only units of equal dtype share a bucket; any text that tells apart what cannot lie in one buffer.
    """

    names: tuple[str, ...]
    nbytes: int
    ready_us: float
    dtype: str

    def __post_init__(self) -> None:
        _require_names(self.names, "unit")
        require_whole(self.nbytes, 0, f"unit {self.names[0]!r}: nbytes")
        require_time(self.ready_us, f"unit {self.names[0]!r}: ready_us")
        require_text(self.dtype, f"unit {self.names[0]!r}: dtype")


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are one message, in the order in which they lie in it."""

    names: tuple[str, ...]
    nbytes: int
    strategy: str
    chunks: int = 1

    def __post_init__(self) -> None:
        _require_names(self.names, "bucket")
        require_whole(self.nbytes, 0, f"bucket of {self.names[0]!r}: nbytes")
        require_text(self.strategy, f"bucket of {self.names[0]!r}: strategy")
        require_whole(self.chunks, 1, f"bucket of {self.names[0]!r}: chunks")

    @classmethod
    def of(cls, units: Sequence[Unit], strategy: str, chunks: int = 1) -> Bucket:
        """Put whole units into one bucket."""
        names = tuple(name for unit in units for name in unit.names)
        return cls(names, sum(unit.nbytes for unit in units), strategy, chunks)


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to take, from its beginning; `bucket_finish_us` in the order of the plan's buckets.

    compute_us: when the last gradient is ready. exposed_us: from then to finish_us.
    communication_us: sum of the times the lane is busy.
    """

    compute_us: float
    finish_us: float
    exposed_us: float
    communication_us: float
    bucket_finish_us: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("compute_us", "finish_us", "exposed_us", "communication_us"):
            require_time(getattr(self, name), f"prediction: {name}")
        for time_us in self.bucket_finish_us:
            require_time(time_us, "prediction: bucket_finish_us")

    @classmethod
    def from_entry(cls, entry: Any, where: str) -> Prediction:
        """Read a prediction out of a JSON document; raises ConfigurationError for anything else."""
        return cls(
            compute_us=field(entry, "compute_us", float, where),
            finish_us=field(entry, "finish_us", float, where),
            exposed_us=field(entry, "exposed_us", float, where),
            communication_us=field(entry, "communication_us", float, where),
            bucket_finish_us=tuple(field(entry, "bucket_finish_us", list, where)),
        )


@dataclass(frozen=True)
class Plan:
    """Buckets, and the `order` in which they are launched (indices; left out: as they stand).

    Raises ConfigurationError when a name occurs twice or `order` is not a permutation.
    """

    buckets: tuple[Bucket, ...]
    order: tuple[int, ...] = ()
    origin: str = "given"
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        if not self.buckets:
            raise ConfigurationError("plan: it has no buckets; give it at least one")
        if not self.order:
            object.__setattr__(self, "order", tuple(range(len(self.buckets))))
        require_text(self.origin, "plan: origin")
        twice = [name for name, times in Counter(self.names).items() if times > 1]
        if twice:
            raise ConfigurationError(f"plan: {_listed(twice)} is in it more than once; name every parameter once")
        if sorted(self.order) != list(range(len(self.buckets))):
            raise ConfigurationError(
                f"plan: order {list(self.order)} must name each of its {len(self.buckets)} buckets, "
                f"0..{len(self.buckets) - 1}, once"
            )
        if self.predicted is not None and len(self.predicted.bucket_finish_us) != len(self.buckets):
            raise ConfigurationError(
                f"plan: {len(self.buckets)} buckets, but {len(self.predicted.bucket_finish_us)} predicted finish "
                f"times; give one for each bucket"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter, bucket by bucket."""
        return tuple(name for bucket in self.buckets for name in bucket.names)

    @property
    def contents(self) -> frozenset[tuple[frozenset[str], str, int]]:
        """What tells plans apart, whatever the order of their buckets and of the parameters in these."""
        return frozenset((frozenset(bucket.names), bucket.strategy, bucket.chunks) for bucket in self.buckets)

    def require_names(self, names: Iterable[str]) -> None:
        """Raise ConfigurationError unless the plan is for exactly these parameters."""
        own, wanted = set(self.names), set(names)
        if own != wanted:
            differences = [
                f"{what} {_listed(sorted(which))}"
                for what, which in (("it lacks", wanted - own), ("it has but the model does not train", own - wanted))
                if which
            ]
            raise ConfigurationError(f"plan: made for other parameters: {'; '.join(differences)}; make a new plan")

    def digest(self) -> str:
        """Return the SHA-256 of what ranks must agree on: buckets and order, not origin and prediction."""
        agreed = {"buckets": self._document()["buckets"], "order": self.order}
        return sha256(json.dumps(agreed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> str:
        """Return a text from which `from_json` makes an equal plan."""
        return json.dumps(self._document())

    def _document(self) -> dict[str, Any]:
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; raises ConfigurationError for anything else."""
        document = load(text, "plan", _FORMAT)
        buckets = field(document, "buckets", list, "plan")
        predicted = document.get("predicted")
        return cls(
            buckets=tuple(_bucket(entry, f"plan, bucket {place}") for place, entry in enumerate(buckets)),
            order=_whole_numbers(field(document, "order", list, "plan")),
            origin=field(document, "origin", str, "plan"),
            predicted=None if predicted is None else Prediction.from_entry(predicted, "plan, predicted"),
        )


def _bucket(entry: Any, where: str) -> Bucket:
    return Bucket(
        names=tuple(field(entry, "names", list, where)),
        nbytes=field(entry, "nbytes", int, where),
        strategy=field(entry, "strategy", str, where),
        chunks=field(entry, "chunks", int, where),
    )


def _whole_numbers(order: list[Any]) -> tuple[int, ...]:
    for place in order:
        require_whole(place, 0, "plan: an entry of order")
    return tuple(order)


def _require_names(names: tuple[str, ...], what: str) -> None:
    if not isinstance(names, tuple) or not names:
        raise ConfigurationError(f"{what}: names are {names!r}; give a tuple of at least one parameter name")
    for name in names:
        require_text(name, f"{what}: a parameter name")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
