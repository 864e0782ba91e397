# SPDX-License-Identifier: Apache-2.0
"""One residual, and the averages stored like one: Adam's moments, and the parameters that nodes agreed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from commopt.feedback.layout import Layout
from commopt.kernels.residual import round_by_chance

ResidualKind = Literal["worker", "server"]
"""Of the values that this rank sent ("worker"), or of the sum that it encoded for all ("server")."""

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
"""Paths of Adam's moments, below the path of a level's residuals: named as torch names them."""
ANCHOR, MOMENTUM_BUFFER = "anchor", "momentum_buffer"
"""Paths of the parameters that nodes agreed on last, and of their outer momentum, as torch.optim.SGD names it."""
_AVERAGES = (EXP_AVG, EXP_AVG_SQ, ANCHOR, MOMENTUM_BUFFER)


@dataclass(eq=False)
class Residual:
    """One residual, unscaled and in units of the average: the sum over all ranks has not reached the model yet.

    Adam's moments and the parameters that nodes agreed on are stored alike. They are averages: each node has its own
    moments, all nodes have the same parameters.

    path: the level of the aggregator ("", "inter", "inter.inter"), for an average followed by its name.
    values: [layout.numel], float32 or bfloat16.
    spare: memory for the next values while a whole step may yet be dropped, float32 [layout.numel].
    flushing: whether the next step sends it exactly: it is gone when that is committed.
    used_on: the device of the buffer, where `values` are offloaded to host memory; else None.
    """

    path: str
    kind: ResidualKind
    layout: Layout
    values: Tensor
    spare: Tensor | None = None
    flushing: bool = False
    used_on: torch.device | None = None

    def place(self, device: torch.device, dtype: torch.dtype, *, offload: bool) -> None:
        """Let the values be where a buffer on `device` is; with `offload` in host memory its GPU reads by itself."""
        if not offload:
            self.values = self.values.to(device, dtype)
        elif self.used_on != device or self.values.dtype != dtype:
            pinned = device.type == "cuda"
            kept = torch.empty(self.layout.numel, dtype=dtype, device="cpu", pin_memory=pinned)
            self.values, self.used_on = kept.copy_(self.values), device


def is_average(path: str) -> bool:
    """Return whether `path` is that of an average, of moments or parameters: a sum of averages means nothing."""
    return path.rpartition(".")[2] in _AVERAGES


def round_stochastically(values: Tensor, seed: int) -> Tensor:
    """Return float32 `values` as bfloat16, up or down with probabilities that make the mean exact.

    A 16-bit residual then loses nothing over many steps. Equal seeds round alike on equal devices.
    """
    generator = torch.Generator(values.device)
    generator.manual_seed(seed)
    chances = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    round_by_chance(values, chances, rounded)
    return rounded
