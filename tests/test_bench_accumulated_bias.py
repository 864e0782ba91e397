# SPDX-License-Identifier: Apache-2.0
"""What compression loses for good, and the images that gradients are made of elsewhere."""

from __future__ import annotations

import pytest
import torch

import commopt
from bench.evidence import resnet18
from bench.evidence.accumulated_bias import RESIDUALS, Channel
from commopt import OneBit, Quantize


def test_images_are_of_their_class() -> None:
    known = resnet18.textures()
    images, labels = resnet18.draw_images(known, 64, torch.Generator().manual_seed(1))
    again, _ = resnet18.draw_images(known, 64, torch.Generator().manual_seed(1))
    assert torch.equal(images, again)
    # A shift around the edges leaves the size of a texture's frequencies as they are, and noise adds the same to all.
    spectra, those = (torch.fft.rfft2(each).abs().flatten(1) for each in (known, images))
    spectra = spectra - spectra.mean(0)
    right = (those @ spectra.T).argmax(1) == labels
    assert right.float().mean() > 0.5  # of ten classes


@pytest.mark.parametrize("compressor", [Quantize(2), OneBit()])
def test_with_a_residual_only_the_last_one_is_missing(compressor: commopt.Compressor) -> None:
    draws = torch.Generator().manual_seed(0)
    gradients = [0.1 + torch.randn(2000, generator=draws) ** 3 for _ in range(60)]
    total, lost = torch.stack(gradients).sum(0), {}
    for name, keep in RESIDUALS.items():
        channel = Channel(compressor, keep, gradients[0])
        for step, values in enumerate(gradients):
            channel.send(values, step)
        missing = total - channel.total
        lost[name] = float(missing.norm())
        if name == "float32":
            assert float((missing - channel.residual).norm()) < 1e-5 * float(total.norm())
    assert lost["float32"] < 0.5 * lost["no residual"]
    assert lost["bfloat16, stochastic"] < 1.1 * lost["float32"]
