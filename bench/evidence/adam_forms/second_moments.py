# SPDX-License-Identifier: Apache-2.0
"""What directions are divided by the root of: what nodes know of v, and tell each other, in every form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench.evidence.adam_forms.replica import NODES, Replica


class Own:
    """v of each node's own gradients."""

    def __init__(self, replica: Replica, b2: float) -> None:
        self.replica, self.b2 = replica, b2
        self.v = torch.zeros(NODES, sum(replica.lengths))

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        """Return v, its bias corrected, of every node [nodes, numel], or of all [numel]."""
        self.v.lerp_(gradients.square(), 1 - self.b2)
        self.exchange(step)
        return self.v / (1 - self.b2 ** (step + 1))

    def exchange(self, step: int) -> None:
        """Do what nodes tell each other of v."""

    def see(self, mean_momentum: Tensor, gradients: Tensor) -> None:
        """Take note of the mean momentum that was decoded."""

    @property
    def floats(self) -> float:
        """How many float32 an average step adds to what is sent."""
        return 0.0


class Shared(Own):
    """v of each node, averaged exactly in every so many steps."""

    def __init__(self, every: int, replica: Replica, b2: float) -> None:
        super().__init__(replica, b2)
        self.every = every

    def exchange(self, step: int) -> None:
        if (step + 1) % self.every == 0:
            self.v[:] = self.v.mean(0)

    @property
    def floats(self) -> float:
        return self.v.shape[1] / self.every


class Blocks(Shared):
    """v of each node, so scaled that its sum over a block is the nodes' mean; blocks are of so many elements."""

    def __init__(self, block: int, every: int, replica: Replica, b2: float) -> None:
        super().__init__(every, replica, b2)
        self.block = block

    def exchange(self, step: int) -> None:
        if (step + 1) % self.every:
            return
        numel = self.v.shape[1]
        blocks = pad(self.v, (0, -numel % self.block)).view(NODES, -1, self.block)
        sums = blocks.sum(2, keepdim=True)
        scaled = blocks * torch.where(sums > 0, sums.mean(0) / sums, 1.0)
        self.v.copy_(scaled.flatten(1)[:, :numel])

    @property
    def floats(self) -> float:
        return super().floats / self.block


class Factored(Own):
    """v of all nodes from exact means over rows and columns of the nodes' squares (arXiv 1804.04235, section 3)."""

    def exchange(self, step: int) -> None:
        self.v[:] = self.v.mean(0)  # what rows and columns are means of: factoring comes behind, as all of it is linear

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        corrected = super().follow(gradients, step)[0]
        for part, shape in zip(corrected.split(self.replica.lengths), self.replica.shapes, strict=True):
            if len(shape) > 1:
                matrix = part.view(shape)
                rows, columns = matrix.mean(1), matrix.mean(0)
                torch.outer(rows, columns / rows.mean().clamp_min(1e-30), out=matrix)
        return corrected

    @property
    def floats(self) -> float:
        return float(sum(sum(shape) for shape in self.replica.shapes))


class Exact(Own):
    """The oracle: v of the nodes' mean gradient, as AdamW has it where nothing is compressed."""

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        return super().follow(gradients.mean(0, keepdim=True), step)[0]


class Frozen(Exact):
    """The oracle of so many steps, then no more (1-bit Adam, arXiv 2102.02888, section 4)."""

    def __init__(self, start_step: int, replica: Replica, b2: float) -> None:
        super().__init__(replica, b2)
        self.start_step, self._last = start_step, self.v[0]

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        if step < self.start_step:
            self._last = super().follow(gradients, step)
        return self._last


class Decoded(Own):
    """v of all nodes, of the momentum they decode; one exact number of each tensor says how large the squares are."""

    def follow(self, gradients: Tensor, step: int) -> Tensor:
        if step == 0:
            self.v += (1 - self.b2) * gradients.square().mean(0)  # a dense exchange
        return self.v[0] / (1 - self.b2 ** max(step, 1))

    def see(self, mean_momentum: Tensor, gradients: Tensor) -> None:
        squares = zip(
            mean_momentum.square().split(self.replica.lengths),
            gradients.square().mean(0).split(self.replica.lengths),
            strict=True,
        )
        self.v.lerp_(
            torch.cat([seen * (own.sum() / seen.sum().clamp_min(1e-30)) for seen, own in squares]), 1 - self.b2
        )

    @property
    def floats(self) -> float:
        return float(len(self.replica.lengths))
