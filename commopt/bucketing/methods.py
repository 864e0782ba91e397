"""How plans come about: the best buckets for what the user chose, or a search for what to choose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Auto, auto_of
from commopt.bucketing.calibration import LARGEST_NBYTES
from commopt.bucketing.strategies import strategies_for
from commopt.bucketing.wish import Wish
from commopt.feedback import Layout
from commopt.groups import Team
from commopt.plan import Adaptation, Calendar, Costs, Decision, Key, PriceTable, Tuned, Window
from commopt.tuning import Ladder, Losses, Proposals, Tuning, exact, ladders, unit_energies

_BUDGET_S = 2.0
_BUDGET_OF_EACH_S = 1.0


class Decider(Protocol):
    """Decides on rank 0 from windows of measurements."""

    def decide(self, window: Window, step: int) -> Decision:
        """Decide after `step`."""

    def reprice(self, costs: Costs) -> None:
        """Go by new trials of what messages cost, asked for with Decision.try_out."""


class Method(ABC):
    """What plans may choose from, and who chooses.

    strategies: by the names they have in plans; the first is what is used without one. tried_out: those of them whose
    price is measured, in about budget_s seconds; in_chunks: those of these that are also tried in chunks.
    first: when to measure first, counted from the first step.
    """

    strategies: Mapping[str, Aggregator]
    tried_out: Mapping[str, Aggregator]
    in_chunks: Sequence[str]
    budget_s: float
    first: Calendar

    def priced(self, prices: dict[Key, PriceTable], whole: Layout, dtype: torch.dtype) -> dict[Key, PriceTable]:
        """Return prices of all strategies from those of what was tried out."""
        return prices

    @abstractmethod
    def decider(self, costs: Costs, gradients: Sequence[tuple[Layout, Tensor]], tuned: Tuned | None) -> Decider:
        """Return who decides; `gradients` are the averages of the last step, `tuned` what tuning came to before.

        Raises FloatingPointError when it needs gradients that are finite and not all zero, and these are not.
        """


class Adapting(Method):
    """Keep what the user chose, in the buckets that finish first."""

    budget_s = _BUDGET_S

    def __init__(self, aggregator: Aggregator, team: Team, wish: Wish) -> None:
        self.first = Adaptation.first
        self.strategies = self.tried_out = strategies_for(aggregator, team)
        self.in_chunks = tuple(self.strategies)
        self._needed_first = wish.needed_first

    def decider(self, costs: Costs, gradients: Sequence[tuple[Layout, Tensor]], tuned: Tuned | None) -> Decider:
        """See Method."""
        # No bucket larger than what was tried: scratch grows with the largest.
        return Adaptation(costs, LARGEST_NBYTES, self._needed_first)


class Choosing(Method):
    """Search what Auto allows."""

    first = Tuning.first

    def __init__(self, auto: Auto, team: Team) -> None:
        self._auto, self._team = auto, team
        self._exact: Mapping[str, Aggregator] = exact(team)
        self._ladders: tuple[Ladder, ...] = ladders(auto, team)
        exact_ones = {repr(way): way for way in self._exact.values()}
        self.in_chunks = tuple(exact_ones)
        self.strategies = exact_ones | {name: way for each in self._ladders for name, way in each.strategies.items()}
        self.tried_out = exact_ones | {name: way for each in self._ladders for name, way in each.tried_out.items()}
        self.budget_s = _BUDGET_OF_EACH_S * len(self.tried_out)

    def priced(self, prices: dict[Key, PriceTable], whole: Layout, dtype: torch.dtype) -> dict[Key, PriceTable]:
        """See Method."""
        between = {(name, 1) for name in self.strategies} - prices.keys()
        for ladder in self._ladders:
            made = ladder.priced(prices, whole, dtype, self._team)
            prices = {key: table for key, table in made.items() if key in between} | prices
        return prices

    def decider(self, costs: Costs, gradients: Sequence[tuple[Layout, Tensor]], tuned: Tuned | None) -> Decider:
        """See Method."""
        losses = self._losses(gradients) if self._ladders else Losses({}, {})
        exact_names = {name: repr(way) for name, way in self._exact.items()}
        proposals = Proposals(exact_names, self._ladders, losses, self._auto.max_error, LARGEST_NBYTES)
        nodes = self._team.ranks_per_node
        return Tuning(proposals, costs, tuple(self._auto.allow), self._auto.max_trials, nodes, tuned)

    def _losses(self, gradients: Sequence[tuple[Layout, Tensor]]) -> Losses:
        names = [piece.name for layout, _ in gradients for piece in layout.pieces]
        lossy = {name: way for each in self._ladders for name, way in each.strategies.items()}
        left_out, squares = unit_energies(lossy, gradients, [(name,) for name in names])
        return Losses(
            {strategy: dict(zip(names, each, strict=True)) for strategy, each in left_out.items()},
            dict(zip(names, squares, strict=True)),
        )


def method_for(aggregator: Aggregator, team: Team, wish: Wish) -> Method:
    """Return how plans for what `aggregator` averages come about."""
    auto = auto_of(aggregator)
    return Adapting(aggregator, team, wish) if auto is None else Choosing(auto, team)
