"""Every kernel in the calls that training makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bench.compression import contenders
from bench.kernels import blocks, factors, packing, sparse
from bench.kernels.case import Case
from bench.kernels.family import Family, Setting
from commopt.compress import Blockwise
from commopt.simulate.model_zoo import Model

PEERS = 8
"""Whose rows an owner adds up."""


def families(models: Sequence[Model]) -> Iterator[Family]:
    """Return all cases, with the lists of gradients of `models`."""
    yield from map(packing.of_model, models)
    yield packing.EVEN
    for compressor in contenders():
        if isinstance(compressor, Blockwise):
            yield blocks.of_codec(compressor.codec)
    yield from sparse.families()
    yield factors.BASES
    yield factors.PRODUCTS


def cases(numel: int, device: torch.device, models: Sequence[Model] = ()) -> Iterator[Case]:
    """Yield a case for every kernel and variant, of about `numel` elements of gradient on `device`."""
    setting = Setting(numel, PEERS, device)
    for family in families(models):
        yield from family.build(setting)
