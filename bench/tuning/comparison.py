"""One model on one cluster: every candidate, the tuner's choice, and both in turns with stock DDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from bench.bucketing.models import Subject
from bench.prediction.profile import Profile
from bench.prediction.trainee import STOCK, Trainee
from bench.tuning.exhaustive import search
from bench.tuning.record import Configuration
from bench.tuning.tuned import tune

_WARM_UP = 4  # steps: connections are made, and DDP makes its buckets anew after the first
_FEWEST_TURNS, _MOST_TURNS = 6, 12
_MORE_AT_LAST = 3  # times as long as each candidate was tried
_FEWEST, _MOST = 3, 10  # steps in a turn


def compare(
    subject: Subject,
    allow: Sequence[str],
    strategies: Sequence[str],
    *,
    seconds: float,
    most_steps: int,
    show: Callable[[str], None],
) -> Configuration:
    """Return what was found; collective, the same on every rank.

    strategies: the presets to try. seconds: of timed steps for each candidate; in the end each contender gets three
    times that. most_steps: that the tuner may take.
    """
    show("steps without communication")
    profile, stock = Profile(subject), Trainee(STOCK, subject)
    stock.turn(_WARM_UP, counts=False)
    compute_ms = 1000 * median(profile.turn(3 * _WARM_UP, counts=False)[_WARM_UP:])
    tried, best = search(subject, strategies, compute_ms, seconds, show)
    show("tuning")
    choice = tune(subject, allow, most_steps)
    show(f"turns: {choice.name}, {tried[0].name}, stock DDP")
    taken_s = take_turns([profile, stock, best, choice.trainee], _MORE_AT_LAST * seconds)
    compute_ms, stock_ms, best_ms, tuned_ms = (1000 * median(each) for each in taken_s)
    return Configuration(
        model=subject.name,
        parameters=sum(parameter.numel() for parameter in stock.ddp.parameters()),
        batch=subject.batch,
        allow=list(allow),
        compute_ms=compute_ms,
        stock_ms=stock_ms,
        best=tried[0].name,
        best_ms=best_ms,
        tuned=choice.name,
        tuned_ms=tuned_ms,
        steps=choice.steps,
        candidates_ms={each.name: each.step_ms for each in tried},
        explanation=choice.explanation,
    )


def take_turns(contenders: Sequence[Profile | Trainee], seconds: float) -> list[list[float]]:
    """Return what each contender's steps took, in seconds; collective. The first of every turn does not count.

    Every other round goes the other way: who comes after whom makes a difference of a percent or two. seconds: of timed
    steps, about, for the slowest contender.
    """
    usual_s = [contender.turn(2, counts=False)[-1] for contender in contenders]
    counts = [max(_FEWEST, min(_MOST, round(seconds / _FEWEST_TURNS / step_s))) for step_s in usual_s]
    longest_s = max(count * step_s for count, step_s in zip(counts, usual_s, strict=True))
    taken_s: list[list[float]] = [[] for _ in contenders]
    places = list(range(len(contenders)))
    for _ in range(max(_FEWEST_TURNS, min(_MOST_TURNS, round(seconds / longest_s)))):
        for place in places:
            taken_s[place] += contenders[place].turn(1 + counts[place], counts=False)[1:]
        places.reverse()
    return taken_s
