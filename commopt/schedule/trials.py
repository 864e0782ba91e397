"""What a search has tried, what is chosen of it, and when compressed gradients have diverged from the exact ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import hypot

from commopt.schedule.decision import Tried
from commopt.schedule.estimate import LEAST_GAIN, Estimate, ms
from commopt.schedule.plan import Plan
from commopt.schedule.prices import Costs
from commopt.schedule.window import GradientQuality, Measured

LEAST_SHARE = 0.03  # of the exposed communication that a change must save
# What is compared is a few plans, once: a wrong choice between two that are much alike costs little.
_SIGNIFICANT_ERRORS = 2.0
_CLEAR = 0.75  # of the step before: what leaves more of it is compared with it twice


@dataclass(frozen=True)
class Option:
    """A strategy to choose from. lossy: whether it is only worth its error where it pays against what is exact."""

    name: str
    strategy: str
    error: float = 0.0
    lossy: bool = False


@dataclass(frozen=True)
class Trial:
    """A plan, what was expected of a step and its exposed part before it was tried, and what it did."""

    name: str
    option: Option
    plan: Plan
    expected: tuple[float, float] | None = None
    measured: Measured | None = None

    @property
    def step_us(self) -> float:
        """What its step took; it must have been measured."""
        assert self.measured is not None
        return self.measured.step.value

    def __str__(self) -> str:
        return f"{self.name}, {len(self.plan.groups)} messages"

    @property
    def words(self) -> str:
        """What it took, for a reason."""
        return f"{self.name} takes {'nothing' if self.measured is None else told_of(self.measured)}"

    def told(self, base: Measured, costs: Costs) -> Tried:
        """Return what is known of it as data."""
        expected = self.expected or base.expected_of(self.plan, costs)
        tried = Tried(self.name, self.plan.strategy, self.option.error, *expected)
        if self.measured is None:
            return tried
        return replace(tried, step_us=self.measured.step.value, exposed_us=self.measured.exposed.value)


@dataclass
class Round:
    """One search: what it is for, what ran before, and what has been tried since. tried[0] is what ran before."""

    why: str
    tried: list[Trial]
    abandoned: list[Trial] = field(default_factory=list)
    confirmed: bool = False

    @property
    def before(self) -> Trial:
        """What ran before."""
        return self.tried[0]

    @property
    def base(self) -> Measured:
        """What everything is compared with."""
        assert self.before.measured is not None
        return self.before.measured

    @property
    def trials(self) -> int:
        """How many trials are over."""
        return len(self.tried) - 1 + len(self.abandoned)

    @property
    def fastest(self) -> Trial:
        """What took the least time, whatever noise may explain."""
        return min(self.tried, key=lambda trial: trial.step_us)

    def knows(self, plan: Plan) -> bool:
        """Return whether a plan has been tried."""
        return any(trial.plan.contents == plan.contents for trial in [*self.tried, *self.abandoned])

    def to_confirm(self) -> Trial | None:
        """Return what ran before, once, where what would be chosen gains little."""
        best = self.fastest
        if self.confirmed or best.measured is None or not pays(self.base, best.measured, errors=0):
            return None
        if best.step_us <= _CLEAR * self.base.step.value:
            return None
        self.confirmed = True
        return self.before

    def end_trial(self, trial: Trial, measured: Measured | None) -> None:
        """Take note of what a trial showed; None: nothing."""
        if trial in self.tried:  # what ran before, once more
            if measured is not None and trial.measured is not None:
                self.tried[self.tried.index(trial)] = replace(trial, measured=measured.pooled(trial.measured))
        elif measured is None:
            self.abandoned.append(trial)
        else:
            self.tried.append(replace(trial, measured=measured))


def pays(before: Measured, after: Measured, errors: float = _SIGNIFICANT_ERRORS) -> bool:
    """Return whether a step, and its exposed communication, fell by enough, and by more than noise explains.

    errors: how many standard errors noise is taken to explain.
    """

    def fell(then: Estimate, now: Estimate, share: float) -> bool:
        return then.value - now.value > max(share * then.value, errors * hypot(then.error, now.error))

    return fell(before.exposed, after.exposed, LEAST_SHARE) and fell(before.step, after.step, LEAST_GAIN)


def choose(tried: Sequence[Trial]) -> Trial:
    """Return the plan to follow: the first of `tried`, unless another one pays.

    What loses something is chosen only where it pays against the best that loses nothing.
    """

    def best(start: Trial, others: Sequence[Trial]) -> Trial:
        assert start.measured is not None
        worthwhile = [each for each in others if each.measured is not None and pays(start.measured, each.measured)]
        return min(worthwhile, key=lambda trial: trial.step_us, default=start)

    exact = [trial for trial in tried if not trial.option.lossy]
    return best(best(exact[0], exact) if exact else tried[0], [trial for trial in tried if trial.option.lossy])


class Divergence:
    """Compares the quality of compressed gradients with what it was when the present way of averaging was new."""

    _LEAST_COSINE_SHARE = 0.5  # of what it was
    _MOST_GROWTH = 4.0  # of what is kept for later, which stays bounded while error feedback works

    def __init__(self) -> None:
        self._first: GradientQuality | None = None

    def seen(self, now: GradientQuality | None) -> str:
        """Say what got worse than it may, or nothing."""
        if now is None or self._first is None:
            self._first = self._first or now
            return ""
        if self._first.cosine is None:
            self._first = replace(self._first, cosine=now.cosine)
        then = self._first
        if now.cosine is not None and then.cosine is not None and now.cosine < self._LEAST_COSINE_SHARE * then.cosine:
            return f"the cosine of updates to the dense mean fell from {then.cosine:.2f} to {now.cosine:.2f}"
        if now.residual_norm > self._MOST_GROWTH * then.residual_norm > 0:
            return f"the residuals' norm grew from {then.residual_norm:.3g} to {now.residual_norm:.3g}"
        return ""


def told_of(measured: Measured) -> str:
    """Say what a step took."""
    return f"{ms(measured.step.value)}, {ms(measured.exposed.value)} of it exposed"
