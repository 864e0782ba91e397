# SPDX-License-Identifier: Apache-2.0
"""Synchronisation points: the ranks put their measurements together and rank 0 decides; collective, on the lane."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, Flat, Hierarchical, auto_of
from commopt.compress import Candidates
from commopt.cost import Links
from commopt.feedback import ExactSample, Layout
from commopt.groups import Team, broadcast_bytes
from commopt.recording import GradientTimes, Recorder
from commopt.schedule.calibration import (
    HURRIED_NBYTES,
    LARGEST_NBYTES,
    Points,
    calibrate,
    prices_from_links,
    prices_from_points,
    samples_of,
)
from commopt.schedule.candidates import (
    Candidate,
    allowed_families,
    alternatives,
    available,
    local_messages,
    one_of_each,
)
from commopt.schedule.costs import Costs
from commopt.schedule.decision import WINDOW_STEPS, Decision, Tuned, Window
from commopt.schedule.measure import StepTable, latest, own_times
from commopt.schedule.measurement import Measurement
from commopt.schedule.plan import Plan, Unit
from commopt.schedule.search import Search

_log = logging.getLogger("commopt")

_NOTICED_S = 3.0  # a training that stands still for so long looks like one that hangs
_BUDGET_OF_EACH_S = 1.0
_BUDGET_AT_A_LOOK_S = 0.15  # of each
_PLAIN = {repr(Flat()): "flat", repr(Hierarchical()): "hierarchical"}


@dataclass(frozen=True)
class SyncPoint:
    """The facts at a synchronisation point, alike on all ranks but for the values of samples and times.

    step: the last one before it.
    window: the steps that were measured, up to this one.
    gradient_times: of this rank in them.
    strategy: the repr of the aggregator of the last step.
    gradients: the averages of the last step by bucket, with their layouts.
    settled: whether the last step had the buckets of the one before.
    movable: whether DDP can be given other buckets.
    overhead_us: the cost of each bucket on the host.
    tuned: the result of tuning so far.
    exact_sample: how far compressed averages are behind exact ones; None where nobody compares.
    optimizer: as Tuned has it.
    """

    step: int
    window: Window
    gradient_times: GradientTimes | None
    strategy: str
    gradients: Sequence[tuple[Layout, Tensor]]
    settled: bool
    movable: bool
    overhead_us: float
    tuned: Tuned | None
    exact_sample: ExactSample | None = None
    optimizer: str = ""

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The smallest things that can move: gradients or, where these have to stay, DDP's buckets."""
        return tuple(
            Unit(
                tuple(piece.name for piece in pieces), sum(each.numel for each in pieces) * buffer.itemsize, 0.0, dtype
            )
            for layout, buffer in self.gradients
            for pieces in ([(piece,) for piece in layout.pieces] if self.movable else [layout.pieces])
            for dtype in [str(buffer.dtype)]
        )

    @cached_property
    def plan(self) -> Plan:
        """The messages as they were sent."""
        groups = (tuple(piece.name for piece in layout.pieces) for layout, _ in self.gradients)
        return Plan(tuple(groups), self.strategy, "found")

    @cached_property
    def whole(self) -> Layout:
        """All parameters, as if they were one bucket."""
        return Layout(tuple(piece for layout, _ in self.gradients for piece in layout.pieces))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of most bytes."""
        nbytes: Counter[torch.dtype] = Counter()
        for _, buffer in self.gradients:
            nbytes[buffer.dtype] += buffer.nbytes
        return nbytes.most_common(1)[0][0]

    def steps_behind(self) -> float | None:
        """Return how far compressed averages are behind exact ones; waits for the device."""
        return None if self.exact_sample is None else self.exact_sample.steps_behind()


class Coordinator:
    """Decides at all synchronisation points of one registration; rank 0 does so with a Search.

    decision: of the last point. None if rank 0 could not decide or, after a look, if there is nothing to change.
    step: after which the last decision was made.
    is_leader: whether this is rank 0.
    """

    def __init__(self, team: Team, aggregator: Aggregator, links: Links | None, recorder: Recorder) -> None:
        self.decision: Decision | None = None
        self.step = 0
        self.is_leader = team.rank == 0
        self._team = team
        self._strategies = available(aggregator, team)
        self._links = links
        self._recorder = recorder
        self._auto = auto_of(aggregator)
        self._alike = alternatives(aggregator, team)
        self._families = allowed_families(aggregator, team)
        self._local = local_messages(aggregator, team)
        self._candidates: list[Candidate] | None = None
        self._points: dict[str, Points] | None = None
        self._search: Search | None = None
        self._retime = False  # messages before the next decision

    def restart(self) -> None:
        """Forget measurements and decisions, but keep the times of messages."""
        self._search = None

    def look(self, point: SyncPoint) -> None:
        """Set `decision`, the same on every rank: whether to leave a strategy that falls behind exact averages."""
        self.decision = self._from_leader(
            point,
            lambda point: None if self._search is None else self._search.look(point.steps_behind(), point.step),
        )
        if self.decision is not None:
            self.step = point.step

    def decide(self, point: SyncPoint) -> None:
        """Set `decision`, the same on every rank, by the window that ends with the point."""
        steps = range(point.window.first_step, point.step + 1)
        usable = point.settled or len(steps) == 1  # a step has had buckets other than the one before
        records = {record.step: record for record in self._recorder.steps()} if usable else {}
        ready_us = {} if point.gradient_times is None else point.gradient_times.times_us()
        own = own_times(records, ready_us, steps, point.units, len(point.gradients))
        times = latest(self._team, own)
        retime, self._retime = self._retime, False
        self.step = point.step
        self.decision = None
        if self._candidates is None or point.strategy not in [each.strategy for each in self._candidates]:
            answer = json.loads(self._text_from_leader(point, self._find_candidates) or '""')
            if isinstance(answer, str):
                if answer:  # a gradient is not finite, as while a GradScaler looks for its scale
                    window = Window(point.step + 1, point.step + len(steps))
                    self.decision = Decision(None, window, f"measuring again: {answer}")
                return
            self._candidates = [Candidate(**entry) for entry in answer]
            self._points = None
            self._search = None
        aggregators = {each.strategy: self._strategies[each.strategy] for each in self._candidates} | self._local
        retimed = self._points is None or retime
        if retimed:
            self._points = {} if self._links is not None else self._time_messages(point, aggregators)
        self.decision = self._from_leader(
            point, lambda point: self._search_on(point, aggregators, times, retimed=retimed)
        )
        self._retime = self.decision is not None and self.decision.retime

    def _from_leader(self, point: SyncPoint, decide: Callable[[SyncPoint], Decision | None]) -> Decision | None:
        """Return rank 0's decision on every rank."""

        def as_text(point: SyncPoint) -> str:
            decision = decide(point)
            return "" if decision is None else decision.to_json()

        text = self._text_from_leader(point, as_text)
        return Decision.from_json(text) if text else None

    def _text_from_leader(self, point: SyncPoint, write: Callable[[SyncPoint], str]) -> str:
        """Return rank 0's text, "" where it fails: a plan is worth having, but not at the price of the training."""
        text = ""
        if self.is_leader:
            try:
                text = write(point)
            except Exception:
                _log.exception("no plan could be made after step %d; buckets stay as they are", point.step)
        return broadcast_bytes(self._team, text.encode() if self.is_leader else None, 0).decode()

    def _find_candidates(self, point: SyncPoint) -> str:
        """Return the candidates as JSON, or why they cannot be known yet."""
        found = [Candidate(_PLAIN.get(name, str(each)), name) for name, each in self._alike.items()]
        if self._auto is not None:
            try:
                known = (point.gradients, point.optimizer, self._team)
                found += one_of_each(self._families, *known) if self._families else []
                if point.strategy not in [each.strategy for each in found]:
                    # The choice of an earlier run, of another strength of the family.
                    running = self._strategies[point.strategy]
                    alone = Candidates(str(running), (running,))
                    found += one_of_each([alone], *known)
            except FloatingPointError as error:
                return json.dumps(str(error))
        return json.dumps([asdict(each) for each in found])

    def _costs(self, point: SyncPoint, aggregators: Mapping[str, Aggregator]) -> Costs:
        if self._links is not None:
            prices = prices_from_links(aggregators, point.whole, point.dtype, self._team, self._links)
        else:
            prices = prices_from_points(self._points or {}, point.whole, point.dtype)
        return Costs(prices, point.overhead_us)

    def _search_on(
        self, point: SyncPoint, aggregators: Mapping[str, Aggregator], times: StepTable, *, retimed: bool
    ) -> Decision:
        """Return the decision of the search. retimed: whether messages have just been timed."""
        measured = Measurement.of(point.plan, point.units, times)
        if self._search is None:
            self._search = self._new_search(point, self._costs(point, aggregators))
        elif retimed:
            self._search.costs = self._costs(point, aggregators)
        measured = replace(measured, steps_behind=point.steps_behind(), movable=point.movable)
        return self._search.decide(measured, point.step)

    def _new_search(self, point: SyncPoint, costs: Costs) -> Search:
        # No message larger than those that were timed: scratch grows with the largest.
        if self._auto is None:
            return Search(self._candidates or [], costs, LARGEST_NBYTES)
        return Search(
            self._candidates or [],
            costs,
            LARGEST_NBYTES,
            max_trials=self._auto.max_trials,
            allow=tuple(self._auto.allow),
            nodes=self._team.ranks_per_node,
            adopted=point.tuned,
            optimizer=point.optimizer,
            stock=_sends_as_stock(self._team, point.dtype),
        )

    def _time_messages(self, point: SyncPoint, aggregators: Mapping[str, Aggregator]) -> dict[str, Points]:
        looks = point.window.steps < WINDOW_STEPS
        first = (HURRIED_NBYTES,) if looks else ()
        samples = samples_of(point.whole, point.dtype.itemsize, *first)
        budget_s = len(aggregators) * (_BUDGET_AT_A_LOOK_S if looks else _BUDGET_OF_EACH_S)
        if self.is_leader:
            # Without logging set up only warnings are seen, and nobody looks for the cause of a short wait.
            level = logging.WARNING if budget_s >= _NOTICED_S else logging.INFO
            _log.log(level, "training waits for up to %.1f s: timing messages here", budget_s)
        begun_s = perf_counter()
        points = calibrate(aggregators, samples, point.dtype, self._team, budget_s, hurried=looks)
        if self.is_leader:
            _log.info("timed messages here in %.1f s; training continues", perf_counter() - begun_s)
        return points


def _sends_as_stock(team: Team, dtype: torch.dtype) -> bool:
    """Return whether Flat() makes DDP's own calls: not where its ring goes node by node and DDP's by rank.

    Nor with 16-bit floats over gloo, which are added in float32.
    """
    in_order = list(team.ranks) == sorted(team.ranks)
    return in_order and (dtype.itemsize > 2 or team.backend(team.default_device) != "gloo")
