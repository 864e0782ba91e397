# SPDX-License-Identifier: Apache-2.0
"""One strategy's training: its clock, the looks at the held-out loss, and the bytes between the nodes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import mean, median, quantiles

import torch
import torch.distributed as dist

from bench.environment import from_rank_0, gather, slowest_rank_ms
from bench.models import MODELS
from bench.training.report import Look, Outcome
from bench.training.strategies import enter
from commopt import LocalSGD
from commopt.cluster import LinkTraffic, link_rate, traffic
from topology import Cluster

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
    """One strategy's fresh model, and how long each of its steps took on this rank.

    moved: in each of its turns. beside_ms: what steps without communication took just before and after them.
    """

    def __init__(self, strategy: str, options: argparse.Namespace, device: torch.device) -> None:
        self.strategy = strategy
        if strategy == "noop" and options.parallel != "ddp":  # sharded inside nodes that do not communicate
            options = argparse.Namespace(**{**vars(options), "parallel": "node"})
        self.training, self.state = enter(MODELS[options.model](options, device), strategy, options.plan)
        self.step_s: list[float] = []
        self.curve: list[Look] = []
        self.moved: list[Bytes] = []
        self.beside_ms: list[float] = []

    def step(self) -> None:
        """Take one step and time it."""
        start = time.perf_counter()
        self.training.step()
        if self.training.device.type == "cuda":
            torch.cuda.synchronize()
        self.step_s.append(time.perf_counter() - start)

    def train(self, seconds: float, look_every_s: float, show: Show) -> None:
        """Train until rank 0's steps have taken `seconds`; evaluation is off the clock. Collective.

        Rank 0 plans from look to look, so that no message but the gradients' is sent while the clock runs.
        """
        message, begun_s = self.strategy, sum(self.step_s)
        while count := from_rank_0(steps_until_look(self.step_s, seconds, look_every_s)):
            for _ in range(count):
                self.step()
                show((sum(self.step_s) - begun_s) / max(seconds - begun_s, 1e-3), message)
            look = Look(len(self.step_s), from_rank_0(sum(self.step_s)), self.training.held_out_loss())
            self.curve.append(look)
            message = f"{self.strategy}: step {look.step}, held-out loss {look.held_out_loss:.3f}"
        show(1.0, message)


class Baseline:
    """Steps without communication, in turns with the strategies: a machine that gets slower does so for both.

    step_ms: what each took on the slowest rank.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.run = Run("noop", options, device)
        self.step_ms: list[float] = []
        self._at_once = max(1, options.noop_steps // (options.turns * len(options.strategies) + 1))
        for _ in range(FIRST_STEPS):
            self.run.step()
        self.take_turn()

    def take_turn(self) -> None:
        """Take a turn's steps. Collective."""
        for _ in range(self._at_once):
            self.run.step()
        self.step_ms += slowest_rank_ms(self.run.step_s[-self._at_once :])

    def lately_ms(self) -> list[float]:
        """Return those of the last two turns: of before and after a strategy's."""
        return self.step_ms[-2 * self._at_once :]


@dataclass(frozen=True)
class Bytes:
    """Bytes that left the nodes; None where nothing counts them."""

    sent: int | None = None
    payload: int | None = None

    @classmethod
    def between(cls, before: LinkTraffic | None, after: LinkTraffic | None, cluster: Cluster) -> Bytes:
        """Add up what all nodes sent; collective."""
        if before is None or after is None:
            return cls()
        moved = gather(after - before)
        speakers = [node[0] for node in cluster.nodes]  # the counters belong to the node: read them once
        sent = sum(moved[rank].link.tx_bytes for rank in speakers)
        return cls(sent, sum(moved[rank].link_payload_bytes for rank in speakers))


def node_traffic() -> LinkTraffic | None:
    """Return this node's counters, None where it has none of its own; collective, so that nothing is on its way."""
    dist.barrier()
    return traffic() if link_rate() else None


@contextmanager
def counting(run: Run, cluster: Cluster) -> Iterator[None]:
    """Add what the nodes send meanwhile to what moved in a run. Collective."""
    before = node_traffic()
    yield
    run.moved.append(Bytes.between(before, node_traffic(), cluster))


def take_turn(run: Run, baseline: Baseline, seconds: float, look_every_s: float, cluster: Cluster, show: Show) -> None:
    """Train by one strategy until its steps have taken `seconds`, and after it without communication. Collective."""
    with counting(run, cluster):
        run.train(seconds, look_every_s, show)
    baseline.take_turn()
    run.beside_ms += baseline.lately_ms()


def outcome_of(run: Run) -> Outcome:
    """Return what a strategy took in all its turns so far. Collective."""
    step_ms, steps = slowest_rank_ms(run.step_s), len(run.step_s)
    local = run.state is not None and isinstance(run.state.aggregator, LocalSGD)
    usual_ms = mean(step_ms[FIRST_STEPS:] or step_ms) if local else median(step_ms)  # rounds are rare, and count
    predicted = None if run.state is None else sum(gather(run.state.stats()["inter_bytes"]))
    return Outcome(
        strategy=run.strategy,
        steps=steps,
        seconds=run.curve[-1].seconds,
        step_ms=usual_ms,
        step_p90_ms=quantiles(step_ms, n=10)[-1] if len(step_ms) > 1 else step_ms[0],
        exposed_ms=usual_ms - median(run.beside_ms),
        inter_mib_per_step=mib_per_step([turn.sent for turn in run.moved], steps),
        inter_payload_mib_per_step=mib_per_step([turn.payload for turn in run.moved], steps),
        inter_predicted_mib_per_step=mib_per_step([predicted], steps),
        curve=run.curve,
    )


def mib_per_step(nbytes: Sequence[int | None], steps: int) -> float | None:
    """Return the sum of bytes in MiB per step; None where nothing counted them."""
    counted = [each for each in nbytes if each is not None]
    return sum(counted) / steps / 2**20 if counted else None
