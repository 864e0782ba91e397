"""What ranks tell each other in a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def gather(value: T) -> list[T]:
    """Return every rank's value, on every rank."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # all are filled


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def slowest_rank_ms(step_s: Sequence[float]) -> list[float]:
    """Return for each step the time of its slowest rank."""
    return [1000 * max(times) for times in zip(*gather(step_s), strict=True)]
