"""Let commopt's tuner choose while a fresh model trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.bucketing.models import Subject
from bench.prediction.trainee import Trainee

_AT_ONCE = 3  # steps between two looks, so that asking each other is no part of most


@dataclass(frozen=True)
class Choice:
    """A model whose tuner has chosen, or has not within the limit (`name` is "" then); `steps` it was given."""

    trainee: Trainee
    name: str
    steps: int
    explanation: str


def tune(subject: Subject, allow: Sequence[str], most_steps: int) -> Choice:
    """Train with "auto" until all ranks know what it chose, or for `most_steps`; collective."""
    trainee = Trainee("auto", subject, {"allow": tuple(allow)})
    state = trainee.state
    assert state is not None  # it is no stock DDP
    steps = 0
    while not _on_all_ranks(state.tuned is not None) and steps < most_steps:
        at_once = min(_AT_ONCE, most_steps - steps)
        trainee.turn(at_once, counts=False)
        steps += at_once
    return Choice(trainee, "" if state.tuned is None else state.tuned.name, steps, state.explain())


def _on_all_ranks(value: bool) -> bool:
    agreed = torch.tensor(int(value))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)
