# SPDX-License-Identifier: Apache-2.0
"""`StepWeights`: what each rank's gradients count for in a step, by one scalar exchanged beside forward."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import fsum, isfinite
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate.base import call
from commopt.attached.rank_table import RankTable
from commopt.attached.reduction import SentBytes
from commopt.errors import CommoptError, ConfigurationError
from commopt.groups import Team
from commopt.lanes import Agreement, LaneClient
from commopt.schedule.reducer import is_capturing

_log = logging.getLogger("commopt")

_MISSING, _INVALID = -1.0, -2.0  # what a rank sends that has no weight


def read_weight(weight: Any) -> float:
    """Return a weight as a float. Raises ConfigurationError for what is no finite number, 0 or more."""
    given = weight.detach() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    numeric = isinstance(given, Tensor | int | float) or hasattr(given, "__float__")
    try:
        value = float("nan") if isinstance(given, bool | str) or not numeric else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = float("nan")
    if not isfinite(value) or value < 0:
        raise ConfigurationError(
            f"weight({weight!r}) must be a finite number, 0 or more: the samples or tokens that this rank's gradients "
            f"are the mean of, for example comm.weight(len(batch)); 0 where it has none"
        )
    return value


def factor_of(weights: Sequence[float], place: int) -> float:
    """Return n size / sum(n) of one of several ranks: exactly 1 where all are equal, 0 where all have none."""
    total = fsum(weights)
    return weights[place] * len(weights) / total if total else 0.0


class StepWeights:
    """The weights of one model's ranks; `CommState.weight` says what users may rely on.

    Nobody exchanges anything before the first `give`. All ranks must give from the same step on, as the store then
    compares; who gives none later sends that, so that all ranks raise.

    sent: counts the payload.
    """

    def __init__(self, sent: SentBytes) -> None:
        self._sent = sent
        self._given: float | None = None  # since the last averaged backward
        self._problem: ConfigurationError | None = None
        self._agreement: Agreement | None = None  # that all ranks give weights, of the first step with any
        self._exchange: RankTable | None = None  # of the step under way
        self._alone: float | None = None  # the weight of a rank whose gradients are averaged with nobody's
        self._found: list[float] | None = None  # of the step under way, once looked at
        self._warned = False
        self.used = False  # whether ranks give weights; asked in every step

    def give(self, weight: Any) -> None:
        """Add to this rank's weight in the next averaged backward. Raises ConfigurationError for what is no weight."""
        if self._exchange is not None or self._alone is not None:  # of a backward that never came to its end
            self.end()
        self.used = True
        try:
            self._given = (self._given or 0.0) + read_weight(weight)
        except ConfigurationError as error:
            self._given, self._problem = _INVALID, error
            raise

    @property
    def given(self) -> bool:
        """Whether this rank has a weight for the next averaged backward."""
        return self._given is not None

    def begin(
        self, client: LaneClient, team: Team | None, steps: int, device: torch.device, *, shadowed: bool = False
    ) -> None:
        """Start the exchange of the step after `steps` averaged backwards, unless it was; all ranks of `team` alike.

        team: the ranks whose gradients are averaged, None for this one alone. device: of the gradients. shadowed: this
        rank has run out of data and follows others, in DDP's join(): its weight is 0.
        """
        if self._exchange is not None or self._alone is not None or not self.used:
            return
        if is_capturing():
            raise ConfigurationError(
                "a CUDA graph would repeat this step's weight() for ever; capture steps without weights only"
            )
        own = (0.0 if shadowed else _MISSING) if self._given is None else self._given
        if self._agreement is None:
            self._agreement = client.agree(f"the first weight(), after {steps} averaged backwards", self._problem)
        if team is None:
            self._alone = own
            return
        exchange = RankTable(torch.zeros(team.size, 1, dtype=torch.float64, device=device))
        run = self._agreement.guard(lambda: exchange.gather(team, exchange.table.new_full((1,), own)))
        exchange.pending = client.submit(f"weights of step {steps}", run, exchange.table)
        self._sent.count_calls(("weights", team.level), lambda: call(team, "all_gather", 8), team)
        self._exchange = exchange

    def found(self, client: LaneClient, team: Team | None, steps: int) -> list[float]:
        """Return the weights of the ranks of `team`, in their order, once the exchange that has begun is over.

        Raises ConfigurationError, on all ranks, where one of them has given no weight, and
        MismatchError where only some have begun to.
        """
        if self._found is None:
            assert self._agreement is not None
            try:
                self._agreement.wait()
            except CommoptError:
                self._agreement = None  # to be reached by another step, if there is one
                self.used = self._given is not None
                raise
            rows = [[self._alone]] if self._exchange is None else self._exchange.rows()
            self._found = self._checked([row[0] for row in rows if row[0] is not None], client, team, steps)
            if not any(self._found) and not self._warned:
                self._warned = True
                _log.warning("weight(0) on every rank: the average of such a step is zero")
        return self._found

    @property
    def total(self) -> float | None:
        """The sum of the weights in the step under way; None where there are none, or nobody has asked for them."""
        return None if self._found is None else fsum(self._found)

    def end(self) -> None:
        """Forget the weights of a step that is complete."""
        self._given = self._problem = self._exchange = self._alone = self._found = None
        self.used = self._agreement is not None

    def _checked(self, weights: list[float], client: LaneClient, team: Team | None, steps: int) -> list[float]:
        ranks = (client.membership.global_rank,) if team is None else team.ranks
        for value, what in ((_INVALID, "a weight() that is no number, 0 or more"), (_MISSING, "no weight()")):
            at_fault = [str(rank) for rank, weight in zip(ranks, weights, strict=True) if weight == value]
            if at_fault:
                raise ConfigurationError(
                    f"rank {', '.join(at_fault)} gave {what} for the step after {steps} averaged backwards, and others "
                    f"did; call comm.weight(n) on every rank before each backward that is averaged, 0 for no samples"
                )
        return weights
