"""Waiting for the slowest: closed forms for two ranks, and draws."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist, fmean

import numpy as np
import pytest

from commopt.errors import ConfigurationError
from commopt.simulate import Stragglers


def test_one_rank_takes_its_mean() -> None:
    assert fmean(Stragglers(0.05).slowest(1)) == pytest.approx(1.0, abs=2e-4)


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.2])
def test_the_slower_of_two_takes_what_the_closed_form_says(sigma: float) -> None:
    """E max(X, Y) of two independent lognormals of mean 1 is 2 Phi(sigma / sqrt 2)."""
    expected = 2 * NormalDist().cdf(sigma / sqrt(2))
    assert fmean(Stragglers(sigma).slowest(2)) - 1 == pytest.approx(expected - 1, rel=0.02)


@pytest.mark.parametrize("ranks", [8, 4096])
def test_the_slowest_of_many_is_that_of_draws(ranks: int) -> None:
    sigma, steps = 0.03, 4000
    draws = np.random.default_rng(0).standard_normal((steps, ranks))
    slowest = np.exp(sigma * draws.max(axis=1) - sigma**2 / 2)
    found = Stragglers(sigma).slowest(ranks)
    assert fmean(found) - 1 == pytest.approx(slowest.mean() - 1, rel=0.02)
    assert found[len(found) // 2] == pytest.approx(float(np.median(slowest)), rel=0.002)
    assert list(found) == sorted(found)


def test_without_spread_nobody_waits() -> None:
    assert Stragglers(0.0).slowest(4096) == (1.0,)


@pytest.mark.parametrize("sigma", [-0.1, 1.5, float("nan"), float("inf")])
def test_sigma_is_checked(sigma: float) -> None:
    with pytest.raises(ConfigurationError, match=r"between 0 and 1, for example 0\.02"):
        Stragglers(sigma)
