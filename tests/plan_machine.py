"""A machine in the model of the planner, with noise and with conditions that change: what Adaptation is driven with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from commopt.plan import (
    Adaptation,
    Bucket,
    Calendar,
    Costs,
    Decision,
    Plan,
    PriceTable,
    Unit,
    Window,
)
from commopt.tuning import Tuning

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
COSTS = Costs({("flat", 1): line(1500.0, 1.2e-3), ("hierarchical", 1): line(3000.0, 0.9e-3)}, overhead_us=100.0)


@dataclass(frozen=True)
class Truth:
    """What really happens in a step: factors on the model's times; `bias` is on all of them, by plan.

    overhead_us: of each message, beside that of the model. slowdown: backward takes 1 + slowdown times as long while
    the lane is busy.
    """

    backward: float = 1.0
    transfers: Mapping[str, float] = field(default_factory=dict)
    bias: Callable[[Plan], float] = lambda _: 1.0
    overhead_us: float = 0.0
    slowdown: float = 0.0


@dataclass(frozen=True)
class Step:
    """Times of one step from its beginning; messages in launch order."""

    ready_us: list[float]
    started_us: list[float]
    finished_us: list[float]

    @property
    def exposed_us(self) -> float:
        return max(0.0, self.finished_us[-1] - max(self.ready_us))


@dataclass
class Machine:
    """Runs training under an Adaptation from one meeting to the next."""

    truth: Callable[[int], Truth] = lambda _: Truth()
    noise: float = 0.0
    seed: int = 0
    costs: Costs = COSTS
    units: tuple[Unit, ...] = UNITS
    max_bytes: int | None = None
    needed_first: bool = False
    found_cap_bytes: int = 8_000_000
    found_first_cap_bytes: int = 2**20
    steps_lost: int = 0  # of each window

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.adaptation: Adaptation | Tuning = Adaptation(self.costs, self.max_bytes, needed_first=self.needed_first)
        self.found = Plan(self.ddp_buckets(), origin="found")
        self.plan = self.found
        self.calendar: Calendar = Adaptation.first
        self.log: list[tuple[int, Decision]] = []

    def ddp_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that DDP makes of gradients that come in this order."""
        tensors = [torch.empty(unit.nbytes, dtype=torch.uint8, device="meta") for unit in self.units]
        caps = [self.found_first_cap_bytes, self.found_cap_bytes]
        places, _ = dist._compute_bucket_assignment_by_size(
            tensors, caps, [False] * len(tensors), list(range(len(tensors)))
        )
        return tuple(Bucket.of([self.units[place] for place in bucket], "flat") for bucket in places)

    def run(self: M, steps: int) -> M:
        """Meet until `steps` steps are done."""
        while self.calendar.meet_at < steps:
            step = self.calendar.meet_at
            decision = self.adaptation.decide(self.window(), step)
            self.log.append((step, decision))
            self.calendar = decision.calendar
            self.plan = decision.plan or decision.updated(self.plan)
        return self

    @property
    def changes(self) -> list[int]:
        """The steps after which the plan was changed."""
        return [step for step, decision in self.log if decision.plan is not None]

    def step_us(self, plan: Plan, step: int) -> float:
        """What a step takes without noise."""
        trace = self.trace(plan, step, lambda: 1.0)
        return max(*trace.ready_us, trace.finished_us[-1])

    def conditions(self, step: int) -> tuple[list[Unit], Costs]:
        """The units as they are ready on a lane that is never busy, and what messages really cost."""
        truth = self.truth(step)
        units = [replace(unit, ready_us=unit.ready_us * truth.backward) for unit in self.units]
        prices = {
            key: table.along(truth.transfers.get(key[0], 1.0), truth.overhead_us)
            for key, table in self.costs.prices.items()
        }
        return units, replace(self.costs, prices=prices)

    def window(self) -> Window:
        """Measure the steps of the calendar, each with noise of its own on every time."""
        steps = range(self.calendar.measure_from, self.calendar.meet_at + 1)
        begin = np.array([1e9 + 1e6 * step for step in steps])
        traces = [self.trace(self.plan, step, self.jitter) for step in steps]
        ready, started, finished = (
            begin[:, None] + np.array([getattr(trace, name) for trace in traces])
            for name in ("ready_us", "started_us", "finished_us")
        )
        begin[: self.steps_lost] = np.nan
        buckets = [self.plan.buckets[place] for place in self.plan.order]
        plain = [replace(unit, ready_us=0.0) for unit in self.units]
        return Window.of(plain, buckets, begin, ready.max(axis=1), ready, started, finished)

    def trace(self, plan: Plan, step: int, jitter: Callable[[], float]) -> Step:
        units, costs = self.conditions(step)
        truth = self.truth(step)
        scale = truth.bias(plan)
        alone = {unit.names[0]: scale * unit.ready_us * jitter() for unit in units}
        busy: list[tuple[float, float]] = []

        def ready_us(name: str) -> float:
            """When a gradient is ready beside the messages so far; later ones start after it."""
            time_us = alone[name]
            for begin, end in busy:
                if time_us <= begin:
                    break
                # What is computed while the lane is busy takes longer; the rest of the work is moved back.
                time_us += truth.slowdown * min(time_us - begin, (end - begin) / (1 + truth.slowdown))
            return time_us

        for place in plan.order:
            bucket: Bucket = plan.buckets[place]
            start = max(busy[-1][1] if busy else 0.0, *(ready_us(name) for name in bucket.names))
            lane_us = costs.lane_us(bucket.nbytes, bucket.strategy, bucket.chunks, len(bucket.names))
            busy.append((start, start + lane_us * scale * jitter()))
        started, finished = zip(*busy, strict=True)
        return Step([ready_us(unit.names[0]) for unit in units], list(started), list(finished))

    def jitter(self) -> float:
        return float(np.exp(self.noise * self.rng.standard_normal()))
