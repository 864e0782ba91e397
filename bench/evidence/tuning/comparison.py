# SPDX-License-Identifier: Apache-2.0
"""One model on one cluster: every candidate, the tuner's choice, and both in turns with stock DDP."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from bench.evidence.models import Subject
from bench.evidence.training_run import STOCK, Profile, TrainingRun
from bench.evidence.tuning.report import Configuration

_AT_ONCE = 3  # steps between two looks, so that asking each other is no part of most


@dataclass(frozen=True)
class Choice:
    """A model whose tuner has chosen, or has not within the limit (`name` is "" then); `steps` it was given."""

    training: TrainingRun
    name: str
    steps: int
    explanation: str


def tune(subject: Subject, allow: Sequence[str], most_steps: int) -> Choice:
    """Train with "auto" until all ranks know what it chose, or for `most_steps`; collective."""
    training = TrainingRun("auto", subject, {"allow": tuple(allow)})
    state = training.state
    assert state is not None  # it is no stock DDP
    steps = 0
    while not _on_all_ranks(state.tuned is not None) and steps < most_steps:
        at_once = min(_AT_ONCE, most_steps - steps)
        training.turn(at_once, counts=False)
        steps += at_once
    return Choice(training, "" if state.tuned is None else state.tuned.name, steps, state.explain())


def _on_all_ranks(value: bool) -> bool:
    agreed = torch.tensor(int(value))
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)


_SETTLING = 36  # steps until the planner has measured, planned and corrected itself
_FEWEST_TIMED, _MOST_TIMED = 4, 16


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


def tried(training: TrainingRun, plan: str, warm_up: int, seconds: float) -> Tried:
    """Train for a while, then for about `seconds` with the clock running; collective."""
    taken_s = training.turn(warm_up, counts=False)
    affordable = round(seconds / median(taken_s[1:]))
    training.turn(max(_FEWEST_TIMED, min(_MOST_TIMED, affordable)))
    return Tried(training.strategy, plan, 1000 * median(training.step_s))


def search(
    subject: Subject, strategies: Sequence[str], compute_ms: float, seconds: float, show: Callable[[str], None]
) -> tuple[list[Tried], TrainingRun]:
    """Return all that was tried, the fastest first, and that one still in training; collective.

    compute_ms: a step without communication. Other buckets can hide no more of it than that behind a backward, so a
    candidate that could not be the fastest even then keeps DDP's.
    """
    found: list[Tried] = []
    fastest: list[TrainingRun] = []  # the others make room

    def enter(strategy: str, plan: str, warm_up: int) -> None:
        training = TrainingRun(strategy, subject, {"plan": plan})
        found.append(tried(training, plan, warm_up, seconds))
        if found[-1] == min(found, key=_step_ms):
            fastest[:] = [training]
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

    strategies: the presets to try. seconds: of timed steps for each candidate; in the end each each_run gets three
    times that. most_steps: that the tuner may take.
    """
    show("steps without communication")
    profile, stock = Profile(subject), TrainingRun(STOCK, subject)
    stock.turn(_WARM_UP, counts=False)
    compute_ms = 1000 * median(profile.turn(3 * _WARM_UP, counts=False)[_WARM_UP:])
    tried, best = search(subject, strategies, compute_ms, seconds, show)
    show("tuning")
    choice = tune(subject, allow, most_steps)
    show(f"turns: {choice.name}, {tried[0].name}, stock DDP")
    taken_s = take_turns([profile, stock, best, choice.training], _MORE_AT_LAST * seconds)
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


def take_turns(runs: Sequence[Profile | TrainingRun], seconds: float) -> list[list[float]]:
    """Return what each each_run's steps took, in seconds; collective. The first of every turn does not count.

    Every other round goes the other way: who comes after whom makes a difference of a percent or two. seconds: of timed
    steps, about, for the slowest each_run.
    """
    usual_s = [each_run.turn(2, counts=False)[-1] for each_run in runs]
    counts = [max(_FEWEST, min(_MOST, round(seconds / _FEWEST_TURNS / step_s))) for step_s in usual_s]
    longest_s = max(count * step_s for count, step_s in zip(counts, usual_s, strict=True))
    taken_s: list[list[float]] = [[] for _ in runs]
    places = list(range(len(runs)))
    for _ in range(max(_FEWEST_TURNS, min(_MOST_TURNS, round(seconds / longest_s)))):
        for place in places:
            taken_s[place] += runs[place].turn(1 + counts[place], counts=False)[1:]
        places.reverse()
    return taken_s
