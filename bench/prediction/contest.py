"""The strategies for one model take turns with steps that do not communicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.bucketing.models import Subject
from bench.prediction.profile import Profile
from bench.prediction.trainee import Trainee

_WARM_UP = 3  # steps: DDP makes its buckets anew after the first, and connections are made in the next
_FEWEST, _MOST = 4, 24
_TURNS = 2


@dataclass(frozen=True)
class Contest:
    """What each strategy took, and the same model without communication; of each, the times of some steps."""

    profile: Profile
    trainees: tuple[Trainee, ...]


def hold(subject: Subject, strategies: Sequence[str], seconds: float, profile: Profile) -> Contest:
    """Train by every strategy for about `seconds` and four steps or more, after warm-up; collective."""
    options = {"plan": "ddp", "record": True}
    contest = Contest(profile, tuple(Trainee(strategy, subject, options) for strategy in strategies))
    contenders: tuple[Profile | Trainee, ...] = (profile, *contest.trainees)
    counts = [_steps(contender.turn(_WARM_UP, counts=False), seconds) for contender in contenders]
    for _ in range(_TURNS):
        for contender, count in zip(contenders, counts, strict=True):
            contender.turn(count // _TURNS)
    return contest


def _steps(warm_up_s: Sequence[float], seconds: float) -> int:
    """Return how many steps to time, the same number in every turn."""
    affordable = round(seconds / median(warm_up_s[1:]))
    return max(_FEWEST, min(_MOST, affordable)) // _TURNS * _TURNS
