"""The buckets that DDP makes of its own accord."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from commopt.errors import ConfigurationError
from commopt.schedule import Unit

_MIB = 2**20


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are one message, in the order in which they lie in it."""

    names: tuple[str, ...]
    nbytes: int
    strategy: str

    @classmethod
    def of(cls, units: Sequence[Unit], strategy: str) -> Bucket:
        """Put whole units into one bucket."""
        return cls(tuple(name for unit in units for name in unit.names), sum(unit.nbytes for unit in units), strategy)


def ddp_buckets(units: Sequence[Unit], cap_mb: float = 25.0, first_mb: float = 1.0) -> tuple[tuple[Unit, ...], ...]:
    """Return which gradients DDP sends together from its second step on, in the order of their launch.

    units: in the order of backward. A bucket closes with the gradient that takes it to its limit or beyond; the first
    of each dtype is limited to `first_mb` MiB, the others to `cap_mb`. What stays open at the end follows, dtype by
    dtype. As torch's compute_bucket_assignment_by_size.
    """
    for name, value in (("cap_mb", cap_mb), ("first_mb", first_mb)):
        if not 0 < value < float("inf"):
            raise ConfigurationError(f"ddp_buckets({name}={value!r}) must be a finite number above 0, in MiB")
    limits_nbytes = (int(first_mb * _MIB), int(cap_mb * _MIB))
    closed: list[tuple[Unit, ...]] = []
    opened: dict[str, list[Unit]] = {}
    begun: set[str] = set()  # dtypes whose first bucket is closed
    for unit in units:
        members = opened.setdefault(unit.dtype, [])
        members.append(unit)
        if sum(member.nbytes for member in members) >= limits_nbytes[unit.dtype in begun]:
            closed.append(tuple(opened.pop(unit.dtype)))
            begun.add(unit.dtype)
    return (*closed, *map(tuple, opened.values()))
