# SPDX-License-Identifier: Apache-2.0
"""Models in training that take turns: with a strategy, with stock DDP, or without communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.evidence.models import Subject
from commopt.feedback import Layout
from commopt.recording import GradientTimes
from commopt.schedule import Unit
from commopt.simulate import Workload

STOCK, NOTHING = "ddp", "no communication"
_RATE = 1e-6  # the model stays where it is: every step is like the others


@dataclass
class TrainingRun:
    """A model of its own, trained with SGD on the same input in every step; every method is collective.

    strategy: a preset with its options, STOCK for DDP as it is, NOTHING for a hook that sends nothing. options: of
    commopt.attach. step_s: of the steps that counted; cpu_s: how long each kept cores busy on all ranks together.
    """

    strategy: str
    subject: Subject
    options: Mapping[str, Any] = field(default_factory=lambda: {"plan": "ddp"})
    bucket_cap_mb: float | None = None
    state: commopt.HookState | None = field(init=False, default=None)
    step_s: list[float] = field(init=False, default_factory=list)
    cpu_s: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(self.subject.make(), bucket_cap_mb=self.bucket_cap_mb)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), _RATE, momentum=0.9)
        self.inputs = self.subject.inputs(self.subject.batch)
        if self.strategy == NOTHING:
            self.ddp.register_comm_hook(None, noop_hook)
        elif self.strategy != STOCK:
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


_US = 1e6


class Profile:
    """A model whose gradients stay where they are; every method is collective.

    A barrier after each step stands for the reduction that ranks wait for in training. Of each time that of the last
    rank counts, as a collective begins when the last rank is there.
    """

    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self._training = TrainingRun(NOTHING, subject)
        self._parameters: dict[str, Tensor] = dict(self._training.ddp.module.named_parameters())
        self._batch = subject.batch
        self._rows: list[list[float]] = []  # of each step: when each gradient was ready, then its end, in us
        self.cpu_s: list[float] = []

    def turn(self, steps: int, *, counts: bool = True) -> list[float]:
        """Take some steps, and return what each took on the slowest rank, in seconds; keep it if it `counts`."""
        readiness = GradientTimes(torch.device("cpu"))
        readiness.start(self._parameters)
        begins_us, ends_us = [], []
        used = torch.zeros(1, dtype=torch.float64)
        dist.barrier()
        for number in range(steps):
            begun_cpu_s = process_time()
            begins_us.append(perf_counter() * _US)
            self._training.step()
            ends_us.append(perf_counter() * _US)
            used += process_time() - begun_cpu_s
            readiness.end_step(number)
            dist.barrier()
        ready_us = readiness.times_us()
        readiness.stop()
        rows = [
            [*(ready_us[number][name] - begin_us for name in self._parameters), end_us - begin_us]
            for number, (begin_us, end_us) in enumerate(zip(begins_us, ends_us, strict=True))
        ]
        latest = torch.tensor(rows, dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        dist.all_reduce(used)
        if counts:
            self._rows += latest.tolist()
            self.cpu_s += [float(used) / steps] * steps
        return [row[-1] / _US for row in latest.tolist()]

    @property
    def buckets(self) -> list[Layout]:
        """What lies in DDP's buckets, once it has made them anew: after two steps."""
        names = list(self._parameters)
        told: str = self._training.ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        places = [[int(place) for place in bucket.split()] for bucket in told.split(",")]
        return [Layout.of_parameters((names[place], self.shapes[names[place]]) for place in each) for each in places]

    @property
    def step_s(self) -> list[float]:
        """The steps that counted."""
        return [row[-1] / _US for row in self._rows]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters."""
        return {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}

    def workload(self) -> Workload:
        """Return the usual step, its parameters in the order in which their gradients come."""
        usual_us = dict(
            zip(self._parameters, map(median, zip(*(row[:-1] for row in self._rows), strict=True)), strict=True)
        )
        names = sorted(usual_us, key=usual_us.__getitem__)
        units = tuple(
            Unit((name,), self._parameters[name].nbytes, usual_us[name], str(self._parameters[name].dtype))
            for name in names
        )
        return Workload(
            self.name, units, Layout.of_parameters((name, self.shapes[name]) for name in names), self._batch
        )

    def tail_us(self, workload: Workload) -> float:
        """Return what a usual step takes after its last gradient, when DDP copies them all out of its buckets."""
        return max(0.0, median(self.step_s) * _US - workload.compute_us)
