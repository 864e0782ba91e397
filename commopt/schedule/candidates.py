# SPDX-License-Identifier: Apache-2.0
"""What `auto` may choose from: the exact averages, and every allowed compression at one strength."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Flat, Hierarchical, LocalSGD, auto_of, families
from commopt.aggregate.auto import LOCAL
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.schedule.decision import Option

Gradients = Sequence[tuple[Layout, Tensor]]

INSIDE = LocalSGD()
"""Stands for what any LocalSGD does with gradients."""


@dataclass(frozen=True)
class Family:
    """One kind of compression in one form, at several strengths, the weakest first; `usual`: the default one."""

    name: str
    strengths: tuple[Aggregator, ...]
    usual: int


def exact(aggregator: Aggregator, team: TeamShape) -> dict[str, Aggregator]:
    """Return the exact averages a plan may choose from, by the name they have in plans: the first does without a plan.

    An exact average stays one whichever form it takes, so plain Hierarchical() may give way to Flat() where that is
    faster. What rounds, or was asked for in one form, stays as it is.
    """
    found: tuple[Aggregator, ...] = (aggregator,)
    if auto_of(aggregator) is not None:
        found = (Flat(),) if team.intra is None else (Flat(), Hierarchical())
    elif aggregator == Hierarchical() and team.intra is not None:
        found = (aggregator, Flat())
    return {repr(each): each for each in found}


def available(aggregator: Aggregator, team: TeamShape) -> dict[str, Aggregator]:
    """Return all that may average, by the name it has in plans; the first is what does without a plan."""
    lossy = [strength for family in allowed_families(aggregator, team) for strength in family.strengths]
    return exact(aggregator, team) | {repr(strength): strength for strength in lossy}


def allowed_families(aggregator: Aggregator, team: TeamShape) -> tuple[Family, ...]:
    """Return what `auto` is allowed beside the exact averages, flat and, where there are two levels, hierarchical.

    What cannot run on the team is left out.
    """
    auto = auto_of(aggregator)
    if auto is None:
        return ()
    forms: dict[str, Callable[[Aggregator], Aggregator]] = {"": lambda aggregator: aggregator}
    if team.intra is not None:
        forms["hierarchical "] = Hierarchical
    found = (
        Family(prefix + kind, tuple(form(each.with_dense(auto.dense)) for each in trials.strengths), trials.usual)
        for kind, trials in families().items()
        if kind in auto.allow
        for prefix, form in forms.items()
    )
    return tuple(family for family in found if all(_runs(each, team) for each in family.strengths))


def _runs(aggregator: Aggregator, team: TeamShape) -> bool:
    try:
        aggregator.check(team)
    except ConfigurationError:
        return False
    return True


def local_messages(aggregator: Aggregator, team: TeamShape) -> dict[str, Aggregator]:
    """Return what the messages of a LocalSGD are averaged by, gradients and parameters, where `auto` may tell of it."""
    auto = auto_of(aggregator)
    if auto is None or LOCAL not in auto.allow or team.node_count == 1:
        return {}
    from commopt.schedule.learning import LEARNED_LOCAL  # few need it

    return {repr(each): each for each in (INSIDE, *(average.parameters for average in LEARNED_LOCAL))}


def candidates(families: Sequence[Family], gradients: Gradients, optimizer: str) -> list[Option]:
    """Return of each family the strength that `strength_of` names for the optimizer.

    gradients: flat buffers, with what lies where. Raises FloatingPointError when a gradient is not finite, or all are
    zero: such a step tells nothing, measure another one.
    """
    from commopt.schedule.learning import strength_of  # only `auto` does

    square = sum(float(torch.linalg.vector_norm(buffer, dtype=torch.float64)) ** 2 for _, buffer in gradients)
    if not isfinite(square) or square == 0:
        what = "all gradients are zero" if square == 0 else "a gradient is not finite"
        raise FloatingPointError(f"{what}; measure another step")

    def error(strength: Aggregator) -> float:
        return sqrt(sum(strength.squared_error(layout, buffer) for layout, buffer in gradients) / square)

    found = []
    for family in families:
        place, steps = strength_of(family.strengths, family.usual, optimizer)
        strength = family.strengths[place]
        left_out = error(strength)
        if isfinite(left_out):  # what encodes some gradient to no number is no candidate
            found.append(Option(family.name, repr(strength), left_out, True, steps))
    return found
