"""A step without communication, while all ranks compute: when each gradient is ready, and what follows the last."""

from __future__ import annotations

from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from bench.bucketing.models import Subject
from bench.prediction.trainee import STOCK, Trainee
from commopt.feedback import Layout
from commopt.schedule import Plan, Unit, Window
from commopt.schedule.measure import Readiness
from commopt.simulate import Workload, of_window

_US = 1e6


class Profile:
    """A model whose gradients stay where they are; every method is collective.

    A barrier after each step stands for the reduction that ranks wait for in training. Of each time that of the last
    rank counts, as a collective begins when the last rank is there.
    """

    def __init__(self, subject: Subject) -> None:
        self.name = subject.name
        self._trainee = Trainee(STOCK, subject)
        self._trainee.ddp.register_comm_hook(None, noop_hook)
        self._parameters: dict[str, Tensor] = dict(self._trainee.ddp.module.named_parameters())
        self._batch = subject.batch
        self._rows: list[list[float]] = []  # of each step: when each gradient was ready, then its end, in us
        self.cpu_s: list[float] = []

    def turn(self, steps: int, *, counts: bool = True) -> list[float]:
        """See Trainee.turn."""
        readiness = Readiness(torch.device("cpu"))
        readiness.start(self._parameters)
        begins_us, ends_us = [], []
        used = torch.zeros(1, dtype=torch.float64)
        dist.barrier()
        for number in range(steps):
            begun_cpu_s = process_time()
            begins_us.append(perf_counter() * _US)
            self._trainee.step()
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
        told: str = self._trainee.ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
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
        table = np.array(self._rows)
        order = np.argsort(table[:, :-1].mean(axis=0), kind="stable")
        names = [list(self._parameters)[place] for place in order]
        window = Window.of(
            plan=Plan((tuple(names),), "none", "found"),
            units=[
                Unit((name,), self._parameters[name].nbytes, 0.0, str(self._parameters[name].dtype)) for name in names
            ],
            begin_us=np.zeros(len(table)),
            compute_end_us=table[:, -1],
            ready_us=table[:, order],
            started_us=np.zeros((len(table), 1)),
            finished_us=np.zeros((len(table), 1)),
        )
        return of_window(window, self.shapes, name=self.name, samples=self._batch)

    def tail_us(self, workload: Workload) -> float:
        """Return what a usual step takes after its last gradient, when DDP copies them all out of its buckets."""
        return max(0.0, median(self.step_s) * _US - workload.compute_us)
