# SPDX-License-Identifier: Apache-2.0
"""Published figures: the arithmetic of the comparison, and those that have enough inputs to be reproduced."""

from __future__ import annotations

import pytest

from bench.evidence.scaling.published import CLAIMS, Claim, at_rate
from commopt.simulate import gpu, model, of_model


@pytest.mark.parametrize("claim", [each for each in CLAIMS if each.setup.nodes <= 128], ids=lambda claim: claim.source)
def test_horovods_figures_are_reproduced_and_what_is_not_is_explained(claim: Claim) -> None:
    """Horovod gives model, batch, GPUs and network; what one GPU does alone is published as well."""
    verdict = claim.verdict(claim.simulated())
    assert bool(claim.remark) == (verdict != "reproduced")
    assert verdict == "reproduced" or not claim.source.startswith(("Horovod", "NVIDIA"))


def test_computation_takes_what_one_gpu_was_measured_to() -> None:
    job = at_rate(of_model(model("vgg16"), gpu("p100"), 64, "fp32"), 154)
    assert job.compute_us == pytest.approx(64 / 154 * 1e6)
    assert job.samples == 64
    assert 0 < job.optimizer_us < job.units[0].ready_us
    plain = of_model(model("vgg16"), gpu("p100"), 64, "fp32")
    assert job.optimizer_us / job.compute_us == pytest.approx(plain.optimizer_us / plain.compute_us)
    shares = [unit.ready_us / job.compute_us for unit in job.units]
    assert shares == pytest.approx([unit.ready_us / plain.compute_us for unit in plain.units])
