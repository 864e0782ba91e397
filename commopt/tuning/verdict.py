"""Which of the ways that were tried is used."""

from __future__ import annotations

from collections.abc import Sequence

from commopt.plan import Measured
from commopt.plan.evidence import LEAST_GAIN
from commopt.tuning.ways import Way

LEAST_SHARE = 0.03  # of the exposed communication that a change must save


def pays(before: Measured, after: Measured) -> bool:
    """Return whether a step, and its exposed communication, fell by enough, and by more than noise explains."""
    exposed = before.exposed.exceeds(after.exposed, LEAST_SHARE * before.exposed.value)
    return exposed and before.step.exceeds(after.step, LEAST_GAIN * before.step.value)


def choose(tried: Sequence[Way]) -> Way:
    """Return the way to go: the first of `tried`, unless another one pays.

    All must have been measured. What loses something is chosen only where it pays against the best that loses nothing.
    """
    exact = [way for way in tried if way.exact]
    best = _best(exact[0], exact) if exact else tried[0]
    return _best(best, [way for way in tried if not way.exact])


def _best(start: Way, others: Sequence[Way]) -> Way:
    assert start.measured is not None
    worthwhile = [way for way in others if way.measured is not None and pays(start.measured, way.measured)]
    return min(worthwhile, key=_step_us, default=start)


def _step_us(way: Way) -> float:
    assert way.measured is not None
    return way.measured.step.value
