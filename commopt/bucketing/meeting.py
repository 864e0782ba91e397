"""Where the ranks put together what they measured, and hear what rank 0 makes of it; on the lane, collectively."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

import numpy as np
from torch import Tensor

from commopt.bucketing.calibration import Points, packing_us_per_byte
from commopt.bucketing.methods import Decider, Method
from commopt.bucketing.prices import expected_s, measured_points, prices_from_links, prices_from_points
from commopt.bucketing.units import Units
from commopt.bucketing.window import Latest, latest, own_times
from commopt.bucketing.wish import Wish
from commopt.feedback import Layout
from commopt.groups import Team, broadcast_bytes
from commopt.plan import Bucket, Calendar, Costs, Decision, Faithfulness, Key, PriceTable, Tuned, Window
from commopt.recording import StepRecord

_log = logging.getLogger("commopt")

_NOTICED_S = 1.0  # a training that stands still for so long looks like one that hangs


@dataclass(frozen=True)
class Agenda:
    """What all ranks know alike: the step after which they meet, the steps that were measured, and what these sent.

    settled: whether the last of them had the buckets that were expected. gradients: averages, with what lies where.
    fidelity: how well compressed updates follow them, on this rank, None where nothing is compressed.
    tuned: what tuning has come to.
    """

    step: int
    steps: range
    units: Units
    messages: tuple[Bucket, ...]
    layouts: tuple[Layout, ...]
    settled: bool
    overhead_us: float
    gradients: Sequence[tuple[Layout, Tensor]]
    fidelity: Callable[[], Faithfulness | None]
    tuned: Tuned | None

    @property
    def whole(self) -> Layout:
        """All parameters, as if they were one bucket."""
        return Layout(tuple(piece for bucket in self.layouts for piece in bucket.pieces))


class Meetings:
    """All meetings of one registration. On the first rank, which `chairs`, they add up to a Decider.

    decision: of the last one, None when the first rank could not decide.
    """

    def __init__(self, team: Team, method: Method, wish: Wish) -> None:
        self.decision: Decision | None = None
        self.step = 0
        self._team = team
        self._method = method
        self._wish = wish
        self._points: dict[Key, Points] | None = None
        self._packing_us_per_byte = 0.0
        self._prices: dict[Key, PriceTable] | None = None
        self._decider: Decider | None = None

    @property
    def chairs(self) -> bool:
        """Whether this rank decides."""
        return self._team.rank == 0

    def begin_anew(self) -> None:
        """Forget what was measured and decided so far, but for prices."""
        self._decider = None

    def hold(self, agenda: Agenda, records: Sequence[StepRecord], ready_us: Mapping[int, Mapping[str, float]]) -> None:
        """Meet: afterwards `decision` is the same on every rank."""
        team = self._team
        known = {record.step: record for record in records} if agenda.settled else {}
        own = own_times(known, ready_us, agenda.steps, agenda.units.names, len(agenda.messages))
        times, lateness_us = latest(team, own)
        if self.decision is not None and self.decision.try_out:
            self._points = self._prices = None
        if self._points is None:
            by_links = self._wish.links is not None
            self._points = {} if by_links else self._try_out(agenda, times)
            if not agenda.units.single:
                self._packing_us_per_byte = packing_us_per_byte(agenda.units.dtype, team)
        answer = b""
        if self.chairs:
            try:
                answer = self._decide(agenda, times, lateness_us).to_json().encode()
            except Exception:  # a plan is worth having, but not at the price of the training
                _log.exception("no plan could be made after step %d; buckets stay as they are", agenda.step)
        answer = broadcast_bytes(team, answer, 0)
        self.decision = Decision.from_json(answer.decode()) if answer else None
        self.step = agenda.step

    def _decide(self, agenda: Agenda, times: Latest, lateness_us: Sequence[float]) -> Decision:
        window = Window.of(
            agenda.units.untimed(),
            agenda.messages,
            times.begin_us,
            times.compute_end_us,
            times.ready_us,
            times.started_us,
            times.finished_us,
            lateness_us,
        )
        priced = self._prices is not None
        if self._prices is None:
            self._prices = self._price(agenda)
        costs = Costs(self._prices, agenda.overhead_us, self._packing_us_per_byte)
        if self._decider is None:
            try:
                self._decider = self._method.decider(costs, agenda.gradients, agenda.tuned)
            except FloatingPointError as error:  # as a GradScaler has them while it looks for its scale
                calendar = Calendar(agenda.step + 1, agenda.step + len(agenda.steps))
                return Decision(None, calendar, f"measuring again: {error}")
        elif not priced:
            self._decider.reprice(costs)
        return self._decider.decide(replace(window, fidelity=agenda.fidelity()), agenda.step)

    def _try_out(self, agenda: Agenda, times: Latest) -> dict[Key, Points]:
        method = self._method
        what = (method.tried_out, method.in_chunks, method.budget_s, agenda.whole, agenda.units.dtype, self._team)
        wait_s = expected_s(*what, _us_per_byte(times, agenda.messages)) if self.chairs else 0.0
        if self.chairs:
            _log.log(_level(wait_s), "training waits for about %.1f s: measuring what messages take here", wait_s)
        begun_s = perf_counter()
        points = measured_points(*what)
        if self.chairs:
            took_s = perf_counter() - begun_s
            _log.log(
                _level(max(wait_s, took_s)), "measured in %.1f s what messages take here; training goes on", took_s
            )
        return points

    def _price(self, agenda: Agenda) -> dict[Key, PriceTable]:
        method, dtype = self._method, agenda.units.dtype
        if self._wish.links is not None:
            return prices_from_links(method.strategies, agenda.whole, dtype, self._team, self._wish.links)
        return method.priced(prices_from_points(self._points or {}, agenda.whole, dtype), agenda.whole, dtype)


def _us_per_byte(times: Latest, messages: Sequence[Bucket]) -> float:
    """Return what a byte took in the steps that were measured, inf where none was."""
    took_us = (times.finished_us - times.started_us).sum(axis=1)
    known_us = took_us[~np.isnan(took_us)]
    return float(np.median(known_us)) / sum(bucket.nbytes for bucket in messages) if len(known_us) else inf


def _level(wait_s: float) -> int:
    """Return how loud to be: without logging set up only warnings are seen, and nobody looks for the cause of less."""
    return logging.WARNING if wait_s >= _NOTICED_S else logging.INFO
