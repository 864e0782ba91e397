# SPDX-License-Identifier: Apache-2.0
"""What a search has tried, and what is chosen of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot

from commopt.schedule.decision import Option, Tried
from commopt.schedule.estimate import LEAST_GAIN, Estimate
from commopt.schedule.plan import Plan
from commopt.schedule.prices import Costs
from commopt.schedule.window import Window

LEAST_SHARE = 0.03  # of the exposed communication that a change must save
# What is compared is a few plans, once: a wrong choice between two that are much alike costs little.
_SIGNIFICANT_ERRORS = 2.0
_CLEAR = 0.75  # of the step before: what leaves more of it is compared with it twice


@dataclass(frozen=True)
class Trial:
    """A plan, what was expected of a step and its exposed part before it was tried, and what it did; None: unknown."""

    name: str
    option: Option
    plan: Plan
    expected: tuple[float, float] | None = None
    measured: Window | None = None

    def __str__(self) -> str:
        return f"{self.name}, {len(self.plan.groups)} messages"

    @property
    def did(self) -> Window:
        """What was measured, of one that was."""
        assert self.measured is not None
        return self.measured

    @property
    def to_loss(self) -> Estimate:
        """The time of a step, times the steps to a loss over those of exact averages."""
        step, steps = self.did.step, self.option.steps
        return Estimate(steps * step.value, steps * step.error)

    @property
    def words(self) -> str:
        """What it took, for a reason."""
        return f"{self.name} takes {'nothing' if self.measured is None else self.measured}"

    def told(self, base: Window, costs: Costs) -> Tried:
        """Return what is known of it as data."""
        expected = self.expected or base.expected_of(self.plan, costs)
        tried = Tried(self.name, self.plan.strategy, self.option.error, *expected, steps=self.option.steps)
        if self.measured is None:
            return tried
        return replace(tried, step_us=self.measured.step.value, exposed_us=self.measured.exposed.value)


class Round:
    """One search: what it is for, what ran before, and what has been tried since. tried[0] is what ran before.

    running: what is on trial.
    """

    def __init__(self, why: str, before: Trial, base: Window) -> None:
        self.why = why
        self.before = before
        self.base = base
        self.running = before
        self.tried = [before]
        self._confirmed = False

    @property
    def fastest(self) -> Trial:
        """What takes the least time to a loss, whatever noise may explain."""
        return min((each for each in self.tried if each.measured is not None), key=_to_loss_us)

    def knows(self, plan: Plan) -> bool:
        """Return whether a plan has been tried."""
        return any(trial.plan.contents == plan.contents for trial in self.tried)

    def to_confirm(self) -> Trial | None:
        """Return what ran before, once, where what would be chosen gains little."""
        best, clear_us = self.fastest, _CLEAR * self.base.step.value
        if self._confirmed or not pays(self.before, best, errors=0) or best.did.step.value <= clear_us:
            return None
        self._confirmed = True
        return self.before

    def end_trial(self, window: Window | None) -> None:
        """Take note of what was measured; None: nothing."""
        if self.running is not self.before:
            self.tried.append(replace(self.running, measured=window))
        elif window is not None:  # what ran before, once more
            self.base = replace(window, earlier=self.base)
            self.before = self.tried[0] = replace(self.before, measured=self.base)


def pays(before: Trial, after: Trial, errors: float = _SIGNIFICANT_ERRORS) -> bool:
    """Return whether the time to a loss, and exposed communication, fell by enough, and by more than noise explains.

    errors: how many standard errors noise is taken to explain.
    """

    def fell(then: Estimate, now: Estimate, share: float) -> bool:
        return then.value - now.value > max(share * then.value, errors * hypot(then.error, now.error))

    exposed = fell(before.did.exposed, after.did.exposed, LEAST_SHARE)
    return exposed and fell(before.to_loss, after.to_loss, LEAST_GAIN)


def choose(tried: Sequence[Trial]) -> Trial:
    """Return the plan to follow: the first of `tried`, unless another one pays.

    What loses something is chosen only where it pays against the best that loses nothing.
    """

    chosen = tried[0]
    for lossy in (False, True):
        alike = [each for each in tried if each.measured is not None and each.option.lossy == lossy]
        if alike and not lossy:
            chosen = alike[0]
        chosen = min((each for each in alike if pays(chosen, each)), key=_to_loss_us, default=chosen)
    return chosen


def _to_loss_us(trial: Trial) -> float:
    return trial.to_loss.value
