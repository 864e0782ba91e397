# SPDX-License-Identifier: Apache-2.0
"""A DDP model of any shapes whose every gradient the test chooses, and a record of all that its hook did."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Aggregator

Shapes = Mapping[str, tuple[int, ...]]
Gradients = Mapping[str, Tensor]


class Chosen(nn.Module):
    """The loss is every parameter times its coefficient, so the coefficients are the gradients, exactly."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> None:
        super().__init__()
        for name, shape in shapes.items():
            values = torch.ones(shape, dtype=dtype)
            if channels_last and len(shape) == 4:
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, coefficients: Gradients) -> Tensor:
        named = dict(self.named_parameters())
        return torch.stack([(named[name] * each).sum().float() for name, each in coefficients.items()]).sum()


@dataclass
class Trace:
    """What one rank saw: the results, saved state, bytes sent and statistics of each step."""

    results: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Return a hash of all results."""
        digest = hashlib.sha256()
        for results in self.results:
            for values in results.values():
                digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


@dataclass
class Chooser:
    """Trains a Chosen with a hook; `gradients(step)` are this rank's, unscaled."""

    aggregator: Aggregator
    shapes: Shapes
    gradients: Callable[[int], Gradients]
    dtype: torch.dtype = torch.float32
    scaler: torch.amp.GradScaler | None = None
    channels_last: bool = False

    def __post_init__(self) -> None:
        self.module = Chosen(self.shapes, self.dtype, self.channels_last)
        self.ddp = TorchDDP(self.module, find_unused_parameters=False)
        self.comm = commopt.attach(self.ddp, self.aggregator, scaler=self.scaler)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.0)
        self.step = 0

    def run(self, steps: int) -> Trace:
        """Do `steps` steps; results are recorded unscaled."""
        trace = Trace()
        before = self._sent()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.ddp(self.gradients(self.step))
            scale = self.scaler.get_scale() if self.scaler else 1.0
            (self.scaler.scale(loss) if self.scaler else loss).backward()
            named = self.module.named_parameters()
            trace.results.append({name: each.grad.clone() / scale for name, each in named if each.grad is not None})
            trace.states.append(self.comm.state_dict())
            trace.nbytes.append(self._sent() - before)
            before = self._sent()
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.step += 1
        trace.stats = self.comm.stats()
        return trace

    def _sent(self) -> int:
        stats = self.comm.stats()
        sent: int = stats["intra_bytes"] + stats["inter_bytes"]
        return sent


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let torch's operations in this thread use so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kept(state: Mapping[str, Any], name: str, numel: int) -> Tensor:
    """Return all residuals that a saved state holds for a parameter, float64 [numel]."""
    total = torch.zeros(numel, dtype=torch.float64)
    for pieces in state["residuals"].values():
        for key, values in pieces.items():
            own, _, span = key.rpartition("[")
            if own == name:
                begin, end = map(int, span.rstrip("]").split(":"))
                total[begin:end] += values.double()
    return total


def blocks_of(state: Mapping[str, Any], role: str) -> dict[str, list[tuple[int, int]]]:
    """Return which element ranges of which parameters a saved state holds in a role."""
    blocks: dict[str, list[tuple[int, int]]] = {}
    for key in state["residuals"].get(role, {}):
        name, _, span = key.rpartition("[")
        begin, end = map(int, span.rstrip("]").split(":"))
        blocks.setdefault(name, []).append((begin, end))
    return {name: sorted(ranges) for name, ranges in blocks.items()}
