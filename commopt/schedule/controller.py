# SPDX-License-Identifier: Apache-2.0
"""Follow a plan, and where plans are made, measure, meet and adopt what rank 0 decided.

Every rank measures in the same steps and meets after the same step; rank 0 decides there (schedule.search), and what
it decides is what all do from the next step on. So ranks may differ in what they see and never in what they do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator, Flat
from commopt.errors import ConfigurationError
from commopt.feedback import Layout, Shadow
from commopt.groups import Team
from commopt.lanes import Pending
from commopt.recording import Recorder
from commopt.schedule import reducer
from commopt.schedule.candidates import available, local_messages
from commopt.schedule.config import BucketConfig, require_fit, require_strategy
from commopt.schedule.decision import FIRST_CALENDAR, Calendar, Decision, Tuned
from commopt.schedule.layouts import Layouts
from commopt.schedule.measure import Measuring
from commopt.schedule.plan import Group, Plan

if TYPE_CHECKING:
    from commopt.schedule.sync import Meeting, Sync

_log = logging.getLogger("commopt")

# Until DDP has shown the buckets of a plan twice.
_STEPS_TO_SETTLE = 3
# What torch asks for before it captures DDP: in the first ten iterations the reducer takes times of its own.
_STEPS_TO_CAPTURE = 11
# So that what falls behind is left within 50.
LOOK_EVERY_STEPS = 16


class Controller:
    """Which buckets travel together in one registration, and by which strategy.

    aggregator: averages every message of the step under way. plan: what is followed, None while DDP's own buckets are.
    changes: how often another plan was followed from then on. tuned: what tuning has come to. frozen: whether no more
    plans are made. pending: a meeting that is under way, set by whoever put it on the lane. optimizer: as Tuned has it.
    """

    def __init__(self, recorder: Recorder, layouts: Layouts) -> None:
        self.plan: Plan | None = None
        self.tuned: Tuned | None = None
        self.decisions: list[Decision] = []
        self.changes = 0
        self.frozen = False
        self.optimizer = ""
        self.aggregator: Aggregator = Flat()
        self.pending: Pending | None = None
        self._layouts = layouts
        self._config = BucketConfig()
        self._team: Team | None = None
        self._sync: Sync | None = None  # where plans are made
        self._strategies: Mapping[str, Aggregator] = {}
        self._measures = self._tunes = self._keeps_residuals = False
        self._warm_from = 0
        self._measuring = Measuring(recorder, layouts.parameters, self._first_calendar(0))
        self._buckets: list[Layout] = []  # DDP's, in the last whole step
        self._settled = False
        self._looked = False  # whether the last meeting was only to look at what the shadow knows
        self._of_ddp = reducer.Buckets(layouts.parameters)

    # ------------------------------------------------------------------------------------- setting up

    def serve(self, ddp: TorchDDP) -> None:
        """Take note of the model, whose buckets can then be made anew where torch allows it."""
        self._of_ddp.ddp = ref(ddp)

    def begin(self, team: Team, aggregator: Aggregator, config: BucketConfig) -> None:
        """Learn, before the first bucket, who averages, how, and by what plan.

        Raises as `follow`, and ConfigurationError when links were given that lack what this cluster sends. Not
        collective, but all ranks must call it, and it raises on all or none.
        """
        self._team = team
        self._config = config
        self._of_ddp.speaks = team.rank == 0
        self._strategies = available(aggregator, team)
        self.aggregator = next(iter(self._strategies.values()))
        self._tunes = aggregator.tunes
        self._keeps_residuals = bool(aggregator.residual_paths)
        self._measures = config.measures(aggregator) and team.size > 1 and not self.frozen
        if self._measures:  # loaded here: most trainings leave DDP's buckets alone
            from commopt.schedule.calibration import require_prices
            from commopt.schedule.sync import Sync

            self._sync = Sync(team, aggregator, config)
        if self._measures and config.links is not None:
            priced = {**self._strategies, **local_messages(aggregator, team)}
            require_prices(priced, self._layouts.parameters, self._layouts.whole, team, config.links)
        if aggregator.tunes and config.plan == "ddp":
            how = "flat does" if config.tuned is None else "tuned= says, and nobody watches"
            _log.warning("auto does not tune with plan='ddp': gradients are averaged as %s; leave plan= out", how)
        self._warm_from = aggregator.start_step
        self._measuring.start_anew(self._first_calendar(0))
        if isinstance(config.plan, Plan):
            self.follow(config.plan)
        if config.tuned is not None:
            require_fit(config.tuned, aggregator, team)
            self.tuned = config.tuned
            if config.tuned.plan is not None:
                self.follow(config.tuned.plan)

    def follow(self, plan: Plan) -> None:
        """Send what `plan` says from the next step on; the same plan on every rank.

        Raises ConfigurationError when it is for other parameters, or for an aggregator that is not available.
        """
        if self._layouts.numels:
            plan.require_names(self._layouts.numels)
        require_strategy(plan, self._strategies)
        self._follow(plan)

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        self._of_ddp.wanted = plan.groups
        self._settled = False
        self.aggregator = self._strategies[plan.strategy]
        self.changes += 1

    def restart(self, step: int, plan: Plan | None, tuned: Tuned | None, buckets: Sequence[Layout] = ()) -> None:
        """Go on from a checkpoint after `step` steps, with its plan and tuning where plans are made and they fit.

        buckets: DDP's in the run that was saved. What a value is rounded to depends on its neighbours in a buffer, so
        a resumed run takes the same way, bit by bit, if its model can be given the same ones.
        """
        self._drop_meeting()
        self._settled = False
        if buckets:
            self._of_ddp.wanted = [_names(bucket) for bucket in buckets]
        self._measuring.start_anew(self._first_calendar(step))
        if self._sync is not None:
            self._sync.begin_anew()
        if self._config.plan == "adaptive" or (self._config.plan is None and self._tunes):  # also when frozen
            self.tuned = tuned
            if self._tunes and not self.frozen:  # a plan that tuning has not come to was on trial
                plan = None if tuned is None else tuned.plan
                self.plan = None
                self.aggregator = next(iter(self._strategies.values()))
                self.changes += 1
            if plan is not None:
                try:
                    self.follow(plan)
                except ConfigurationError as error:  # residuals are what a checkpoint is for; a plan can be made again
                    self.tuned = None
                    _log.warning("the plan of the checkpoint is not followed: %s", error)

    def _first_calendar(self, step: int) -> Calendar:
        """Return when to measure first, from `step` on: not before warm-up is over, while messages are others."""
        begin, first = max(step, self._warm_from), FIRST_CALENDAR
        return Calendar(begin + first.measure_from, begin + first.meet_at)

    def give_up(self, reason: str) -> None:
        """Make no more plans; what is followed now stays, also if a change was decided on meanwhile.

        Before `begin`, none is ever made.
        """
        self.frozen = True
        if self._measures:
            self._measures = False
            _log.info("no more plans for the buckets: %s", reason)
        self._drop_meeting()
        self._measuring.stop()

    # ------------------------------------------------------------------------------------- asking

    @property
    def watches(self) -> bool:
        """Whether lossy averages should be compared with exact ones, for who tunes to leave those that fall behind."""
        return self._tunes and self._keeps_residuals and not self.frozen

    # ------------------------------------------------------------------------------------- every step

    def before_forward(self, step: int, *, sends: bool) -> None:
        """Adopt what was decided; only here can DDP be given other buckets.

        sends: whether the backward will, which under no_sync() it does not.
        """
        if sends:
            self.require_repeatable(step)
        if self.pending is not None:
            self._adopt()
        self._of_ddp.sees_forwards = True
        if self._of_ddp.wanted and self._layouts.parameters:  # else DDP is yet to show them
            self._of_ddp.change(_names(*self._buckets))

    def begin_step(self, step: int) -> None:
        """Adopt what was decided if there was no forward to do it, and record what will be measured.

        Raises as `require_repeatable`.
        """
        self.require_repeatable(step)
        if self.pending is not None:
            self._adopt()
        if self._measures:
            self._measuring.begin_step(step)

    def end_step(
        self,
        step: int,
        device: torch.device,
        buckets: list[Layout],
        gradients: Sequence[Tensor],
        overhead_us: float,
        shadow: Shadow | None = None,
    ) -> Meeting | None:
        """Return the meeting that is due after `step`, to be put on the lane by every rank; None if none is.

        buckets, gradients: those of the step, in order.
        overhead_us: what the hook costs the host for each bucket. shadow: see Meeting.
        """
        self._settled = buckets == self._buckets
        self._buckets = buckets
        if self._of_ddp.wanted and self._of_ddp.say_why_not() and self._of_ddp.sees_forwards:
            self._of_ddp.wanted = ()  # a rank without data, in join(), has seen no forward yet
        if not self._measures:
            return None
        self._measuring.end_step(step, device)
        calendar = self._measuring.calendar
        between = step + 1 < calendar.measure_from and shadow is not None and not self.aggregator.lossless
        looks = between and shadow is not None and (step + 1 - shadow.first_step) % LOOK_EVERY_STEPS == 0
        if not looks and not calendar.meets(step):
            return None
        self._looked = looks
        assert self._sync is not None  # begun
        self._of_ddp.say_why_not()
        from commopt.schedule.sync import Meeting

        return Meeting(
            sync=self._sync,
            step=step,
            measuring=self._measuring,
            strategy=next(iter(self._strategies)) if self.plan is None else self.plan.strategy,
            gradients=list(zip(self._buckets, gradients, strict=True)),
            settled=self._settled,
            movable=self._of_ddp.can_change(_names(*self._buckets)),
            overhead_us=overhead_us,
            tuned=self.tuned,
            shadow=shadow,
            looks=looks,
            optimizer=self.optimizer,
        )

    def require_repeatable(self, step: int) -> None:
        """Raise ConfigurationError when `step` is captured in a CUDA graph and is not what all later ones will be."""
        if not reducer.is_capturing():
            return
        if self._measures:
            raise ConfigurationError(
                f"step {step} is captured in a CUDA graph while other buckets may yet be planned; call state.freeze() "
                f"on every rank and take {_STEPS_TO_SETTLE} more steps before"
            )
        if not self._settled:
            raise ConfigurationError(
                f"step {step} is captured in a CUDA graph before DDP has shown the same buckets twice; take "
                f"{_STEPS_TO_CAPTURE} steps before, on the stream that is captured"
            )
        assert self._team is not None  # which has averaged what is settled
        self.aggregator.check_capture(step, self._team)

    def _adopt(self) -> None:
        """Do what the last meeting decided."""
        assert self.pending is not None
        self.pending.wait()
        assert self._sync is not None  # which decided
        decision = self._sync.decision
        if self._looked and decision is (self.decisions[-1] if self.decisions else None):  # and nothing was wrong
            self.pending = None
            return
        self._measuring.stop()
        if decision is None:
            self._measures = False
        else:
            self._measuring.calendar = decision.calendar
            if decision.plan is not None:
                self._follow(decision.plan)
            elif self.plan is not None:
                self.plan = decision.updated(self.plan)
            self.decisions.append(decision)
            self.tuned = decision.tuned or self.tuned
            if self._sync.is_leader:
                _log.info("after step %d: %s", self._sync.step, decision.reason)
                if decision.warning:
                    _log.warning("%s", decision.warning)
        self.pending = None  # only now: after Ctrl-C above this rank would go another way than the others

    def _drop_meeting(self) -> None:
        """Let a meeting that is under way end without consequences."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


def _names(*buckets: Layout) -> Group:
    return tuple(piece.name for bucket in buckets for piece in bucket.pieces)
