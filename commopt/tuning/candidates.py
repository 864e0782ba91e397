"""What a tuner may choose from: the exact averages, and every allowed compression at several strengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from commopt.aggregate import Aggregator, Auto, Flat, Hierarchical, families
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.plan import Key, PriceTable


@dataclass(frozen=True)
class Ladder:
    """One kind of compression in one form, the weakest first.

    reference: which of the rungs sets the limit of the error: no more in all than if it were used everywhere.
    """

    name: str
    rungs: tuple[Aggregator, ...]
    reference: int

    @property
    def strategies(self) -> dict[str, Aggregator]:
        """Its rungs by the names they have in plans."""
        return {repr(rung): rung for rung in self.rungs}

    @property
    def limit(self) -> str:
        """The name of the rung that sets the limit."""
        return repr(self.rungs[self.reference])

    @property
    def tried_out(self) -> dict[str, Aggregator]:
        """Its weakest rung, the one that sets the limit, and its strongest: what the others cost lies between."""
        return {repr(rung): rung for rung in (self.rungs[0], self.rungs[self.reference], self.rungs[-1])}

    def priced(
        self, prices: Mapping[Key, PriceTable], whole: Layout, dtype: torch.dtype, team: TeamShape
    ) -> dict[Key, PriceTable]:
        """Return a price for every rung from those that were tried out: by the bytes sent, between the nearest two."""
        sent = {repr(rung): _payload(rung, whole, dtype, team) for rung in self.rungs}
        found = {}
        for weaker, stronger in pairwise(self.tried_out):
            for name in _stretch(list(sent), weaker, stronger):
                between = sent[weaker] - sent[stronger]
                share = (sent[weaker] - sent[name]) / between if between else 0.0
                table = _between(prices[weaker, 1], prices[stronger, 1], share, whole.numel * dtype.itemsize)
                found[name, 1] = table
        return found or {(name, 1): prices[name, 1] for name in sent}


def exact(team: TeamShape) -> dict[str, Aggregator]:
    """Return the exact averages; the first is what runs before anything is known."""
    return {"flat": Flat()} if team.intra is None else {"flat": Flat(), "hierarchical": Hierarchical()}


def ladders(auto: Auto, team: TeamShape) -> tuple[Ladder, ...]:
    """Return what is allowed beside the exact averages, flat and, where there are two levels, hierarchical."""
    known = families()
    forms: dict[str, Callable[[Aggregator], Aggregator]] = {"": lambda way: way}
    if team.intra is not None:
        forms["hierarchical "] = Hierarchical
    return tuple(
        Ladder(prefix + kind, tuple(form(rung.with_dense(auto.dense)) for rung in trials.strengths), trials.usual)
        for kind, trials in known.items()
        if kind in auto.allow
        for prefix, form in forms.items()
    )


def _payload(way: Aggregator, whole: Layout, dtype: torch.dtype, team: TeamShape) -> int:
    sent = way.wire_bytes(whole, dtype, team)
    return sent.intra + sent.inter


def _stretch(names: list[str], first: str, last: str) -> list[str]:
    return names[names.index(first) : names.index(last) + 1]


def _between(first: PriceTable, last: PriceTable, share: float, largest_nbytes: int) -> PriceTable:
    if share in (0.0, 1.0):
        return last if share else first
    return PriceTable.of(lambda nbytes: (1 - share) * first(nbytes) + share * last(nbytes), max(largest_nbytes, 1))
