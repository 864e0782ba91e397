"""One strategy's training: its clock, and the looks at the held-out loss."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from bench.models import MODELS
from bench.ranks import from_rank_0
from bench.training.contenders import enter
from bench.training.report import Look

# Steps before the first look and before those that count as usual: DDP rebuilds its buckets in the first ones.
FIRST_STEPS = 3

Show = Callable[[float, str], None]


def steps_until_look(step_s: Sequence[float], budget_s: float, look_every_s: float) -> int:
    """Return how many steps to take before the next look at the held-out loss, 0 when the budget is used up.

    The budget is met to the nearest step.
    """
    if not step_s:
        return FIRST_STEPS
    expected_s = median(step_s[-10:])
    affordable = round((budget_s - sum(step_s)) / expected_s)
    return max(0, min(affordable, max(1, round(look_every_s / expected_s))))


class Run:
    """One strategy's fresh model, and how long each of its steps took on this rank."""

    def __init__(self, strategy: str, options: argparse.Namespace, device: torch.device) -> None:
        self.strategy = strategy
        self.training, self.state = enter(MODELS[options.model](options, device), strategy, options.plan)
        self.step_s: list[float] = []

    def step(self) -> None:
        """Take one step and time it."""
        start = time.perf_counter()
        self.training.step()
        if self.training.device.type == "cuda":
            torch.cuda.synchronize()
        self.step_s.append(time.perf_counter() - start)

    def train(self, seconds: float, look_every_s: float, show: Show) -> list[Look]:
        """Train for `seconds` of rank 0's step time; evaluation is off the clock. Collective.

        Rank 0 plans from look to look, so that no message but the gradients' is sent while the clock runs.
        """
        curve: list[Look] = []
        message = self.strategy
        while count := from_rank_0(steps_until_look(self.step_s, seconds, look_every_s)):
            for _ in range(count):
                self.step()
                show(sum(self.step_s) / seconds, message)
            look = Look(len(self.step_s), from_rank_0(sum(self.step_s)), self.training.held_out_loss())
            curve.append(look)
            message = f"{self.strategy}: step {look.step}, held-out loss {look.held_out_loss:.3f}"
        show(1.0, message)
        return curve
