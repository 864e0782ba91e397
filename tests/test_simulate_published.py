"""Published figures: the arithmetic of the comparison, and those that have enough inputs to be reproduced."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from commopt.simulate import gpu, model, of_model
from commopt.simulate.published import CLAIMS, Claim, Reproduction, at_rate

HOROVOD = [claim for claim in CLAIMS if claim.source.startswith("Horovod")]


@pytest.mark.parametrize("claim", HOROVOD, ids=lambda claim: claim.source)
def test_horovods_figures_are_reproduced(claim: Claim) -> None:
    """Its source gives model, batch, GPUs and network; what one GPU does alone is published as well."""
    found = claim.simulate()
    low, _ = claim.published
    assert found.simulated == pytest.approx(low, rel=0.1)
    assert found.verdict == "reproduced"


def test_a_gain_is_of_the_step_against_the_other_strategy() -> None:
    claim = next(claim for claim in CLAIMS if claim.against and claim.setup.model == "resnet50")
    with_it, without = claim.setup.row(claim.strategy), claim.setup.row(claim.against)
    assert claim.simulate().simulated == pytest.approx(with_it.samples_per_s / without.samples_per_s - 1)


@pytest.mark.parametrize(
    ("published", "simulated", "verdict"),
    [
        ((0.5, 0.5), 0.5, "reproduced"),
        ((0.5, 0.5), 0.44, "lower"),
        ((0.5, 0.5), 0.56, "higher"),
        ((0.2, 0.8), 0.5, "reproduced"),
        ((0.8, inf), 0.95, "consistent"),
        ((0.8, inf), 0.7, "lower"),
    ],
)
def test_verdicts(published: tuple[float, float], simulated: float, verdict: str) -> None:
    assert Reproduction(replace(CLAIMS[0], published=published), simulated).verdict == verdict


def test_computation_takes_what_one_gpu_was_measured_to() -> None:
    job = at_rate(of_model(model("vgg16"), gpu("p100"), 64, "fp32"), 154)
    assert job.compute_us == pytest.approx(64 / 154 * 1e6)
    assert job.samples == 64
    assert 0 < job.optimizer_us < job.units[0].ready_us
    plain = of_model(model("vgg16"), gpu("p100"), 64, "fp32")
    assert job.optimizer_us / job.compute_us == pytest.approx(plain.optimizer_us / plain.compute_us)
    shares = [unit.ready_us / job.compute_us for unit in job.units]
    assert shares == pytest.approx([unit.ready_us / plain.compute_us for unit in plain.units])


def test_what_is_not_reproduced_is_explained() -> None:
    """Claims whose figure differs here carry a remark; the others need none."""
    small = [claim for claim in CLAIMS if claim.setup.nodes <= 32]
    for claim in small:
        assert bool(claim.remark) == (claim.simulate().verdict != "reproduced"), claim.source
