# SPDX-License-Identifier: Apache-2.0
"""The GPT of the convergence benchmark in one process, with the batches of all its ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.evidence.convergence import plan
from commopt.command_line import Parser
from examples import train_gpt
from examples.train_gpt import GPT, load_corpus, windows_at

NODES = len(plan.RANKS_PER_NODE)
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
