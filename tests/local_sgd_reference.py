# SPDX-License-Identifier: Apache-2.0
"""A reference for LocalSGD without DDP: a replica and an optimizer per node, all in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from commopt import LocalSGD
from tests.hook_training import batch_of, loss_of


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)


class Reference:
    """Takes the steps of all ranks in float64 sums; `nodes` is the number of ranks on each node."""

    def __init__(self, module: nn.Module, nodes: Sequence[int], average: LocalSGD) -> None:
        ranks = iter(range(sum(nodes)))
        self._ranks = [[next(ranks) for _ in range(count)] for count in nodes]
        self._weights = [count / sum(nodes) for count in nodes]
        self._replicas = [copy.deepcopy(module) for _ in nodes]
        self._optimizers = [optimizer_of(replica) for replica in self._replicas]
        self._average = average
        self._steps = 0

    def step(self, micros: int) -> None:
        """Take a step on every node, with batches of this step, and average if it is time."""
        means = [self._mean_gradients(node, micros) for node in range(len(self._replicas))]
        if self._steps < self._average.start_step:
            means = [self._mean(means)] * len(means)
        for replica, mean, optimizer in zip(self._replicas, means, self._optimizers, strict=True):
            for parameter, gradient in zip(replica.parameters(), mean, strict=True):
                parameter.grad = gradient.float()
            optimizer.step()
        self._steps += 1
        since_start = self._steps - self._average.start_step
        if since_start > 0 and since_start % self._average.period == 0:
            mean = self._mean([[p.detach().double() for p in replica.parameters()] for replica in self._replicas])
            for replica in self._replicas:
                for parameter, value in zip(replica.parameters(), mean, strict=True):
                    parameter.detach().copy_(value)

    def assert_alike(self, module: nn.Module, rank: int) -> None:
        """Compare `module` of `rank` with its node's replica."""
        node = next(index for index, ranks in enumerate(self._ranks) if rank in ranks)
        pairs = zip(self._replicas[node].named_parameters(), module.parameters(), strict=True)
        for (name, expected), got in pairs:
            close = torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
            assert close, f"{name} after {self._steps} steps: off by {(got - expected).abs().max():.3g}"

    def _mean_gradients(self, node: int, micros: int) -> list[Tensor]:
        replica, ranks = copy.deepcopy(self._replicas[node]), self._ranks[node]
        for rank in ranks:
            for micro in range(micros):
                loss_of(replica, batch_of(rank, self._steps, micro)).backward()
        return [
            parameter.grad.double() / len(ranks) for parameter in replica.parameters() if parameter.grad is not None
        ]

    def _mean(self, values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the mean over all ranks of what the nodes hold."""
        weights = torch.tensor(self._weights, dtype=torch.float64)
        return [torch.tensordot(weights, torch.stack(each), 1) for each in zip(*values, strict=True)]
