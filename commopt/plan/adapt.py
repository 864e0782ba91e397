"""When to measure, when to change the plan, and when to take a change back; decided on rank 0, followed by all.

first plan  -> trial -> accepted -> watch -> drift -> trial ..
                 |  \\> taken back -> watch
                 \\> surprise -> refined -> trial (twice at most)

A trial is verified: when the measured step is worse than before, by more than 2 % and more than noise explains, what
ran before comes back, and the plan is remembered as refused.

What a trial teaches is used at once. Messages of another size show what part of their time goes by size and what does
not; and backward, which is slower while the lane is busy, is measured as it is beside those messages. No model of that
is needed: if the step, its exposed part or the messages differ from what was expected, the next plan is made from the
times of the verifying window and tried in the same meeting; what ran before all of this stays what it is compared with
if the trial was worse. Two such refinements are allowed in a training, and two more after each drift.

The k-th change keeps the next trial that is no refinement 50 * 2^(k-1) steps away. If C changes precede the last such
trial, T steps have T >= 50 * 2^(C-1), and it makes four changes at most: itself, two refinements, and the end of the
last. So T steps have at most 5 + log2(1 + T / 50) changes, whatever is measured. Windows without news come 50, 100, ..,
800 steps apart; news halves the distance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from commopt.plan import surprise
from commopt.plan.calendar import Calendar, Decision
from commopt.plan.conditions import Conditions
from commopt.plan.correction import Correction
from commopt.plan.evidence import DRIFT, LEAST_GAIN, SIGNIFICANT_ERRORS, WORSE, ms
from commopt.plan.measured import Measured
from commopt.plan.order import prioritized
from commopt.plan.patience import Patience
from commopt.plan.plan import Plan, Prediction
from commopt.plan.planner import best_plan
from commopt.plan.prices import Costs
from commopt.plan.schedule import simulate
from commopt.plan.window import Window

SETTLING_STEPS = 3  # DDP makes its buckets anew after the first step; buffers and caches follow
# Each message also costs backward a little, which no price has in it: rather fewer, if a step takes no more than this
# longer by prediction.
SPARE = 0.01
WINDOW_STEPS = 10
LEAST_STEPS = 5
FIRST_DISTANCE_STEPS = 50
LARGEST_WATCH_STEPS = 800
MOST_REFINEMENTS = 2
STRAGGLING = 0.1
_WITHIN_NOISE = "is within the noise"


@dataclass(frozen=True)
class _Trial:
    plan: Plan
    before: Measured
    drifts: int  # so far


class Adaptation:
    """Decides from windows of measurements; plain computation, without clock, chance or communication.

    costs: as calibrated; what windows observe corrects them. max_bytes: of a bucket of several units.
    needed_first: launch in the order of `first_needed_first`.
    """

    first = Calendar(SETTLING_STEPS, SETTLING_STEPS + WINDOW_STEPS - 1)

    def __init__(self, costs: Costs, max_bytes: int | None = None, needed_first: bool = False) -> None:
        self._correction = Correction(costs)
        self._max_bytes, self._needed_first = max_bytes, needed_first
        self._plan: Plan | None = None
        self._trial: _Trial | None = None
        self._refused: list[_Trial] = []
        self._reference: Conditions | None = None
        self._open = ""  # a reason to plan again although nothing moved
        self._changes = 0
        self._refinements = self._drifts = 0
        self._no_trial_before = 0
        self._watch_steps = FIRST_DISTANCE_STEPS
        self._patience = Patience(WINDOW_STEPS, LEAST_STEPS)

    @property
    def costs(self) -> Costs:
        """Costs as corrected so far."""
        return self._correction.costs

    def reprice(self, costs: Costs) -> None:
        """Go by new trials of what messages cost."""
        self._correction = Correction(costs)

    def decide(self, window: Window, step: int) -> Decision:
        """Decide after `step`, with what was measured since the calendar's measure_from."""
        if again := self._patience.wait(window, step):
            return again
        if self._trial is not None:
            trial, self._trial = self._trial, None
            return self._verify(trial, window, step)
        moved = ""
        if self._reference is not None:
            moved = Conditions.of(window).drift_from(self._reference, self.costs)
            watch_steps = self._watch_steps // 2 if moved else 2 * self._watch_steps
            self._watch_steps = min(max(watch_steps, FIRST_DISTANCE_STEPS), LARGEST_WATCH_STEPS)
            if not moved and not self._open:
                return self._keep(step, f"nothing moved by more than {DRIFT:.0%}; step {ms(window.step.value)}")
        if moved:
            self._refinements, self._drifts = 0, self._drifts + 1
        self._correction.learn(window.observed, drifted=bool(moved))
        return self._consider(window, step, moved or self._open or "first plan")

    def _consider(self, window: Window, step: int, news: str) -> Decision:
        """Plan anew, and change if that is worth it."""
        now = Measured.of(window, self._plan)
        plan, why = self._better(window, now)
        self._reference, self._open = now.conditions, "a gain was within the noise" if _WITHIN_NOISE in why else ""
        if plan is None:
            return self._keep(step, f"{news}: {why}", now)
        return self._try(plan, now, step, f"{news}: {why}{_aside(window)}")

    def _verify(self, trial: _Trial, window: Window, step: int) -> Decision:
        """Compare the step with the one before the change, and what happened with what was expected."""
        now, before = Measured.of(window, self._plan), trial.before
        other_costs = news = surprise.of_messages(window, self.costs)
        if not news and now.plan is self._plan and trial.plan.predicted is not None:
            news = surprise.of_step(window, trial.plan.predicted, before.step.error)
        self._correction.learn(window.observed)
        worse = window.step.exceeds(before.step, WORSE * before.step.value)
        if worse:
            self._refused.append(trial)
        best = before if worse else now
        self._reference, self._open = best.conditions, other_costs
        tried = f"{len(trial.plan.buckets)} buckets"
        measured = f"step {ms(before.step.value)} -> {ms(window.step.value)}"
        if news and self._refinements < MOST_REFINEMENTS:
            plan, why = self._better(window, best)
            if plan is not None:
                self._refinements += 1
                return self._try(plan, best, step, f"refined, {tried}: {measured}, but {news}: {why}{_aside(window)}")
        if worse:
            plan = replace(best.plan, predicted=best.expected(self.costs))
            reason = f"taken back, {tried} -> {len(plan.buckets)} buckets: {measured}{_aside(window)}"
            return self._change(plan, step, reason)
        return self._keep(step, f"accepted, {tried}: {measured}{_aside(window)}", now)

    def _better(self, window: Window, best: Measured) -> tuple[Plan | None, str]:
        """Return a plan that is worth a trial, expected to be better than `best`; or None; and why."""
        running = Measured.of(window, self._plan)
        now = running.expected(self.costs)
        plan, then = self._planned(window)
        step_us = max(0.0, window.step.value - (now.finish_us - then.finish_us))
        gain_us, least_us = best.step.value - step_us, LEAST_GAIN * best.step.value
        expected = f"predicted step {ms(best.step.value)} -> {ms(step_us)}"
        if gain_us < least_us:
            return None, f"the best plan found gains too little; {expected}"
        noise_us = SIGNIFICANT_ERRORS * max(window.step.error, best.step.error)
        if gain_us < noise_us:
            return None, f"{expected} {_WITHIN_NOISE}, {ms(noise_us)}"
        for refused in self._refused:
            # Without a drift other conditions are what another plan makes of them.
            drifted = refused.drifts != self._drifts
            if drifted and best.conditions.drift_from(refused.before.conditions, self.costs):
                continue
            known = simulate(window.units, refused.plan.buckets, self.costs, refused.plan.order)
            if then.finish_us > known.finish_us - least_us:
                return None, f"the best plan found is much like one that was taken back; {expected}"
        why = f"backward is ready after {ms(now.compute_us)} and communication takes {ms(now.communication_us)}"
        return plan, f"{len(running.plan.buckets)} buckets -> {len(plan.buckets)} buckets, because {why}; {expected}"

    def _planned(self, window: Window) -> tuple[Plan, Prediction]:
        plan = best_plan(window.units, self.costs, self._max_bytes, spare=SPARE)
        if self._needed_first:
            plan = prioritized(plan, window.units, self.costs)
        assert plan.predicted is not None  # best_plan makes one
        return plan, plan.predicted

    def _try(self, plan: Plan, before: Measured, step: int, reason: str) -> Decision:
        self._trial = _Trial(plan, before, self._drifts)
        decision = self._change(plan, step, reason)
        begin = step + 1 + SETTLING_STEPS
        return replace(decision, calendar=Calendar(begin, begin + WINDOW_STEPS - 1))

    def _change(self, plan: Plan, step: int, reason: str) -> Decision:
        self._plan = plan
        self._changes += 1
        self._no_trial_before = step + FIRST_DISTANCE_STEPS * 2 ** (self._changes - 1)
        self._watch_steps = FIRST_DISTANCE_STEPS
        return replace(self._keep(step, reason), plan=plan)

    def _keep(self, step: int, reason: str, running: Measured | None = None) -> Decision:
        """Go on; with a new prediction for the plan if it was measured as it is."""
        predicted = None
        if running is not None and self._plan is not None and running.plan is self._plan:
            predicted = running.expected(self.costs)
            self._plan = replace(self._plan, predicted=predicted)
        # There is nothing to be learned while there is nothing to be done.
        meet_at = max(step + self._watch_steps, self._no_trial_before)
        return Decision(None, Calendar(meet_at - WINDOW_STEPS + 1, meet_at), reason, predicted)


def _aside(window: Window) -> str:
    late = window.straggler(STRAGGLING)
    return f"; {late}" if late else ""
