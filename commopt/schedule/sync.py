"""Where the ranks put together what they measured and rank 0 decides for all; on the lane, collectively."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from commopt.aggregate import Aggregator, auto_of
from commopt.feedback import Layout, ResidualStore
from commopt.feedback.quality import GradientCosine
from commopt.groups import Team, broadcast_bytes
from commopt.schedule.calibration import (
    LARGEST_NBYTES,
    Points,
    calibrate,
    prices_from_links,
    prices_from_points,
    samples_of,
)
from commopt.schedule.candidates import (
    Family,
    allowed_families,
    available,
    candidates,
    exact,
    replaceable,
)
from commopt.schedule.config import BucketConfig
from commopt.schedule.decision import Calendar, Decision, Tuned
from commopt.schedule.measure import StepTimes, Taken, latest, own_times
from commopt.schedule.plan import Plan, Unit
from commopt.schedule.prices import Costs, PriceTable
from commopt.schedule.search import Search
from commopt.schedule.trials import Option
from commopt.schedule.window import GradientQuality, Window

_log = logging.getLogger("commopt")

_NOTICED_S = 3.0  # a training that stands still for so long looks like one that hangs
_BUDGET_OF_EACH_S = 1.0


@dataclass(frozen=True)
class Meeting:
    """What all ranks know alike when they meet after `step`: the steps that were measured, and what these sent.

    plan: the messages as they were sent. buckets: DDP's. settled: whether the last step had the buckets of the one
    before. movable: whether DDP can be given others. gradients: averages, with what lies where. taken: what was
    measured here. gradient_cosine, store: where to read how well compressed updates follow them; None where nothing is
    compressed. tuned: what tuning has come to.
    """

    sync: Sync
    step: int
    steps: range
    units: tuple[Unit, ...]
    plan: Plan
    buckets: tuple[Layout, ...]
    dtype: torch.dtype
    settled: bool
    movable: bool
    overhead_us: float
    gradients: Sequence[tuple[Layout, Tensor]]
    taken: Taken
    tuned: Tuned | None
    gradient_cosine: GradientCosine | None = None
    store: ResidualStore | None = None

    @property
    def what(self) -> str:
        """What it is, in the words of an error message."""
        return f"planning after step {self.step}"

    @cached_property
    def whole(self) -> Layout:
        """All parameters, as if they were one bucket."""
        return Layout(tuple(piece for bucket in self.buckets for piece in bucket.pieces))

    def hold(self) -> None:
        """Meet, on the lane: afterwards `sync.decision` is the same on every rank."""
        self.sync.hold(self)

    def quality(self) -> GradientQuality | None:
        """Return how well compressed updates follow the gradients; waits for the device."""
        if self.gradient_cosine is None or self.store is None:
            return None
        return GradientQuality(self.gradient_cosine.cosine(), self.store.stats()["residual_norm"])


class Sync:
    """All meetings of one registration; on the first rank, which decides, they add up to a Search.

    strategies: what may average, by the names in plans; the first is what is used without a plan.
    decision: of the last meeting, None when the first rank could not decide; step: after which it was.
    """

    def __init__(self, team: Team, aggregator: Aggregator, config: BucketConfig) -> None:
        self.decision: Decision | None = None
        self.step = 0
        self._team, self._links = team, config.links
        self._auto = auto_of(aggregator)
        self._families = () if self._auto is None else allowed_families(self._auto, team)
        self._exact = replaceable(aggregator, team)
        if self._auto is not None:
            self._exact = {repr(each): each for each in exact(team).values()}
        self.strategies: Mapping[str, Aggregator] = available(aggregator, team)
        self._options: list[Option] | None = None
        self._points: dict[str, Points] | None = None
        self._prices: dict[str, PriceTable] | None = None
        self._search: Search | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this rank decides."""
        return self._team.rank == 0

    def begin_anew(self) -> None:
        """Forget what was measured and decided so far, but for prices."""
        self._search = None

    def hold(self, meeting: Meeting) -> None:
        """Meet: afterwards `decision` is the same on every rank."""
        records = meeting.taken.records() if meeting.settled else {}
        messages = len(meeting.plan.groups)
        own = own_times(records, meeting.taken.ready_us(), meeting.steps, meeting.units, messages)
        times, lateness_us = latest(self._team, own)
        try_out = self.decision is not None and self.decision.try_out
        self.step, self.decision = meeting.step, None
        if self._options is None or meeting.plan.strategy not in self._chosen:
            answer = json.loads(self._from_leader(self._find_options(meeting) if self.is_leader else ""))
            if isinstance(answer, str):
                if answer:  # as a GradScaler has them while it looks for its scale
                    calendar = Calendar(meeting.step + 1, meeting.step + len(meeting.steps))
                    self.decision = Decision(None, calendar, f"measuring again: {answer}")
                return
            self._options, self._points, self._search = [Option(**entry) for entry in answer], None, None
        if self._points is None or try_out:
            self._points = {} if self._links is not None else self._try_out(meeting)
            self._prices = None
        decided = self._from_leader(self._decide(meeting, times, lateness_us) if self.is_leader else "")
        self.decision = Decision.from_json(decided) if decided else None

    def _from_leader(self, text: str) -> str:
        return broadcast_bytes(self._team, text.encode() if self.is_leader else None, 0).decode()

    def _find_options(self, meeting: Meeting) -> str:
        """Return as JSON what may be chosen, or why that cannot be known yet, "" if it never will be."""
        try:
            options = [Option(str(each), name) for name, each in self._exact.items()]
            if self._auto is not None:
                names = {repr(each): name for name, each in exact(self._team).items()}
                options = [Option(names[name], name) for name in self._exact]
                found = candidates(self._families, meeting.gradients, self._auto.max_error) if self._families else []
                running = meeting.plan.strategy
                if running not in [*self._exact, *(repr(each.aggregator) for each in found)]:
                    # An earlier run's choice, where max_error chose another strength of the family then.
                    aggregator = self.strategies[running]
                    found += candidates([Family(str(aggregator), (aggregator,), 0)], meeting.gradients, None)
                options += [Option(each.name, repr(each.aggregator), each.error, lossy=True) for each in found]
            return json.dumps([asdict(option) for option in options])
        except FloatingPointError as error:
            return json.dumps(str(error))
        except Exception:  # a plan is worth having, but not at the price of the training
            _log.exception("no plan could be made after step %d; buckets stay as they are", meeting.step)
            return json.dumps("")

    def _decide(self, meeting: Meeting, times: StepTimes, lateness_us: Sequence[float]) -> str:
        """Return the decision as JSON, "" if there is none."""
        try:
            window = Window.of(
                meeting.plan,
                meeting.units,
                times.begin_us,
                times.compute_end_us,
                times.ready_us,
                times.started_us,
                times.finished_us,
                lateness_us,
            )
            priced = self._prices is not None
            if self._prices is None:
                self._prices = self._price(meeting)
            costs = Costs(self._prices, meeting.overhead_us)
            if self._search is None:
                self._search = self._begin_search(costs, meeting.tuned)
            elif not priced:
                self._search.reprice(costs)
            return self._search.decide(
                replace(window, quality=meeting.quality(), movable=meeting.movable), meeting.step
            ).to_json()
        except Exception:
            _log.exception("no plan could be made after step %d; buckets stay as they are", meeting.step)
            return ""

    def _begin_search(self, costs: Costs, tuned: Tuned | None) -> Search:
        assert self._options is not None  # found
        if self._auto is None:
            # No message larger than what was tried: scratch grows with the largest.
            return Search(self._options, costs, LARGEST_NBYTES)
        auto = self._auto
        nodes = self._team.ranks_per_node
        return Search(self._options, costs, LARGEST_NBYTES, auto.max_trials, tuple(auto.allow), nodes, tuned)

    # ------------------------------------------------------------------------------------- prices

    @property
    def _chosen(self) -> dict[str, Aggregator]:
        assert self._options is not None  # found
        return {option.strategy: self.strategies[option.strategy] for option in self._options}

    def _try_out(self, meeting: Meeting) -> dict[str, Points]:
        chosen, samples = self._chosen, samples_of(meeting.whole, meeting.dtype.itemsize)
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

    def _price(self, meeting: Meeting) -> dict[str, PriceTable]:
        if self._links is not None:
            return prices_from_links(self._chosen, meeting.whole, meeting.dtype, self._team, self._links)
        return prices_from_points(self._points or {}, meeting.whole, meeting.dtype)
