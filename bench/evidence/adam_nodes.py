# SPDX-License-Identifier: Apache-2.0
"""What the forms of `adam_forms` are made of: nodes of one process, and where the second moment comes from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from bench.evidence.accumulated_bias import Channel
from bench.evidence.convergence import plan
from commopt import Compressor
from commopt.command_line import Parser
from examples import train_gpt
from examples.train_gpt import GPT, load_corpus, windows_at

NODES = len(plan.RANKS_PER_NODE)
EPS = 1e-8
_HELD_OUT_WINDOWS = 2048  # more than the benchmark's 64: differences are small
_CPU = torch.device("cpu")


class Replica:
    """The GPT, its parameters one vector, matrices first; the batches of all nodes, as the benchmark draws them."""

    def __init__(self, seed: int) -> None:
        parser = Parser()
        train_gpt.add_model_options(parser)
        options = parser.parse_args(plan.GPT.model)
        torch.manual_seed(seed)
        self.model = GPT(options.layers, options.width, options.context)
        parameters = sorted(reversed(list(self.model.parameters())), key=lambda each: each.dim() == 1)
        self.shapes = [tuple(each.shape) for each in parameters]
        self.lengths = [each.numel() for each in parameters]
        self.matrix_numel = sum(each.numel() for each in parameters if each.dim() > 1)
        self.weights = torch.cat([each.detach().flatten() for each in parameters]).requires_grad_()
        self._gradient = torch.zeros_like(self.weights)
        pairs = zip(self.weights.detach().split(self.lengths), self._gradient.split(self.lengths), strict=True)
        for each, (values, gradient) in zip(parameters, pairs, strict=True):
            each.data, each.grad = values.view_as(each), gradient.view_as(each)
        self.context, self._batch = options.context, options.batch
        self._train, self._held_out = load_corpus()
        world = sum(plan.RANKS_PER_NODE)
        self._draws = [torch.Generator().manual_seed(seed * world + rank) for rank in range(world)]

    def gradients(self) -> Tensor:
        """Return every node's gradient on its next batch [nodes, numel]."""
        windows = len(self._train) - self.context
        drawn = [torch.randint(windows, (self._batch,), generator=draw) for draw in self._draws]
        found = []
        for starts in torch.cat(drawn).chunk(NODES):
            tokens, targets = windows_at(self._train, starts, self.context, _CPU)
            self._gradient.zero_()
            cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()).backward()
            found.append(self._gradient.clone())
        return torch.stack(found)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the mean loss, in nats per byte."""
        total = torch.zeros(())
        for starts in torch.linspace(0, len(self._held_out) - self.context - 1, _HELD_OUT_WINDOWS).long().split(512):
            tokens, targets = windows_at(self._held_out, starts, self.context, _CPU)
            total += cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        return float(total / (_HELD_OUT_WINDOWS * self.context))


# ---------------------------------------------------------------------------------------- second moments


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


class Differences(Channel):
    """Sends what values differ by from what was sent before (EF21, arXiv 2106.05203); nothing is owed."""

    def __init__(self, compressor: Compressor, keep: Any, like: Tensor) -> None:
        super().__init__(compressor, None, like)

    def send(self, values: Tensor, step: int) -> Tensor:
        """Return the sum of what was sent."""
        super().send(values - self.total, step)
        return self.total
