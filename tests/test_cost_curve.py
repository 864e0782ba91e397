# SPDX-License-Identifier: Apache-2.0
"""Fitted curves: they find the law behind noisy points, never fall, and say when they are asked too much."""

from __future__ import annotations

import random
from math import inf, isnan

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commopt.cost import Curve, LineSegment
from commopt.errors import ConfigurationError

SIZES = [2**power for power in range(10, 29)]
PROTOCOLS = Curve((LineSegment(0, 30, 1e-4), LineSegment(2**15, 60, 3e-4), LineSegment(2**22, 700, 1.5e-4)))


def measured(law: Curve, noise: float, seed: int) -> list[tuple[float, float]]:
    rng = random.Random(seed)
    return [(nbytes, law.time_us(nbytes) * rng.uniform(1 - noise, 1 + noise)) for nbytes in SIZES]


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_three_protocols_are_found(noise: float) -> None:
    fitted = Curve.fit(measured(PROTOCOLS, noise, 1))
    if noise == 0:
        assert [segment.from_nbytes for segment in fitted.segments] == [0, 2**15, 2**22]
    for nbytes in (1500, 10_000, 50_000, 10**6, 5 * 10**6, 10**8):
        assert fitted.time_us(nbytes) == pytest.approx(PROTOCOLS.time_us(nbytes), rel=3 * noise + 1e-9)
    assert fitted.mape <= noise + 1e-9
    assert fitted.r_squared > 0.99


def test_one_law_is_one_segment() -> None:
    law = Curve.linear(25, 2e-4)
    counts = [len(Curve.fit(measured(law, 0.1, seed)).segments) for seed in range(40)]
    assert counts.count(1) >= 30
    fitted = Curve.fit(measured(law, 0.0, 0))
    assert fitted.segments[0].alpha_us == pytest.approx(25)
    assert fitted.segments[0].beta_us_per_byte == pytest.approx(2e-4)
    bent = [(nbytes, law.time_us(nbytes) * (1.002 if nbytes > 2**18 else 0.998)) for nbytes in SIZES]
    assert len(Curve.fit(bent).segments) == 1


@settings(max_examples=30, deadline=None)
@given(
    alpha=st.floats(1, 1e4),
    beta=st.floats(1e-6, 1e-1),
    noise=st.floats(0, 0.2),
    seed=st.integers(0, 99),
    points=st.integers(2, 19),
)
@example(alpha=8743.780161077702, beta=0.005097407883812959, noise=0.0, seed=17, points=17)  # parallel segments
def test_a_line_is_found_within_its_noise(alpha: float, beta: float, noise: float, seed: int, points: int) -> None:
    law = Curve.linear(alpha, beta)
    chosen = random.Random(seed).sample(measured(law, noise, seed), points)
    fitted = Curve.fit(chosen)
    for nbytes, _ in chosen:
        assert fitted.time_us(nbytes) == pytest.approx(law.time_us(nbytes), rel=3 * noise + 1e-6)


@settings(max_examples=60, deadline=None)
@given(
    points=st.dictionaries(st.integers(1, 2**30), st.floats(0.1, 1e6), min_size=2, max_size=12),
    asked=st.lists(st.floats(0, 2**32), min_size=2, max_size=20),
)
def test_more_bytes_never_cost_less(points: dict[int, float], asked: list[float]) -> None:
    curve = Curve.fit(points.items())
    assert 1 <= len(curve.segments) <= 3
    assert curve.time_us(0) == 0
    sizes = sorted([*asked, *(segment.from_nbytes for segment in curve.segments), *points])
    times = [curve.time_us(nbytes) for nbytes in sizes]
    assert times == sorted(times)
    assert min(times) >= 0


def test_four_times_the_largest_is_as_far_as_a_curve_goes() -> None:
    fitted = Curve.fit([(100, 1.0), (1000, 2.0)])
    assert not fitted.extrapolates(4000)
    assert fitted.extrapolates(4001)
    unmeasured = Curve.linear(1, 1)
    assert unmeasured.largest_nbytes == inf
    assert not unmeasured.extrapolates(1e15)
    assert isnan(unmeasured.r_squared)
    assert isnan(unmeasured.mape)


def test_a_curve_that_would_fall_is_level_instead() -> None:
    """As where a library changes to a better algorithm for larger messages."""
    law = [(nbytes, 10 + nbytes * 1e-2 if nbytes < 2**16 else 100 + nbytes * 1e-4) for nbytes in SIZES]
    fitted = Curve.fit(law)
    times = [fitted.time_us(nbytes) for nbytes in range(2**14, 2**19, 2**12)]
    assert times == sorted(times)
    assert fitted.time_us(2**28) == pytest.approx(law[-1][1], rel=0.1)
    assert fitted.time_us(2**11) == pytest.approx(law[1][1], rel=0.1)


def test_a_scaled_curve_keeps_its_errors_and_says_what_it_is() -> None:
    curve = Curve.fit(measured(PROTOCOLS, 0.05, 3))
    twice = curve.scaled(2, 2, "twice as slow")
    assert twice.time_us(10**6) == pytest.approx(2 * curve.time_us(10**6))
    assert twice.mape == pytest.approx(curve.mape)
    assert twice.largest_nbytes == curve.largest_nbytes
    assert twice.note == "twice as slow"


@pytest.mark.parametrize(
    ("points", "complaint"),
    [
        ([(1024, 3.0), (1024, 4.0)], "1 message sizes"),
        ([(0, 1.0), (10, 2.0)], "0 bytes"),
        ([(1, 1.0), (10, float("nan"))], "in nan us"),
        ([(1, 0.0), (10, 2.0)], r"in 0.0 us"),
    ],
)
def test_points_that_make_no_curve(points: list[tuple[float, float]], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        Curve.fit(points)


def test_segments_that_make_no_curve() -> None:
    for segments in (
        (),
        (LineSegment(5, 1, 1),),
        (LineSegment(0, 1, 1), LineSegment(0, 1, 1)),
        (LineSegment(0, -1, 1),),
        (LineSegment(0, 1, inf),),
    ):
        with pytest.raises(ConfigurationError):
            Curve(segments)
    with pytest.raises(ConfigurationError, match="by increasing bytes, each size once"):
        Curve((LineSegment(0, 1, 1),), ((2048, 1.0), (1024, 1.0)))


def test_of_several_times_of_a_size_the_median_counts() -> None:
    fitted = Curve.fit([(1000, 20), (1000, 30), (1000, 900), (2000, 40)])
    assert fitted.points == ((1000, 30), (2000, 40))
    assert fitted == Curve.fit([(2000, 40), (1000, 30)])
