"""Contenders that take turns, so that all of them meet the same noise."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

import commopt
from bench.bucketing.models import Subject
from commopt.timeline import Report

CAPS_MB = (1, 2, 5, 25, 100)
NOTHING, DEFAULT = "no communication", "ddp default"


@dataclass(frozen=True)
class Standing:
    """One contender's steps; milliseconds, the median over all its turns and that of each turn, of the slowest rank."""

    name: str
    step_ms: float
    turns_ms: list[float]
    buckets: int | None = None
    compute_ms: float | None = None
    exposed_ms: float | None = None
    last_exposed_ms: float | None = None
    predicted_exposed_ms: float | None = None
    communication_ms: float | None = None
    hidden: float | None = None
    decisions: list[str] | None = None


class Contender:
    """A model of its own, trained with SGD on the same input in every step."""

    def __init__(self, name: str, subject: Subject, batch: int) -> None:
        torch.manual_seed(0)
        self.name = name
        self.inputs = subject.inputs(batch)
        self.state: commopt.HookState | None = None
        options: dict[str, Any] = {}
        if name.startswith("cap "):
            options["bucket_cap_mb"] = float(name.split()[1])
        self.ddp = DistributedDataParallel(subject.make(), **options)
        if name == NOTHING:
            self.ddp.register_comm_hook(None, noop_hook)
        elif name.startswith("commopt "):
            _, preset, plan = name.split()
            self.state = commopt.attach(self.ddp, preset, plan=plan, record=True)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-6)
        self.step_s: list[list[float]] = []

    def take_turn(self, steps: int, *, counts: bool = True) -> None:
        """Train for some steps; collective."""
        dist.barrier()
        taken = []
        for _ in range(steps):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            self.ddp(self.inputs).float().square().mean().backward()
            self.optimizer.step()
            taken.append(time.perf_counter() - start)
        if counts:
            self.step_s.append(taken)

    def draw(self, path: Path) -> None:
        """Draw one of its steps, the plan's name added to `path`; collective."""
        assert self.state is not None  # stock DDP records nothing
        self.state.timeline(plot=path.with_stem(f"{path.stem}_{self.name.split()[-1]}"))

    def standing(self) -> Standing:
        """Return how it did; collective."""
        own = torch.tensor(self.step_s, dtype=torch.float64)
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        turns_ms = [1000 * median(turn) for turn in own.tolist()]
        step_ms = 1000 * float(own.flatten().median())
        if self.state is None:
            return Standing(self.name, step_ms, turns_ms)
        report: Report = self.state.report()
        mean, predicted = report.analysis.mean, report.predicted_exposed_us
        communication_us = mean.communication_us
        return Standing(
            self.name,
            step_ms,
            turns_ms,
            buckets=len(report.analysis.messages),
            compute_ms=mean.compute_us / 1000,
            exposed_ms=mean.exposed_us / 1000,
            last_exposed_ms=report.analysis.last_exposed_us / 1000,
            predicted_exposed_ms=None if predicted is None else predicted / 1000,
            communication_ms=communication_us / 1000,
            hidden=1 - mean.exposed_us / communication_us,
            decisions=[decision.reason for decision in self.state.decisions],
        )


def names(presets: list[str]) -> list[str]:
    """Return who takes part."""
    ours = [f"commopt {preset} {plan}" for preset in presets for plan in ("ddp", "adaptive")]
    return [NOTHING, DEFAULT, *(f"cap {cap} MB" for cap in CAPS_MB), *ours]
