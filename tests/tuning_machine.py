"""A machine in the model of the planner that is tuned: exact averages, and compression at three strengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from commopt import Compressed, Quantize
from commopt.plan import Costs, Faithfulness, Plan, Tuned, Window
from commopt.tuning import Ladder, Losses, Proposals, Tuning
from tests.plan_machine import LARGEST_BYTES, UNITS, Machine, line

LADDER = Ladder("quantized", (Compressed(Quantize(8)), Compressed(Quantize(4)), Compressed(Quantize(2))), 1)
EIGHT, FOUR, TWO = LADDER.strategies
PRICES = {
    ("flat", 1): line(1500.0, 4e-3),
    ("hierarchical", 1): line(3000.0, 3e-3),
    (EIGHT, 1): line(3000.0, 1.0e-3),
    (FOUR, 1): line(3000.0, 0.5e-3),
    (TWO, 1): line(3000.0, 0.25e-3),
}
NAMES = [name for unit in UNITS for name in unit.names]
LOSSES = Losses(
    {EIGHT: dict.fromkeys(NAMES, 0.0001), FOUR: dict.fromkeys(NAMES, 0.01), TWO: dict.fromkeys(NAMES, 0.16)},
    dict.fromkeys(NAMES, 1.0),
)
EXACT = {"flat": "flat", "hierarchical": "hierarchical"}
FOLLOWS = Faithfulness(cosine=0.9, residual_norm=1.0)


@dataclass
class TunedMachine(Machine):
    """A machine under a Tuning; `fidelity`: what its windows show from each step on."""

    costs: Costs = field(default_factory=lambda: Costs(PRICES, overhead_us=100.0))
    ladders: tuple[Ladder, ...] = (LADDER,)
    max_error: float | None = None
    max_trials: int = 4
    adopted: Tuned | None = None
    fidelity: Mapping[int, Faithfulness] = field(default_factory=lambda: {0: FOLLOWS})

    def __post_init__(self) -> None:
        super().__post_init__()
        allow = ("lossless", "quantized") if self.ladders else ("lossless",)
        names = [*EXACT, *(name for ladder in self.ladders for name in ladder.strategies)]
        costs = self.costs.only(names)
        self.adaptation = Tuning(self.proposals, costs, allow, self.max_trials, (2, 2), self.adopted)
        self.calendar = Tuning.first
        if self.adopted is not None and self.adopted.plan is not None:
            self.plan = self.adopted.plan

    @property
    def proposals(self) -> Proposals:
        return Proposals(EXACT, self.ladders, LOSSES, self.max_error, LARGEST_BYTES)

    def window(self) -> Window:
        if self.log and self.log[-1][1].try_out:
            self.adaptation.reprice(self.conditions(self.calendar.meet_at)[1])
        shown = [value for step, value in self.fidelity.items() if step <= self.calendar.meet_at]
        return replace(super().window(), fidelity=shown[-1])

    @property
    def tuned(self) -> Tuned:
        found = [decision.tuned for _, decision in self.log if decision.tuned is not None]
        assert found, self.log
        return found[-1]

    @property
    def tuned_after(self) -> int:
        """How many steps it took."""
        return next(step for step, decision in self.log if decision.tuned is not None) + 1

    def every_plan(self) -> list[Plan]:
        """All that could be chosen, by one who knows what messages really cost."""
        units, costs = self.conditions(0)
        return [way.plan for way in self.proposals.ways(units, costs)]
