# SPDX-License-Identifier: Apache-2.0
"""The strategies that may average: those alike, and for `auto` one strength of each allowed family of compression."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import hypot, isfinite, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Flat, Hierarchical, auto_of, families
from commopt.aggregate.auto import LOCAL
from commopt.aggregate.sums import LinearAggregator
from commopt.compress import Candidates
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.schedule.decision import Outcome
from commopt.schedule.measurement import LEAST_GAIN, Estimate, Measurement
from commopt.schedule.plan import Plan
from commopt.schedule.simulation import INSIDE

if TYPE_CHECKING:
    from commopt.schedule.costs import Costs

Gradients = Sequence[tuple[Layout, Tensor]]

LEAST_SHARE = 0.03  # of the exposed communication that a change must save
# A search compares a few plans, once: a wrong choice between two that are much alike costs little.
_SIGNIFICANT_ERRORS = 2.0


# ---------------------------------------------------------------------------------- which strategies there are


def alternatives(aggregator: Aggregator, team: TeamShape) -> dict[str, Aggregator]:
    """Return the averages a plan may choose from, by their names in plans; the first one needs no plan.

    An exact average stays exact in either form, so plain Hierarchical() may give way to Flat() where that is faster.
    Compression over told sites may give way to what it is where nobody knows them. An aggregator that was asked for in
    one form stays as it is.
    """
    found: tuple[Aggregator, ...] = (aggregator,)
    if auto_of(aggregator) is not None:
        found = (Flat(), Hierarchical()) if team.has_levels else (Flat(),)
    elif aggregator == Hierarchical() and team.has_levels:
        found = (aggregator, Flat())
    elif isinstance(aggregator, Hierarchical) and _compresses_by_site(aggregator, team):
        found = (aggregator, replace(aggregator, sites=False))
    return {repr(each): each for each in found}


def _compresses_by_site(aggregator: Hierarchical, team: TeamShape) -> bool:
    """Return whether told sites change what is sent, and nobody asked for that: factors go level by level over gloo."""
    inter = aggregator.inter
    if team.sites_above == 0 or aggregator != Hierarchical(inter) or isinstance(inter, Hierarchical) or inter.lossless:
        return False
    return not inter.per_node and not (isinstance(inter, LinearAggregator) and _over_gloo(team))


def _over_gloo(team: TeamShape) -> bool:
    return team.backend(team.default_device) == "gloo"


def available(aggregator: Aggregator, team: TeamShape) -> dict[str, Aggregator]:
    """Return all aggregators a plan may name, by that name; the first one needs no plan."""
    lossy = [strength for family in allowed_families(aggregator, team) for strength in family.strengths]
    return alternatives(aggregator, team) | {repr(strength): strength for strength in lossy}


def allowed_families(aggregator: Aggregator, team: TeamShape) -> tuple[Candidates[Aggregator], ...]:
    """Return the families `auto` is allowed, without those that cannot run on the team.

    Each is there in its flat form and, where there are two levels, in its hierarchical one. Where sites are levels,
    and nodes have several ranks, the form between all nodes takes the place of the flat one.
    """
    auto = auto_of(aggregator)
    if auto is None:
        return ()
    forms: dict[str, Callable[[Aggregator], Aggregator]] = {"": lambda aggregator: aggregator}
    if team.sites_above and max(team.ranks_per_node) > 1:
        forms = {"hierarchical without sites ": partial(Hierarchical, sites=False)}
    if team.has_levels:
        forms["hierarchical "] = Hierarchical
    found = (
        replace(
            known, family=prefix + name, strengths=tuple(form(each.with_dense(auto.dense)) for each in known.strengths)
        )
        for name, known in families().items()
        if name in auto.allow
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
    """Return the aggregators of a LocalSGD's messages, gradients and parameters, where `auto` may advise one."""
    auto = auto_of(aggregator)
    if auto is None or LOCAL not in auto.allow or team.node_count == 1:
        return {}
    from commopt.aggregate.learning import LEARNED_LOCAL  # few need it

    return {repr(each): each for each in (INSIDE, *(average.parameters for average in LEARNED_LOCAL))}


# --------------------------------------------------------------------------------------- candidates of a search


@dataclass(frozen=True)
class Candidate:
    """A strategy that may be tried; once it has a plan, also its times in that plan.

    name: in reasons and tables.
    strategy: the repr of the aggregator.
    error: the share of the gradient's L2 norm that one encoding leaves out.
    lossy: whether it must be clearly faster than the best exact average to be chosen.
    steps: to a loss, over those of exact averages.
    plan: the messages it is tried with.
    expected_us: the expected time of a step and of its exposed part.
    measured: None while it was not measured.
    """

    name: str
    strategy: str
    error: float = 0.0
    lossy: bool = False
    steps: float = 1.0
    plan: Plan | None = None
    expected_us: tuple[float, float] | None = None
    measured: Measurement | None = None

    @property
    def planned(self) -> Plan:
        """The plan of a candidate that has one."""
        assert self.plan is not None
        return self.plan

    @property
    def result(self) -> Measurement:
        """The measurement of a candidate that has one."""
        assert self.measured is not None
        return self.measured

    @property
    def to_loss(self) -> Estimate:
        """The time of a step, times the steps to a loss over those of exact averages."""
        step = self.result.step
        return Estimate(self.steps * step.value, self.steps * step.error)

    @property
    def words(self) -> str:
        """The measured times, for a reason."""
        return f"{self.name} takes {'nothing' if self.measured is None else self.measured}"

    def __str__(self) -> str:
        return f"{self.name}, {len(self.planned.groups)} messages"

    def outcome(self, base: Measurement, costs: Costs) -> Outcome:
        """Return its times as data. base: a measurement to predict from, where nothing was expected yet."""
        expected_us = self.expected_us or base.expected_of(self.planned, costs)
        outcome = Outcome(self.name, self.planned.strategy, self.error, *expected_us, steps=self.steps)
        if self.measured is None:
            return outcome
        return replace(outcome, step_us=self.measured.step.value, exposed_us=self.measured.exposed.value)


def one_of_each(
    allowed: Sequence[Candidates[Aggregator]], gradients: Gradients, optimizer: str, team: TeamShape
) -> list[Candidate]:
    """Return one candidate of each family: the strength that `strength_of` names for the optimizer and the team.

    A strength that encodes some gradient to no number is left out. Raises FloatingPointError when a gradient is not
    finite, or all are zero: such a step tells nothing, measure another one.

    gradients: flat buffers with their layouts.
    """
    from commopt.aggregate.learning import strength_of  # only `auto` needs it

    square = sum(float(torch.linalg.vector_norm(buffer, dtype=torch.float64)) ** 2 for _, buffer in gradients)
    if not isfinite(square) or square == 0:
        what = "all gradients are zero" if square == 0 else "a gradient is not finite"
        raise FloatingPointError(f"{what}; measure another step")
    found = []
    for family in allowed:
        place, steps = strength_of(family.strengths, family.usual, optimizer, team)
        strength = family.strengths[place]
        error = sqrt(sum(strength.squared_error(layout, buffer) for layout, buffer in gradients) / square)
        if isfinite(error):
            found.append(Candidate(family.family, repr(strength), error, lossy=True, steps=steps))
    return found


def pays(before: Candidate, after: Candidate, errors: float = _SIGNIFICANT_ERRORS) -> bool:
    """Return whether the time to a loss and exposed communication both fell by enough, and by more than noise explains.

    errors: how many standard errors noise is taken to explain.
    """

    def fell(then: Estimate, now: Estimate, share: float) -> bool:
        return then.value - now.value > max(share * then.value, errors * hypot(then.error, now.error))

    exposed = fell(before.result.exposed, after.result.exposed, LEAST_SHARE)
    return exposed and fell(before.to_loss, after.to_loss, LEAST_GAIN)


def choose(tried: Sequence[Candidate]) -> Candidate:
    """Return the candidate to use: the first of `tried`, unless another one pays.

    A lossy one is chosen only if it pays against the best exact one.
    """
    chosen = tried[0]
    for lossy in (False, True):
        alike = [each for each in tried if each.measured is not None and each.lossy == lossy]
        if alike and not lossy:
            chosen = alike[0]
        chosen = min(
            (each for each in alike if pays(chosen, each)), key=lambda each: each.to_loss.value, default=chosen
        )
    return chosen
