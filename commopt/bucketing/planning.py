"""Follow a plan, and in adaptive mode make a new one when what is measured says so.

Every rank measures in the same steps and meets after the same step; rank 0 decides there (commopt.plan.adapt), and what
it decides is what all do from the next step on. So ranks may differ in what they see and never in what they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator, Auto
from commopt.bucketing.assembly import Assembly
from commopt.bucketing.following import Following
from commopt.bucketing.layouts import Layouts
from commopt.bucketing.measuring import Measuring
from commopt.bucketing.meeting import Agenda, Meetings
from commopt.bucketing.messages import Held
from commopt.bucketing.methods import method_for
from commopt.bucketing.prices import require_prices
from commopt.bucketing.reducer import is_capturing
from commopt.bucketing.strategies import require_fit
from commopt.bucketing.turns import Turns
from commopt.bucketing.wish import Wish
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.groups import Team
from commopt.lanes import Work
from commopt.plan import Adaptation, Bucket, Calendar, Decision, Faithfulness, Plan, Tuned
from commopt.recording import Recorder

Run = Callable[[Callable[[], None], str], Work]

_log = logging.getLogger("commopt")

# With a hook again before what is measured: for the buckets to settle, and for the step that is recorded before.
_EARLIER_STEPS = 3
# With the hook still, after the last change: what compression kept back goes into exact averages first.
_OWED_STEPS = 3
_LEAST_ABSENCE_STEPS = 10
# Until DDP has new buckets, and has shown them twice.
_STEPS_TO_SETTLE = 3
# What torch asks for before it captures DDP: in the first ten iterations the reducer takes times of its own.
_STEPS_TO_CAPTURE = 11


class Planning:
    """Which buckets travel together in one registration, and by which strategy.

    record: whether every step is recorded rather than those that are measured. fidelity: how well compressed updates
        follow the gradients, asked on the lane.
    tuned: what tuning has come to. given_up: whether nothing is planned any more, whoever is yet to average.
    turns: whose it is to average, the hook's or DDP's by itself.
    """

    def __init__(
        self,
        recorder: Recorder,
        assembly: Assembly,
        layouts: Layouts,
        fidelity: Callable[[], Faithfulness | None],
        *,
        record: bool,
    ) -> None:
        self.decisions: list[Decision] = []
        self.tuned: Tuned | None = None
        self.given_up = False
        self._assembly, self._layouts = assembly, layouts
        self._fidelity = fidelity
        self._wish = Wish()
        self._team: Team | None = None
        self._adaptive = False
        self._warm_from = 0
        self._first = Adaptation.first
        self._following = Following(assembly, layouts)
        self.turns = Turns(self._following.leave_to_ddp)
        self._measuring = Measuring(recorder, layouts.parameters, self._first_calendar(0), record=record)
        self._meetings: Meetings | None = None
        self._pending: Work | None = None
        self._record = record
        self._leave_after: float = inf  # the step after which DDP may be left to itself

    @property
    def plan(self) -> Plan | None:
        """What is followed now."""
        return self._following.plan

    @property
    def changes(self) -> int:
        """How often another plan was followed from then on."""
        return self._following.changes

    def messages(self) -> tuple[Bucket, ...]:
        """Return what a step now sends, in the order in which it does."""
        return self._following.messages()

    # ------------------------------------------------------------------------------------- setting up

    def serve(self, ddp: TorchDDP) -> None:
        """Take note of the model, whose buckets can then be made anew where torch allows it."""
        self._following.serve(ddp)
        self.turns.serve(ddp)

    def begin(self, team: Team, aggregator: Aggregator, wish: Wish) -> None:
        """Learn, before the first bucket, who averages, how, and by what plan.

        Raises as `follow`, and ConfigurationError when links were given that lack what this cluster sends. Not
        collective, but all ranks must call it, and it raises on all or none.
        """
        self._team, method = team, method_for(aggregator, team, wish)
        self._following.choose_from(method.strategies)
        self._wish, self._adaptive = wish, wish.plan == "adaptive" and team.size > 1 and not self.given_up
        if self._adaptive and wish.links is not None:
            require_prices(method.strategies, self._layouts, team, wish.links)
        if isinstance(aggregator, Auto) and wish.plan == "ddp":
            _log.warning("auto tunes with plan='adaptive' only; with plan='ddp' gradients are averaged as flat does")
        self._meetings = Meetings(team, method, wish)
        self._warm_from, self._first = aggregator.start_step, method.first
        self._measuring.start_anew(self._first_calendar(0))
        if isinstance(wish.plan, Plan):
            self.follow(wish.plan)
        if wish.tuned is not None:
            self._adopt_tuned(wish.tuned, aggregator, team)

    def _adopt_tuned(self, tuned: Tuned, aggregator: Aggregator, team: Team) -> None:
        require_fit(tuned, aggregator, team)
        self.tuned = tuned
        if tuned.plan is not None:
            self.follow(tuned.plan)

    def follow(self, plan: Plan) -> None:
        """Send what `plan` says from the next step on; the same plan on every rank.

        Raises ConfigurationError when it is for other parameters, or for strategies that are not to be had.
        """
        self._following.require(plan)
        self._following.follow(plan)

    def restart(self, step: int, plan: Plan | None, tuned: Tuned | None) -> None:
        """Go on from a checkpoint after `step` steps, with its plan and tuning where plans are made and they fit."""
        self._drop_meeting()
        self._leave_after = inf
        self._measuring.start_anew(self._first_calendar(step))
        if self._meetings is not None:
            self._meetings.begin_anew()
        if self._wish.plan == "adaptive":
            self.tuned = tuned
            if plan is not None:
                self._follow_if_it_fits(plan)

    def _follow_if_it_fits(self, plan: Plan) -> None:
        try:
            self.follow(plan)
        except ConfigurationError as error:  # residuals are what a checkpoint is for; a plan can be made again
            self.tuned = None
            _log.warning("the plan of the checkpoint is not followed: %s", error)

    def _first_calendar(self, step: int) -> Calendar:
        """Return when to measure first, from `step` on: not before warm-up is over, while messages are others."""
        begin, first = max(step, self._warm_from), self._first
        return Calendar(begin + first.measure_from, begin + first.meet_at)

    def give_up(self, reason: str) -> None:
        """Make no more plans; what is followed now stays, also if a change was decided on meanwhile.

        Before `begin`, none is ever made.
        """
        self.given_up = True
        if self._adaptive:
            self._adaptive = False
            _log.info("no more plans for the buckets: %s", reason)
        self._drop_meeting()
        self._measuring.stop()
        self.turns.freeze()

    # ------------------------------------------------------------------------------------- every step

    def before_forward(self, step: int, *, sends: bool) -> None:
        """Adopt what was decided; only here can DDP be given other buckets, or be left to itself.

        sends: whether the backward will, which under no_sync() it does not.
        """
        if sends:
            self.require_repeatable(step)
        self._adopt()
        self._following.before_forward()
        self.turns.before_forward()

    def begin_step(self, step: int) -> None:
        """Adopt what was decided if there was no forward to do it."""
        self._adopt()
        self._assembly.begin_step()
        if self._adaptive:
            self._measuring.begin_step(step)

    @property
    def aggregator(self) -> Aggregator:
        """What averages the buckets of the step under way."""
        return list(self._following.aggregators())[-1]

    def add_bucket(self, layout: Layout, buffer: Tensor, *, last: bool) -> None:
        """Take note of one of DDP's buckets."""
        self._assembly.add(Held(0, layout, buffer), last=last)

    def end_step(self, step: int, device: torch.device, overhead_us: float, run: Run) -> None:
        """Take times, or meet, as the calendar has it; collective. `run` puts work on the lane."""
        if not self._adaptive:
            return
        self._measuring.end_step(step, device)
        if self._measuring.calendar.meets(step):
            self._meet(step, overhead_us, run)
        elif step >= self._leave_after:
            length = self._measuring.calendar.measure_from - _EARLIER_STEPS - (step + 1)
            self.turns.leave(length if length >= _LEAST_ABSENCE_STEPS else 0)

    def require_repeatable(self, step: int) -> None:
        """Raise ConfigurationError when `step` is captured in a CUDA graph and is not what all later ones will be."""
        if self.turns.is_away or not is_capturing():
            return
        if self._adaptive:
            raise ConfigurationError(
                f"step {step} is captured in a CUDA graph while other buckets may yet be planned; call state.freeze() "
                f"on every rank and take {_STEPS_TO_SETTLE} more steps before"
            )
        if not self._assembly.settled:
            raise ConfigurationError(
                f"step {step} is captured in a CUDA graph before DDP has shown the same buckets twice; take "
                f"{_STEPS_TO_CAPTURE} steps before, on the stream that is captured"
            )
        assert self._team is not None  # which has averaged what is settled
        for aggregator in self._following.aggregators():
            aggregator.check_capture(step, self._team)

    # ------------------------------------------------------------------------------------- meetings

    def _meet(self, step: int, overhead_us: float, run: Run) -> None:
        meetings, read = self._meetings, self._measuring.reader()
        assert meetings is not None  # begun
        agenda = Agenda(
            step=step,
            steps=range(self._measuring.calendar.measure_from, step + 1),
            units=self._following.units(),
            messages=self._following.messages(),
            layouts=self._assembly.buckets,
            settled=self._assembly.settled,
            overhead_us=overhead_us,
            gradients=self._assembly.gradients,
            fidelity=self._fidelity,
            tuned=self.tuned,
        )
        self._pending = run(lambda: meetings.hold(agenda, *read()), f"planning after step {step}")

    def _adopt(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        assert self._meetings is not None  # which decided
        decision = self._meetings.decision
        self._measuring.stop()
        if decision is None:
            self._adaptive = False
        else:
            self._measuring.calendar = decision.calendar
            leaves = False
            self._leave_after = self._meetings.step + _OWED_STEPS if leaves else inf
            self._following.heed(decision)
            self.decisions.append(decision)
            self.tuned = decision.tuned or self.tuned
            if self._meetings.chairs:
                _log.info("buckets after step %d: %s", self._meetings.step, decision.reason)
        self._pending = None  # only now: after Ctrl-C above this rank would go another way than the others

    def _drop_meeting(self) -> None:
        """Let a meeting that is under way end without consequences."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
