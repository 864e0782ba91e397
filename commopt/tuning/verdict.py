"""Which of the ways that were tried is used."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot

from commopt.plan import Estimate, Measured
from commopt.plan.evidence import LEAST_GAIN
from commopt.tuning.ways import Way

LEAST_SHARE = 0.03  # of the exposed communication that a change must save
# What is compared is a few ways, once: a wrong choice between two that are much alike costs little.
_SIGNIFICANT_ERRORS = 2.0


def pays(before: Measured, after: Measured, errors: float = _SIGNIFICANT_ERRORS) -> bool:
    """Return whether a step, and its exposed communication, fell by enough, and by more than noise explains.

    errors: how many standard errors noise is taken to explain.
    """
    exposed = _fell(before.exposed, after.exposed, LEAST_SHARE, errors)
    return exposed and _fell(before.step, after.step, LEAST_GAIN, errors)


def _fell(before: Estimate, after: Estimate, share: float, errors: float) -> bool:
    noise_us = errors * hypot(before.error, after.error)
    return before.value - after.value > max(share * before.value, noise_us)


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
    return min(worthwhile, key=lambda way: way.step_us, default=start)
