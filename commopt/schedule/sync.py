# SPDX-License-Identifier: Apache-2.0
"""Where the ranks put together what they measured and rank 0 decides for all; on the lane, collectively."""

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
from commopt.feedback import ExactSample, Layout
from commopt.groups import Team, broadcast_bytes
from commopt.schedule.calibration import (
    LARGEST_NBYTES,
    Points,
    calibrate,
    prices_from_links,
    prices_from_points,
    samples_of,
)
from commopt.schedule.candidates import Family, allowed_families, available, candidates, exact, local_messages
from commopt.schedule.config import BucketConfig
from commopt.schedule.decision import Calendar, Decision, Option, Tuned
from commopt.schedule.measure import Measuring, StepTimes, latest, own_times
from commopt.schedule.plan import Plan, Unit
from commopt.schedule.prices import Costs
from commopt.schedule.search import Search
from commopt.schedule.window import Window

_log = logging.getLogger("commopt")

_NOTICED_S = 3.0  # a training that stands still for so long looks like one that hangs
_BUDGET_OF_EACH_S = 1.0
_PLAIN = {repr(Flat()): "flat", repr(Hierarchical()): "hierarchical"}


@dataclass(frozen=True)
class Meeting:
    """What all ranks know alike when they meet after `step`, and what this one measured.

    strategy, gradients: what averaged the last step, and the averages by bucket, with what lies where. settled: whether
    the last step had the buckets of the one before. movable: whether DDP can be given others.
    shadow: knows how far compressed averages are behind exact ones; None where nobody compares. looks: whether only
    that is to be looked at. tuned: what tuning has come to. optimizer: as Tuned has it.
    """

    sync: Sync
    step: int
    measuring: Measuring
    strategy: str
    gradients: Sequence[tuple[Layout, Tensor]]
    settled: bool
    movable: bool
    overhead_us: float
    tuned: Tuned | None
    shadow: ExactSample | None = None
    looks: bool = False
    optimizer: str = ""

    @property
    def what(self) -> str:
        """What it is, in the words of an error message."""
        return f"planning after step {self.step}"

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

    def hold(self) -> None:
        """Meet, on the lane: afterwards `sync.decision` is the same on every rank."""
        self.sync.hold(self)

    def steps_behind(self) -> float | None:
        """Return how far compressed averages are behind exact ones; waits for the device."""
        return None if self.shadow is None else self.shadow.steps_behind()


class Sync:
    """All meetings of one registration; on the first rank, which decides, they add up to a Search.

    strategies: what may average, by the names in plans; the first is what is used without a plan.
    decision: of the last meeting, None when the first rank could not decide; step: after which it was.
    """

    def __init__(self, team: Team, aggregator: Aggregator, config: BucketConfig) -> None:
        self.decision: Decision | None = None
        self.step = 0
        self.is_leader = team.rank == 0
        self.strategies: Mapping[str, Aggregator] = available(aggregator, team)
        self._team = team
        self._links = config.links
        self._auto = auto_of(aggregator)
        self._exact = exact(aggregator, team)
        self._families = allowed_families(aggregator, team)
        self._local = local_messages(aggregator, team)
        self._options: list[Option] | None = None
        self._points: dict[str, Points] | None = None
        self._search: Search | None = None

    def begin_anew(self) -> None:
        """Forget what was measured and decided so far, but for what messages cost."""
        self._search = None

    def hold(self, meeting: Meeting) -> None:
        """Meet: afterwards `decision` is the same on every rank, after a look the one before where nothing is wrong."""
        if meeting.looks:
            search = self._search
            found = self._from_leader(
                meeting, lambda: search.look(meeting.steps_behind(), meeting.step) if search else ""
            )
            if found:
                self.step = meeting.step
                self.decision = Decision.from_json(found)
            return
        steps = range(meeting.measuring.calendar.measure_from, meeting.step + 1)
        records = meeting.measuring.records() if meeting.settled else {}
        ready_us = meeting.measuring.ready_us()
        own = own_times(records, ready_us, steps, meeting.units, len(meeting.gradients))
        times = latest(self._team, own)
        try_out = self.decision is not None and self.decision.try_out
        self.step = meeting.step
        self.decision = None
        if self._options is None or meeting.strategy not in [option.strategy for option in self._options]:
            answer = json.loads(self._from_leader(meeting, lambda: self._find_options(meeting)) or '""')
            if isinstance(answer, str):
                if answer:  # as a GradScaler has them while it looks for its scale
                    calendar = Calendar(meeting.step + 1, meeting.step + len(steps))
                    self.decision = Decision(None, calendar, f"measuring again: {answer}")
                return
            self._options = [Option(**entry) for entry in answer]
            self._points = None
            self._search = None
        chosen = {option.strategy: self.strategies[option.strategy] for option in self._options} | self._local
        if self._points is None or try_out:
            self._points = {} if self._links is not None else self._try_out(meeting, chosen)
            try_out = True
        decided = self._from_leader(meeting, lambda: self._decide(meeting, chosen, times, anew=try_out))
        self.decision = Decision.from_json(decided) if decided else None

    def _from_leader(self, meeting: Meeting, say: Callable[[], str]) -> str:
        """Return what rank 0 says, "" where it fails: a plan is worth having, but not at the price of the training."""
        text = ""
        if self.is_leader:
            try:
                text = say()
            except Exception:
                _log.exception("no plan could be made after step %d; buckets stay as they are", meeting.step)
        return broadcast_bytes(self._team, text.encode() if self.is_leader else None, 0).decode()

    def _find_options(self, meeting: Meeting) -> str:
        """Return as JSON what may be chosen, or why that cannot be known yet."""
        options = [Option(_PLAIN.get(name, str(each)), name) for name, each in self._exact.items()]
        if self._auto is not None:
            try:
                options += candidates(self._families, meeting.gradients, meeting.optimizer) if self._families else []
                if meeting.strategy not in [option.strategy for option in options]:
                    # An earlier run's choice, of another strength of the family.
                    running = self.strategies[meeting.strategy]
                    alone = Family(str(running), (running,), 0)
                    options += candidates([alone], meeting.gradients, meeting.optimizer)
            except FloatingPointError as error:
                return json.dumps(str(error))
        return json.dumps([asdict(option) for option in options])

    def _decide(self, meeting: Meeting, chosen: Mapping[str, Aggregator], times: StepTimes, *, anew: bool) -> str:
        """Return the decision as JSON. anew: whether messages were tried out just now."""
        window = Window.of(meeting.plan, meeting.units, times)
        if anew or self._search is None:
            prices = prices_from_points(self._points or {}, meeting.whole, meeting.dtype)
            if self._links is not None:
                prices = prices_from_links(chosen, meeting.whole, meeting.dtype, self._team, self._links)
            costs = Costs(prices, meeting.overhead_us)
            if self._search is None:
                auto, nodes = self._auto, self._team.ranks_per_node
                tuning = (
                    ()
                    if auto is None
                    else (
                        auto.max_trials,
                        tuple(auto.allow),
                        nodes,
                        meeting.tuned,
                        meeting.optimizer,
                    )
                )
                # No message larger than what was tried: scratch grows with the largest.
                self._search = Search(self._options or [], costs, LARGEST_NBYTES, *tuning)
            else:
                self._search.reprice(costs)
        window = replace(window, steps_behind=meeting.steps_behind(), movable=meeting.movable)
        return self._search.decide(window, meeting.step).to_json()

    def _try_out(self, meeting: Meeting, chosen: Mapping[str, Aggregator]) -> dict[str, Points]:
        samples = samples_of(meeting.whole, meeting.dtype.itemsize)
        budget_s = len(chosen) * _BUDGET_OF_EACH_S
        if self.is_leader:
            # Without logging set up only warnings are seen, and nobody looks for the cause of a short wait.
            level = logging.WARNING if budget_s >= _NOTICED_S else logging.INFO
            _log.log(level, "training waits for up to %.1f s: measuring what messages take here", budget_s)
        begun_s = perf_counter()
        points = calibrate(chosen, samples, meeting.dtype, self._team, budget_s)
        if self.is_leader:
            _log.info("measured in %.1f s what messages take here; training goes on", perf_counter() - begun_s)
        return points
