"""A model in training under one strategy, which takes turns with others so that all meet the same noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.bucketing.models import Subject

STOCK = "ddp"
_RATE = 1e-6  # the model stays where it is: every step is like the others


@dataclass
class Trainee:
    """A model of its own, trained with SGD on the same input in every step; every method is collective.

    strategy: a preset with its options, or "ddp" for stock DDP. options: of commopt.attach. step_s: of the steps that
    counted; cpu_s: how long each kept cores busy on all ranks together.
    """

    strategy: str
    subject: Subject
    options: Mapping[str, Any] = field(default_factory=lambda: {"plan": "ddp"})
    state: commopt.HookState | None = field(init=False, default=None)
    step_s: list[float] = field(init=False, default_factory=list)
    cpu_s: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(self.subject.make())
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), _RATE, momentum=0.9)
        self.inputs = self.subject.inputs(self.subject.batch)
        if self.strategy != STOCK:
            self.state = commopt.attach(self.ddp, self.strategy, **self.options)

    def step(self) -> None:
        """Take a step: it begins with the gradients of the one before, and ends when those of this one are reduced."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ddp(self.inputs).float().square().mean().backward()

    def lane_ms(self) -> float:
        """Return for how long communication kept the lane in a step, of those recorded (option `record`)."""
        assert self.state is not None  # stock DDP records nothing
        return self.state.report().analysis.mean.communication_us / 1000

    def turn(self, steps: int, *, counts: bool = True) -> list[float]:
        """Take some steps, and return what each took, in seconds, the same on all ranks; keep it if it `counts`.

        A step lasts until it ends on the last rank, from when the one before did.
        """
        begun_cpu_s = process_time()
        dist.barrier()
        begun_s = perf_counter()
        ends_s = []
        for _ in range(steps):
            self.step()
            ends_s.append(perf_counter() - begun_s)
        used = torch.tensor([process_time() - begun_cpu_s], dtype=torch.float64)
        dist.all_reduce(used)
        last = torch.tensor([0.0, *ends_s], dtype=torch.float64)
        dist.all_reduce(last, op=dist.ReduceOp.MAX)
        taken_s: list[float] = last.diff().tolist()
        if counts:
            self.step_s += taken_s
            self.cpu_s += [float(used) / steps] * steps
        return taken_s
