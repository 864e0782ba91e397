"""What a tuner may choose from: the exact averages, and every allowed compression at several strengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from commopt.aggregate import Aggregator, Auto, Compressed, Flat, Hierarchical, PowerSGD
from commopt.compress import DGC, Cast, OneBit, Quantize
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
    def ends(self) -> dict[str, Aggregator]:
        """Its weakest and its strongest rung: what the others cost lies between."""
        return {repr(rung): rung for rung in (self.rungs[0], self.rungs[-1])}

    def priced(
        self, prices: Mapping[Key, PriceTable], whole: Layout, dtype: torch.dtype, team: TeamShape
    ) -> dict[Key, PriceTable]:
        """Return a price for every rung from those of the ends: by the bytes sent, which is all they differ in."""
        first, last = (prices[repr(rung), 1] for rung in (self.rungs[0], self.rungs[-1]))
        sent = [_payload(rung, whole, dtype, team) for rung in self.rungs]
        found = {}
        for rung, nbytes in zip(self.rungs, sent, strict=True):
            share = (sent[0] - nbytes) / (sent[0] - sent[-1]) if sent[0] != sent[-1] else 0.0
            found[repr(rung), 1] = _between(first, last, share, whole.numel * dtype.itemsize)
        return found


def exact(team: TeamShape) -> dict[str, Aggregator]:
    """Return the exact averages; the first is what runs before anything is known."""
    return {"flat": Flat()} if team.intra is None else {"flat": Flat(), "hierarchical": Hierarchical()}


def ladders(auto: Auto, team: TeamShape) -> tuple[Ladder, ...]:
    """Return what is allowed beside the exact averages, flat and, where there are two levels, hierarchical."""
    dense = auto.dense
    kinds: dict[str, tuple[tuple[Aggregator, ...], int]] = {
        "bf16": ((Compressed(Cast(torch.bfloat16), None, dense),), 0),
        "quantized": (tuple(Compressed(Quantize(bits), dense=dense) for bits in (8, 4, 2)), 1),
        "onebit": ((Compressed(OneBit(), dense=dense),), 0),
        "dgc": (tuple(Compressed(DGC(density), dense=dense) for density in (0.05, 0.01, 0.001)), 1),
        "powersgd": (tuple(PowerSGD(rank, dense=dense) for rank in (16, 8, 4, 2, 1)), 2),
    }
    forms: dict[str, Callable[[Aggregator], Aggregator]] = {"": lambda way: way}
    if team.intra is not None:
        forms["hierarchical "] = Hierarchical
    return tuple(
        Ladder(prefix + kind, tuple(map(form, rungs)), reference)
        for kind, (rungs, reference) in kinds.items()
        if kind in auto.families
        for prefix, form in forms.items()
    )


def _payload(way: Aggregator, whole: Layout, dtype: torch.dtype, team: TeamShape) -> int:
    sent = way.wire_bytes(whole, dtype, team)
    return sent.intra + sent.inter


def _between(first: PriceTable, last: PriceTable, share: float, largest_nbytes: int) -> PriceTable:
    if share in (0.0, 1.0):
        return last if share else first
    return PriceTable.of(lambda nbytes: (1 - share) * first(nbytes) + share * last(nbytes), max(largest_nbytes, 1))
