"""Try every candidate, with DDP's buckets and with buckets of the planner's, and find the fastest."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from bench.bucketing.models import Subject
from bench.prediction.trainee import Trainee

_WARM_UP = 4  # steps: connections are made, and DDP makes its buckets anew after the first
_SETTLING = 36  # steps until the planner has measured, planned and corrected itself
_FEWEST, _MOST = 4, 16


@dataclass(frozen=True)
class Tried:
    """A candidate after its timed steps, milliseconds each; `plan` as in commopt.attach."""

    strategy: str
    plan: str
    step_ms: float

    @property
    def name(self) -> str:
        """What it is, for people."""
        return f"{self.strategy} ({self.plan})"


def tried(trainee: Trainee, plan: str, warm_up: int, seconds: float) -> Tried:
    """Train for a while, then for about `seconds` with the clock running; collective."""
    taken_s = trainee.turn(warm_up, counts=False)
    affordable = round(seconds / median(taken_s[1:]))
    trainee.turn(max(_FEWEST, min(_MOST, affordable)))
    return Tried(trainee.strategy, plan, 1000 * median(trainee.step_s))


def search(
    subject: Subject, strategies: Sequence[str], compute_ms: float, seconds: float, show: Callable[[str], None]
) -> tuple[list[Tried], Trainee]:
    """Return all that was tried, the fastest first, and that one still in training; collective.

    compute_ms: a step without communication. Other buckets can hide no more of it than that behind a backward, so a
    candidate that could not be the fastest even then keeps DDP's.
    """
    found: list[Tried] = []
    fastest: list[Trainee] = []  # the others make room

    def enter(strategy: str, plan: str, warm_up: int) -> None:
        trainee = Trainee(strategy, subject, {"plan": plan})
        found.append(tried(trainee, plan, warm_up, seconds))
        if found[-1] == min(found, key=_step_ms):
            fastest[:] = [trainee]
        gc.collect()

    for strategy in strategies:
        show(strategy)
        enter(strategy, "ddp", _WARM_UP)
    for each in list(found):
        if each.step_ms - compute_ms <= min(map(_step_ms, found)):
            show(f"{each.strategy}, adaptive buckets")
            enter(each.strategy, "adaptive", _SETTLING)
    return sorted(found, key=_step_ms), fastest[0]


def _step_ms(each: Tried) -> float:
    return each.step_ms
