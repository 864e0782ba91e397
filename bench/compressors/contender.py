"""What can be timed: something that averages the buckets of a step, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from bench.compressors.gradients import Gradients

Start: TypeAlias = Callable[[int], Callable[[], object]]
"""Begins to average a bucket, by its number; what it returns waits for the end of that, as DDP does after backward."""


@dataclass(frozen=True)
class Contender:
    """enter: gets ready for the steps of a model, from nothing.

    payload_nbytes: bytes per step that it hands to collectives between nodes, the mean of two steps.
    lead_steps: how many steps it sends dense before it compresses.
    """

    name: str
    enter: Callable[[Gradients], Start]
    payload_nbytes: Callable[[Gradients], float]
    lead_steps: int = 0
