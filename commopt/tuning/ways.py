"""Ways of averaging all gradients of a step: which are worth a trial, by prediction, and what trials made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from commopt.plan import Bucket, Costs, Measured, Plan, Tried, Unit, best_plan, best_plan_within, simulate
from commopt.tuning.candidates import Ladder
from commopt.tuning.losses import Losses

EXACT = "lossless"


@dataclass(frozen=True)
class Way:
    """A plan of a kind, how much of the gradient it leaves out, and how it did if it was tried.

    exact: whether nothing can be left out; on one gradient, what is lossy may happen to leave nothing out either.
    variation: how it differs from the plan of the kind that is tried first. expected: of the step and its exposed
    part, in microseconds, before it was tried.
    """

    kind: str
    plan: Plan
    exact: bool
    error: float = 0.0
    variation: str = ""
    expected: tuple[float, float] | None = None
    measured: Measured | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.kind}, {self.variation}" if self.variation else self.kind

    @property
    def step_us(self) -> float:
        """What its step took; it must have been tried."""
        assert self.measured is not None
        return self.measured.step.value

    def prediction(self, base: Measured, costs: Costs) -> tuple[float, float]:
        """Return the step and its exposed part that are to be expected, in microseconds, where `base` was measured.

        They differ from those as the simulated steps do: what costs do not know about is the same in both.
        """
        then = simulate(base.units, self.plan.buckets, costs, self.plan.order)
        saved_us = base.expected(costs).finish_us - then.finish_us
        return max(0.0, base.step.value - saved_us), max(0.0, base.exposed.value - saved_us)

    def disappoints(self, share: float) -> bool:
        """Return whether its step took more than `share` of what was expected before it was tried."""
        return self.expected is not None and self.measured is not None and self.step_us > share * self.expected[0]

    def told(self, base: Measured, costs: Costs) -> Tried:
        """Return what is known of it as data."""
        step_us, exposed_us = self.expected or self.prediction(base, costs)
        nbytes: Counter[str] = Counter()
        for bucket in self.plan.buckets:
            nbytes[bucket.strategy] += bucket.nbytes
        tried = Tried(self.name, tuple(nbytes.items()), self.error, step_us, exposed_us)
        if self.measured is None:
            return tried
        return replace(tried, step_us=self.measured.step.value, exposed_us=self.measured.exposed.value)


@dataclass(frozen=True)
class Proposals:
    """All there is to choose from. max_error: see Auto. max_bytes: of a bucket of several units.

    exact: the strategies that leave nothing out, as plans call them, by the names they have here.
    """

    exact: Mapping[str, str]
    ladders: Sequence[Ladder]
    losses: Losses
    max_error: float | None
    max_bytes: int

    def ways(self, units: Sequence[Unit], costs: Costs) -> list[Way]:
        """Return the best plan of each kind, no two alike."""
        kinds = [*([EXACT] if len(self.exact) > 1 else []), *self.exact, *(ladder.name for ladder in self.ladders)]
        found: dict[frozenset[tuple[frozenset[str], str, int]], Way] = {}
        for kind in kinds:
            way = self.best(kind, units, costs)
            found.setdefault(way.plan.contents, way)
        return list(found.values())

    def best(self, kind: str, units: Sequence[Unit], costs: Costs) -> Way:
        """Return the best plan of one kind: a strategy's, all exact ones', or a ladder's beside the exact ones."""
        ladder = next((ladder for ladder in self.ladders if ladder.name == kind), None)
        if ladder is None:
            chosen = list(self.exact.values()) if kind == EXACT else [self.exact[kind]]
            return self.way(kind, best_plan(units, costs.only(chosen), self.max_bytes))
        strategies = [*self.exact.values(), *ladder.strategies]
        energies = self.losses.energies(strategies, units)
        # What encodes some gradient to no number limits the others all the same.
        limit = sum(filter(isfinite, energies[ladder.limit]))
        if self.max_error is not None:
            limit = self.max_error**2 * sum(self.losses.squares.values())
        return self.way(kind, best_plan_within(units, costs.only(strategies), energies, limit, self.max_bytes))

    def plain(self, kind: str, buckets: Sequence[Bucket]) -> Way | None:
        """Return these buckets at one strength of a kind, the most that the limit allows; None where none does."""
        ladder = next((ladder for ladder in self.ladders if ladder.name == kind), None)
        if ladder is None:
            return None
        rungs = [ladder.limit] if self.max_error is None else [repr(rung) for rung in reversed(ladder.rungs)]
        for rung in rungs:
            same = tuple(replace(bucket, strategy=rung, chunks=1) for bucket in buckets)
            if self.max_error is None or self.losses.error(same) <= self.max_error:
                return self.way(kind, Plan(same, origin="measured"))
        return None

    def way(self, kind: str, plan: Plan) -> Way:
        """Return what a plan is, as a way of some kind."""
        return Way(kind, plan, not self.lossy_kinds(plan), self.losses.error(plan.buckets))

    def lossy_kinds(self, plan: Plan) -> set[str]:
        """Return the ladders that a plan makes use of."""
        used = {bucket.strategy for bucket in plan.buckets}
        return {ladder.name for ladder in self.ladders if used & ladder.strategies.keys()}
