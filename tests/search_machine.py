# SPDX-License-Identifier: Apache-2.0
"""A machine in the model of the planner, with noise and with conditions that change: what Search is driven with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commopt.cost import PriceTable
from commopt.schedule import (
    Costs,
    Decision,
    Measurement,
    Plan,
    Tuned,
    Unit,
    Window,
    best_plan,
)
from commopt.schedule.candidates import Candidate
from commopt.schedule.decision import FIRST_WINDOW
from commopt.schedule.measure import StepTable
from commopt.schedule.search import Search

LARGEST_BYTES = 10**9
M = TypeVar("M", bound="Machine")


def line(alpha_us: float, us_per_byte: float) -> PriceTable:
    return PriceTable((0, LARGEST_BYTES), (alpha_us, alpha_us + us_per_byte * LARGEST_BYTES))


def units_of(nbytes: list[int], gap_us: float, first_us: float = 10_000.0) -> tuple[Unit, ...]:
    """Gradients that become ready at equal distances, after a forward."""
    return tuple(
        Unit((f"layer{number}.weight",), size, first_us + gap_us * (number + 1), "float32")
        for number, size in enumerate(nbytes)
    )


UNITS = units_of([400_000, 2_000_000, 1_000_000, 4_000_000] * 6, gap_us=2000.0)
COSTS = Costs({"flat": line(1500.0, 1.2e-3), "hierarchical": line(3000.0, 0.9e-3)}, overhead_us=100.0)
EXACT = (Candidate("flat", "flat"), Candidate("hierarchical", "hierarchical"))
LOSSY = (Candidate("quantized", "quantized", 0.1, lossy=True), Candidate("onebit", "onebit", 0.6, lossy=True))
PRICES = {
    "flat": line(1500.0, 4e-3),
    "hierarchical": line(3000.0, 3e-3),
    "quantized": line(3000.0, 0.5e-3),
    "onebit": line(8000.0, 0.5e-3),
}
FOLLOWS = 1.0


@dataclass(frozen=True)
class Truth:
    """What really happens in a step: factors on the model's times; `bias` is on all of them, by plan.

    overhead_us: of each message, beside that of the model.
    """

    backward: float = 1.0
    transfers: Mapping[str, float] = field(default_factory=dict)
    bias: Callable[[Plan], float] = lambda _: 1.0
    overhead_us: float = 0.0


@dataclass(frozen=True)
class Step:
    """Times of one step from its beginning."""

    ready_us: list[float]
    started_us: list[float]
    finished_us: list[float]


@dataclass
class Machine:
    """Runs training under a Search from one decision to the next: with exact candidates, as for adaptive buckets."""

    truth: Callable[[int], Truth] = lambda _: Truth()
    noise: float = 0.0
    seed: int = 0
    costs: Costs = COSTS
    units: tuple[Unit, ...] = UNITS
    candidates: tuple[Candidate, ...] = EXACT
    max_bytes: int | None = None
    max_trials: int = 3
    found_cap_bytes: int = 8_000_000
    found_first_cap_bytes: int = 2**20
    steps_lost: int = 0  # of each window
    movable: bool = True
    first: Window = FIRST_WINDOW
    allow: tuple[str, ...] = ()
    adopted: Tuned | None = None
    optimizer: str = ""
    stock: bool = True
    behind: Mapping[int, float] = field(default_factory=dict)  # steps behind exact averages, from each step on

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.search = self.begin()
        self.found = Plan(self.ddp_groups(), "flat", "found")
        self.plan = self.found if self.adopted is None or self.adopted.plan is None else self.adopted.plan
        self.window: Window = self.first
        self.log: list[tuple[int, Decision]] = []

    def begin(self) -> Search:
        costs = self.costs.only([candidate.strategy for candidate in self.candidates])
        return Search(
            self.candidates,
            costs,
            self.max_bytes,
            self.max_trials,
            self.allow,
            (2, 2) if self.allow else (),
            self.adopted,
            self.optimizer,
            stock=self.stock,
        )

    def ddp_groups(self) -> tuple[tuple[str, ...], ...]:
        """The buckets that DDP makes of gradients that come in this order."""
        tensors = [torch.empty(unit.nbytes, dtype=torch.uint8, device="meta") for unit in self.units]
        caps = [self.found_first_cap_bytes, self.found_cap_bytes]
        places, _ = dist._compute_bucket_assignment_by_size(
            tensors, caps, [False] * len(tensors), list(range(len(tensors)))
        )
        return tuple(tuple(self.units[place].names[0] for place in bucket) for bucket in places)

    def run(self: M, steps: int) -> M:
        """Decide until `steps` steps are done."""
        while self.window.last_step < steps:
            step = self.window.last_step
            decision = self.search.decide(self.measure(), step)
            self.log.append((step, decision))
            self.window = decision.window
            self.plan = decision.plan or decision.updated(self.plan)
        return self

    @property
    def changes(self) -> list[int]:
        """The steps after which the plan was changed."""
        return [step for step, decision in self.log if decision.plan is not None]

    @property
    def reasons(self) -> list[str]:
        return [decision.reason for _, decision in self.log]

    @property
    def outcomes(self) -> list[Tuned]:
        return [decision.tuned for _, decision in self.log if decision.tuned is not None]

    @property
    def tuned(self) -> Tuned:
        return self.outcomes[-1]

    @property
    def tuned_after(self) -> int:
        """How many steps it took."""
        return next(step for step, decision in self.log if decision.tuned is not None) + 1

    def best_us(self, step: int) -> float:
        """The least that a step can take, for one who knows what messages really cost."""
        units, costs = self.conditions(step)
        plans = (best_plan(units, costs.only([candidate.strategy])) for candidate in self.candidates)
        return min(self.step_us(plan, step) for plan in plans)

    def step_us(self, plan: Plan, step: int) -> float:
        """What a step takes without noise."""
        trace = self.trace(plan, step, lambda: 1.0)
        return max(*trace.ready_us, trace.finished_us[-1])

    def conditions(self, step: int) -> tuple[list[Unit], Costs]:
        """The units as they are ready on a lane that is never busy, and what messages really cost."""
        truth = self.truth(step)
        units = [replace(unit, ready_us=unit.ready_us * truth.backward) for unit in self.units]
        prices = {
            name: table.along(truth.transfers.get(name, 1.0), truth.overhead_us)
            for name, table in self.costs.prices.items()
        }
        return units, replace(self.costs, prices=prices)

    def measure(self) -> Measurement:
        """Measure the steps of the window, each with noise of its own on every time."""
        if self.log and self.log[-1][1].retime:
            names = [candidate.strategy for candidate in self.candidates]
            self.search.costs = self.conditions(self.window.last_step)[1].only(names)
        steps = range(self.window.first_step, self.window.last_step + 1)
        begin = np.array([1e9 + 1e6 * step for step in steps])
        traces = [self.trace(self.plan, step, self.jitter) for step in steps]
        ready, started, finished = (
            begin[:, None] + np.array([getattr(trace, name) for trace in traces])
            for name in ("ready_us", "started_us", "finished_us")
        )
        begin[: self.steps_lost] = np.nan
        plain = [replace(unit, ready_us=0.0) for unit in self.units]
        times = StepTable(begin, ready.max(axis=1), started, finished, ready)
        measured = Measurement.of(replace(self.plan, origin="found"), plain, times)
        shown = [behind for step, behind in self.behind.items() if step <= self.window.last_step]
        return replace(measured, steps_behind=shown[-1] if shown else None, movable=self.movable)

    def trace(self, plan: Plan, step: int, jitter: Callable[[], float]) -> Step:
        units, costs = self.conditions(step)
        truth = self.truth(step)
        scale = truth.bias(plan)
        ready = {unit.names[0]: scale * unit.ready_us * jitter() for unit in units}
        sizes = {unit.names[0]: unit.nbytes for unit in units}
        started, finished, free_us = [], [], 0.0
        for group in plan.groups:
            started.append(max(free_us, *(ready[name] for name in group)))
            lane_us = costs.lane_us(sum(sizes[name] for name in group), plan.strategy)
            free_us = started[-1] + lane_us * scale * jitter()
            finished.append(free_us)
        return Step(list(ready.values()), started, finished)

    def jitter(self) -> float:
        return float(np.exp(self.noise * self.rng.standard_normal()))


@dataclass
class TunedMachine(Machine):
    """A machine under `auto`, which may compress."""

    costs: Costs = field(default_factory=lambda: Costs(PRICES, overhead_us=100.0))
    candidates: tuple[Candidate, ...] = (*EXACT, *LOSSY)
    max_trials: int = 4
    allow: tuple[str, ...] = ("lossless", "quantized", "onebit")
    behind: Mapping[int, float] = field(default_factory=lambda: {0: FOLLOWS})
