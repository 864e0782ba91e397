# SPDX-License-Identifier: Apache-2.0
"""Follow a plan; where plans are made: measure, synchronise, and adopt what rank 0 decided.

Every rank measures in the same steps and synchronises after the same step. Rank 0 decides there (schedule.search), and
all ranks follow its decision from the next step on. So ranks may differ in what they see and never in what they do.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator, Flat
from commopt.errors import ConfigurationError
from commopt.feedback import ExactSample, Layout
from commopt.groups import Team
from commopt.lanes import LaneClient, Pending
from commopt.recording import GradientTimes, Recorder
from commopt.schedule import reducer
from commopt.schedule.candidates import available, local_messages
from commopt.schedule.config import allow_mismatch, makes_plans, names_its_model, require_fit, require_strategy
from commopt.schedule.decision import FIRST_LOOK, FIRST_WINDOW, Decision, Tuned, Window
from commopt.schedule.plan import Plan

if TYPE_CHECKING:
    from commopt.cost import Links
    from commopt.schedule.sync import Coordinator

_log = logging.getLogger("commopt")

# Until DDP has shown the buckets of a plan twice.
_STEPS_TO_SETTLE = 3
# What torch asks for before it captures DDP: in the first ten iterations the reducer takes times of its own.
_STEPS_TO_CAPTURE = 11
# So that a strategy that falls behind is left within 50 steps.
LOOK_EVERY_STEPS = 16


class Phase(Enum):
    """The phases of a Controller.

    A search goes WAITING -> MEASURING -> SYNCHRONISING -> WAITING and so on, and between two windows maybe WAITING ->
    LOOKING -> WAITING. It ends in IDLE if rank 0 fails to decide, and in FROZEN from anywhere.

    IDLE: makes no plans; DDP's own buckets count, or the plan that was given.
    WAITING: for the next window of steps to measure.
    MEASURING: the steps of a window.
    SYNCHRONISING: the decision is under way on the lane; the next step adopts it.
    LOOKING: the same, only at how far compressed averages are behind exact ones; mostly there is nothing to adopt.
    FROZEN: makes no plans any more.
    """

    IDLE = auto()
    WAITING = auto()
    MEASURING = auto()
    SYNCHRONISING = auto()
    LOOKING = auto()
    FROZEN = auto()


_DECIDING = (Phase.SYNCHRONISING, Phase.LOOKING)
_PLANNING = (Phase.WAITING, Phase.MEASURING, *_DECIDING)


class Controller:
    """Which buckets travel together in one registration, and by which strategy.

    parameters: the averaged ones by name; of an unknown model they become known with its buckets.
    frozen: names of others that may be averaged too: DDP shows them if it was made before they were frozen.
    phase: see Phase.
    aggregator: averages every message of the step under way.
    plan: is followed; None while DDP's own buckets are.
    changes: how often the plan was changed.
    decisions: of all synchronisation points.
    tuned: the result of tuning.
    optimizer: as Tuned has it.
    """

    def __init__(self, recorder: Recorder, parameters: Mapping[str, Tensor], frozen: Collection[str] = ()) -> None:
        self.phase = Phase.IDLE
        self.aggregator: Aggregator = Flat()
        self.plan: Plan | None = None
        self.changes = 0
        self.decisions: list[Decision] = []
        self.tuned: Tuned | None = None
        self.optimizer = ""
        self._parameters = parameters
        self._frozen = frozen
        self._unseen: Tuned | None = None  # an earlier tuning, until DDP shows the parameters of an unknown model
        self._team: Team | None = None
        self._choice: Plan | str | None = None  # see config.read_plan
        self._requested: Aggregator = Flat()  # which may be `auto`
        self._strategies: Mapping[str, Aggregator] = {}
        self._coordinator: Coordinator | None = None  # where plans are made
        self._pending: Pending | None = None  # the decision under way
        self._recorder = recorder
        self._window = self._first_window(0)  # the next to measure, or the one that is measured
        self._gradient_times: GradientTimes | None = None  # in it
        self._buckets: list[Layout] = []  # DDP's, in the last whole step
        self._settled = False  # whether the last two steps had the same buckets
        self._of_ddp = reducer.ReducerBuckets(parameters)

    # ------------------------------------------------------------------------------------- setting up

    def set_model(self, ddp: TorchDDP) -> None:
        """Take note of the model, whose buckets can then be made anew where torch allows it."""
        self._of_ddp.ddp = ref(ddp)

    def begin(
        self,
        team: Team,
        aggregator: Aggregator,
        plan: Plan | str | None = None,
        links: Links | None = None,
        tuned: Tuned | None = None,
    ) -> None:
        """Set, before the first bucket, who averages, how, and by what plan.

        Raises as `follow`, and ConfigurationError when links were given that lack what this cluster sends. Not
        collective, but all ranks must call it, and it raises on all or none.
        """
        self._team = team
        self._choice = plan
        self._requested = aggregator
        self._of_ddp.speaks = team.rank == 0
        self._strategies = available(aggregator, team)
        self.aggregator = next(iter(self._strategies.values()))
        if makes_plans(plan, aggregator, team) and team.size > 1 and self.phase is not Phase.FROZEN:
            self._begin_planning(team, links)
        if tuned is not None:
            require_fit(tuned, aggregator, team)
            if not names_its_model(tuned, self._parameters, self._frozen):
                _log.warning("tuned= does not tell which model it was found for, as in a file of old: tuning anew")
                tuned = None
            self.tuned = tuned
            self._unseen = None if self._parameters else tuned
        if aggregator.tunes and plan == "ddp":
            how = "flat does" if tuned is None else "tuned= says, and nobody watches"
            _log.warning("auto does not tune with plan='ddp': gradients are averaged as %s; leave plan= out", how)
        self._measure_anew(0)
        if isinstance(plan, Plan):
            self.follow(plan)
        if tuned is not None and tuned.plan is not None:
            self.follow(tuned.plan)

    def _begin_planning(self, team: Team, links: Links | None) -> None:
        # Loaded here: most trainings leave DDP's buckets alone.
        from commopt.schedule.calibration import require_prices
        from commopt.schedule.sync import Coordinator

        self.phase = Phase.WAITING
        self._coordinator = Coordinator(team, self._requested, links, self._recorder)
        if links is not None:
            priced = {**self._strategies, **local_messages(self._requested, team)}
            require_prices(priced, self._parameters, team, links)

    def follow(self, plan: Plan) -> None:
        """Send what `plan` says from the next step on; the same plan on every rank.

        Raises ConfigurationError when it is for other parameters, or for an aggregator that is not available.
        """
        if self._parameters:
            plan.require_names(self._parameters, self._frozen)
        require_strategy(plan, self._strategies)
        self._follow(plan)

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        self._of_ddp.wanted = plan.groups
        self._settled = False
        self.aggregator = self._strategies[plan.strategy]
        self.changes += 1

    def _leave_plan(self) -> None:
        self.plan = None
        self.aggregator = next(iter(self._strategies.values()))
        self.changes += 1

    def restart(self, step: int, plan: Plan | None, tuned: Tuned | None, buckets: Sequence[Layout] = ()) -> None:
        """Resume from a checkpoint after `step` steps, with its plan and tuning where plans are made and they fit.

        buckets: DDP's in the run that was saved. The rounding of a value depends on its neighbours in a buffer, so a
            resumed run is the same, bit by bit, if its model can be given the same buckets.
        """
        self._drop_decision()
        self._settled = False
        if buckets:
            self._of_ddp.wanted = [_names(bucket) for bucket in buckets]
        if self.phase in _PLANNING:
            self.phase = Phase.WAITING
        if self._coordinator is not None:
            self._coordinator.restart()
        if self._team is not None and makes_plans(self._choice, self._requested, self._team):  # also when frozen
            if tuned is not None and (other := allow_mismatch(tuned, self._requested)):
                tuned = None
                _log.warning("the tuning of the checkpoint %s: tuning anew", other)
            self.tuned = tuned
            self._unseen = None  # the parameters of a checkpoint are compared by themselves
            if self._requested.tunes and self.phase is not Phase.FROZEN:
                # A plan that is not the result of tuning was on trial.
                plan = None if tuned is None else tuned.plan
                self._leave_plan()
            if plan is not None:
                try:
                    self.follow(plan)
                except ConfigurationError as error:  # residuals are what a checkpoint is for; a plan can be made again
                    self.tuned = None
                    _log.warning("the plan of the checkpoint is not followed: %s", error)
        self._measure_anew(step)

    def _measure_anew(self, step: int) -> None:
        """Forget all measurements; the next window is the first one from `step` on."""
        self._stop_measuring()
        self._recorder.clear()
        self._window = self._first_window(step)

    def _first_window(self, step: int) -> Window:
        """Return the first window from `step` on: not before warm-up is over, while messages are different."""
        begin = max(step, self._requested.start_step)
        looks = self._requested.tunes and not self._requested.lossless and self.tuned is None
        first = FIRST_LOOK if looks else FIRST_WINDOW
        return Window(begin + first.first_step, begin + first.last_step)

    def give_up(self, reason: str) -> None:
        """Make no more plans; the plan that is followed stays, also if a change was decided on meanwhile.

        Before `begin`, none is ever made.
        """
        if self.phase in _PLANNING:
            _log.info("no more plans for the buckets: %s", reason)
        self.phase = Phase.FROZEN
        self._drop_decision()
        self._stop_measuring()

    # ------------------------------------------------------------------------------------- asking

    @property
    def frozen(self) -> bool:
        """Whether no more plans are ever made."""
        return self.phase is Phase.FROZEN

    @property
    def watches(self) -> bool:
        """Whether lossy averages should be compared with exact ones, for tuning to leave those that fall behind."""
        return self._requested.tunes and bool(self._requested.residual_paths) and not self.frozen

    # ------------------------------------------------------------------------------------- every step

    def before_forward(self, step: int, *, sends: bool) -> None:
        """Adopt what was decided; only here can DDP be given other buckets.

        sends: whether the backward will, which under no_sync() it does not.
        """
        if sends:
            self.require_repeatable(step)
        self._adopt()
        self._of_ddp.sees_forwards = True
        if self._of_ddp.wanted and self._parameters:  # else DDP is yet to show them
            self._of_ddp.change(_names(*self._buckets))

    def begin_step(self, step: int) -> None:
        """Adopt what was decided if there was no forward to do it, and record the steps of a window."""
        self.require_repeatable(step)
        self._adopt()
        if self.phase in _PLANNING and step + 1 >= self._window.first_step:
            self._recorder.enabled = True  # one step early: where it ends the first measured one begins

    def end_step(
        self,
        client: LaneClient,
        step: int,
        device: torch.device,
        buckets: list[Layout],
        gradients: Sequence[Tensor],
        overhead_us: float,
        exact_sample: ExactSample | None = None,
    ) -> None:
        """End the records of `step`; if the ranks synchronise after it, begin to, on the lane of `client`.

        buckets, gradients: those of the step, in order.
        overhead_us: the cost of the hook on the host for each bucket.
        exact_sample: see SyncPoint.
        """
        self._settled = buckets == self._buckets
        self._buckets = buckets
        if self._unseen is not None:
            self._require_seen(self._unseen, step)
        if self._of_ddp.wanted and self._of_ddp.say_why_not() and self._of_ddp.sees_forwards:
            self._of_ddp.wanted = ()  # a rank without data, in join(), has seen no forward yet
        if self.phase not in _PLANNING:
            return
        self._measure(step, device)
        looks = self.phase is Phase.WAITING
        if not (self._is_time_to_look(step, exact_sample) if looks else self._window.ends_with(step)):
            return
        assert self._coordinator is not None  # begun
        self._of_ddp.say_why_not()
        from commopt.schedule.sync import SyncPoint

        point = SyncPoint(
            step=step,
            window=self._window,
            gradient_times=self._gradient_times,
            strategy=next(iter(self._strategies)) if self.plan is None else self.plan.strategy,
            gradients=list(zip(self._buckets, gradients, strict=True)),
            settled=self._settled,
            movable=self._of_ddp.can_change(_names(*self._buckets)),
            overhead_us=overhead_us,
            tuned=self.tuned,
            exact_sample=exact_sample,
            optimizer=self.optimizer,
        )
        task = self._coordinator.look if looks else self._coordinator.decide
        self._pending = client.run(partial(task, point), f"planning after step {step}")
        self.phase = Phase.LOOKING if looks else Phase.SYNCHRONISING

    def _require_seen(self, tuned: Tuned, step: int) -> None:
        """Leave an earlier tuning if the parameters that DDP has shown are not those it was found for."""
        self._unseen = None
        try:
            names_its_model(tuned, _names(*self._buckets))
        except ConfigurationError as error:
            _log.warning("%s; names are known to attach, and to HookState(..., module=model): tuning anew", error)
            self.tuned = None
            self._of_ddp.wanted = ()
            self._leave_plan()
            self._window = self._first_window(step + 1)

    def _measure(self, step: int, device: torch.device) -> None:
        """Note that all gradients of `step` are there, on `device`; take times of the next one if it is measured."""
        if self._gradient_times is not None:
            self._gradient_times.end_step(step)
        elif self._window.first_step <= step + 1 <= self._window.last_step:
            self._gradient_times = GradientTimes(device)
            self._gradient_times.start(self._parameters)
        if step + 1 >= self._window.first_step:
            self.phase = Phase.MEASURING

    def _stop_measuring(self) -> None:
        self._recorder.enabled = self._recorder.always
        if self._gradient_times is not None:
            self._gradient_times.stop()
            self._gradient_times = None

    def _is_time_to_look(self, step: int, exact_sample: ExactSample | None) -> bool:
        """Return whether all ranks look after `step` at how far compressed averages are behind."""
        if exact_sample is None or self.aggregator.lossless:
            return False
        return (step + 1 - exact_sample.first_step) % LOOK_EVERY_STEPS == 0

    def require_repeatable(self, step: int) -> None:
        """Raise ConfigurationError when `step` is captured in a CUDA graph and is not what all later ones will be."""
        if not reducer.is_capturing():
            return
        if self.phase in _PLANNING:
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
        """Do what was decided at the last synchronisation point, if the step before ended with one."""
        if self.phase not in _DECIDING:
            return
        assert self._pending is not None
        assert self._coordinator is not None
        self._pending.wait()
        decision, looked = self._coordinator.decision, self.phase is Phase.LOOKING
        if decision is not None or not looked:
            self._stop_measuring()
        if decision is not None:
            self._apply(decision, self._coordinator)
        # Only now: after Ctrl-C above this rank would otherwise go another way than the others.
        self.phase = Phase.WAITING if decision is not None or looked else Phase.IDLE  # where rank 0 could not decide
        self._pending = None

    def _apply(self, decision: Decision, coordinator: Coordinator) -> None:
        self._window = decision.window
        if decision.plan is not None:
            self._follow(decision.plan)
        elif self.plan is not None:
            self.plan = decision.updated(self.plan)
        self.decisions.append(decision)
        self.tuned = decision.tuned or self.tuned
        if coordinator.is_leader:
            _log.info("after step %d: %s", coordinator.step, decision.reason)
            if decision.warning:
                _log.warning("%s", decision.warning)

    def _drop_decision(self) -> None:
        """Let a decision that is under way end without consequences."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def _names(*buckets: Layout) -> tuple[str, ...]:
    return tuple(piece.name for bucket in buckets for piece in bucket.pieces)
