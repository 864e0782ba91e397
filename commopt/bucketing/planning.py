"""Follow a plan, and in adaptive mode make a new one when what is measured says so: the part that communicates.

Every rank measures in the same steps and meets after the same step; rank 0 decides there (commopt.plan.adapt), and what
it decides is what all do from the next step on. So ranks may differ in what they see and never in what they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import ref

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator
from commopt.bucketing import reducer
from commopt.bucketing.assembly import Assembly
from commopt.bucketing.layouts import Layouts
from commopt.bucketing.meeting import Agenda, Meetings
from commopt.bucketing.messages import Message
from commopt.bucketing.readiness import Readiness
from commopt.bucketing.strategies import aggregator_of, require_strategies, strategies_for
from commopt.bucketing.units import Units, are_exact
from commopt.bucketing.wish import Wish
from commopt.errors import ConfigurationError
from commopt.groups import Team
from commopt.lanes import Ticket
from commopt.plan import Adaptation, Bucket, Calendar, Decision, Plan
from commopt.recording import Recorder

Run = Callable[[Callable[[], None], str], Ticket]

_log = logging.getLogger("commopt")


class Planning:
    """Which buckets travel together in one registration, and by which strategy.

    record: whether every step is recorded rather than those that are measured.
    """

    def __init__(self, recorder: Recorder, assembly: Assembly, layouts: Layouts, *, record: bool) -> None:
        self.plan: Plan | None = None
        self.decisions: list[Decision] = []
        self._adaptive = self._given = False
        self._recorder = recorder
        self._assembly = assembly
        self._layouts = layouts
        self._record = record
        self._ddp: ref[TorchDDP] | None = None
        self._strategies: dict[str, Aggregator] = {}
        self._meetings: Meetings | None = None
        self._warm_from = 0
        self._calendar = self._first_calendar(0)
        self._readiness: Readiness | None = None
        self._pending: Ticket | None = None
        self._sees_forwards = False  # not those of torch.compile(ddp)
        self._outdated = False  # whether DDP's own buckets are not yet those of the plan
        recorder.enabled = record

    # ------------------------------------------------------------------------------------- setting up

    def serve(self, ddp: TorchDDP) -> None:
        """Take note of the model, whose buckets can then be made anew where torch allows it."""
        self._ddp = ref(ddp)

    def begin(self, team: Team, aggregator: Aggregator, wish: Wish) -> None:
        """Learn, before the first bucket, who averages, how, and by what plan. Raises as `follow`."""
        self._strategies = strategies_for(aggregator, team)
        self._meetings = Meetings(team, self._strategies, wish)
        self._adaptive = wish.plan == "adaptive" and team.size > 1
        self._warm_from = aggregator.start_step
        self._calendar = self._first_calendar(0)
        if isinstance(wish.plan, Plan):
            self._given = True
            self.follow(wish.plan)

    def follow(self, plan: Plan) -> None:
        """Send what `plan` says from the next step on; the same plan on every rank.

        Raises ConfigurationError when it is for other parameters, or for strategies that are not to be had.
        """
        if self._layouts.numels:
            plan.require_names(self._layouts.numels)
        require_strategies(plan, self._strategies)
        self.plan, self._outdated = plan, True
        self._assembly.follow(plan)

    def restart(self, step: int, plan: Plan | None) -> None:
        """Go on from a checkpoint after `step` steps, with its plan unless the user gave one or it does not fit."""
        self._drop_meeting()
        self._stop_measuring()
        self._recorder.clear()  # steps are counted from another number now
        self._calendar = self._first_calendar(step)
        if self._meetings is not None:
            self._meetings.begin_anew()
        if plan is not None and not self._given:
            try:
                self.follow(plan)
            except ConfigurationError as error:  # residuals are what a checkpoint is for; a plan can be made again
                _log.warning("the plan of the checkpoint is not followed: %s", error)

    def _first_calendar(self, step: int) -> Calendar:
        """Return when to measure first, from `step` on: not before warm-up is over, while messages are others."""
        begin, first = max(step, self._warm_from), Adaptation.first
        return Calendar(begin + first.measure_from, begin + first.meet_at)

    def give_up(self, reason: str) -> None:
        """Make no more plans; what is followed now stays, also if a change was decided on meanwhile."""
        if self._adaptive:
            self._adaptive = False
            _log.info("no more plans for the buckets: %s", reason)
        self._drop_meeting()
        self._stop_measuring()

    # ------------------------------------------------------------------------------------- every step

    def before_forward(self) -> None:
        """Adopt what was decided; only here can DDP be given other buckets."""
        self._sees_forwards = True
        self._adopt()
        ddp = None if self._ddp is None else self._ddp()
        if self._outdated and self.plan is not None and ddp is not None and self._single(ddp):
            self._outdated = False
            reducer.rebuild(ddp, [bucket.nbytes for bucket in self.plan.buckets])

    def begin_step(self, step: int) -> None:
        """Adopt what was decided if there was no forward to do it."""
        self._adopt()
        if self._adaptive and step + 1 >= self._calendar.measure_from:
            self._recorder.enabled = True  # one step earlier: the measured ones begin where it ends

    def aggregators_for(self, message: Message, asked_for: Aggregator) -> list[Aggregator]:
        """Return what averages each buffer of a message."""
        return [
            asked_for
            if self.plan is None or share is None
            else aggregator_of(self.plan.buckets[share], self._strategies)
            for share in message.shares
        ]

    def end_step(self, step: int, device: torch.device, overhead_us: float, run: Run) -> None:
        """Take times, or meet, as the calendar has it; collective. `run` puts work on the lane."""
        if not self._adaptive:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self.give_up("a CUDA graph repeats one step for ever")
            return
        if self._readiness is not None:
            self._readiness.end_step(step)
        if self._calendar.meets(step):
            self._meet(step, overhead_us, run)
        elif self._readiness is None and self._calendar.measures(step + 1):
            self._readiness = Readiness(device)
            self._readiness.start(self._layouts.parameters)

    # ------------------------------------------------------------------------------------- meetings

    def _meet(self, step: int, overhead_us: float, run: Run) -> None:
        meetings, readiness, calendar = self._meetings, self._readiness, self._calendar
        assert meetings is not None  # begun
        ddp = None if self._ddp is None else self._ddp()
        agenda = Agenda(
            step=step,
            steps=range(calendar.measure_from, step + 1),
            units=Units.of(self._assembly.buckets, self._layouts.parameters, single=self._single(ddp)),
            messages=self._messages(),
            layouts=self._assembly.buckets,
            settled=self._assembly.settled,
            overhead_us=overhead_us,
        )

        def work() -> None:
            meetings.hold(agenda, self._recorder.steps(), {} if readiness is None else readiness.times_us())

        self._pending = run(work, f"planning after step {step}")

    def _messages(self) -> tuple[Bucket, ...]:
        """Return what a step now sends, in the order in which it does."""
        first = next(iter(self._strategies))
        buckets = []
        for layouts, share in self._assembly.messages():
            names = tuple(piece.name for layout in layouts for piece in layout.pieces)
            nbytes = sum(self._layouts.parameters[name].nbytes for name in names)
            planned = None if self.plan is None or share is None else self.plan.buckets[share]
            strategy, chunks = (first, 1) if planned is None else (planned.strategy, planned.chunks)
            buckets.append(Bucket(names, nbytes, strategy, chunks))
        return tuple(buckets)

    def _single(self, ddp: TorchDDP | None) -> bool:
        """Return whether DDP can be given buckets of any gradients."""
        parameters = self._layouts.parameters
        if ddp is None or not self._sees_forwards:
            return False
        return are_exact(parameters) and reducer.can_rebuild(ddp, parameters.values())

    def _adopt(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        assert self._meetings is not None  # which decided
        decision = self._meetings.decision
        self._stop_measuring()
        if decision is None:
            self._adaptive = False
        else:
            self._calendar = decision.calendar
            if decision.plan is not None:
                self.follow(decision.plan)
            elif self.plan is not None:
                self.plan = decision.updated(self.plan)  # the same buckets, with what is expected of them now
            self.decisions.append(decision)
            if self._meetings.chairs:
                _log.info("buckets after step %d: %s", self._meetings.step, decision.reason)
        self._pending = None  # only now: after Ctrl-C above this rank would go another way than the others

    def _drop_meeting(self) -> None:
        """Let a meeting that is under way end without consequences."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _stop_measuring(self) -> None:
        self._recorder.enabled = self._record
        if self._readiness is not None:
            self._readiness.stop()
            self._readiness = None
