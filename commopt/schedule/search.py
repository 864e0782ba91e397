"""Find the plan that pays on live steps, keep it while conditions last, and leave it when it stops paying.

measured as it is -> trial -> trial .. -> the best, or what ran before -> watch -> drift -> trial ..
                                                                            \\> diverged -> an exact average

Decided on rank 0 and followed by all, for adaptive buckets (one strategy, or two exact ones) as for `auto` (all that
is allowed). Each trial is a plan that all ranks follow for nine steps. Its messages correct the prices, by which the
next one is made: messages of another size show what part of their time goes by size and what does not. What is
compared in the end was measured, all of it in this run, and what does not pay is taken back. Before a small gain is
believed, what ran before is measured again: its first window may have seen a program that warms up.

A search makes max_trials trials at most. With 4, and a first window that can be measured, it is over after
10 + 4 * 9 = 46 steps, or 55 with the second look at what ran before; nine more after a checkpoint out of the middle of
another search.

A window is looked at 50, 100, .. 800 steps apart while nothing moves; news halves the distance. The k-th search keeps
the next one 50 * 2^k steps away, so that T steps see at most log2(T / 50) after the first, whatever is measured, and
each changes the plan max_trials + 2 times at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from commopt.schedule.decision import FIRST_CALENDAR, WINDOW_STEPS, Calendar, Decision, Tuned
from commopt.schedule.estimate import DRIFT, LEAST_GAIN, ms
from commopt.schedule.plan import Plan
from commopt.schedule.planner import SPARE, best_plan
from commopt.schedule.prices import Correction, Costs
from commopt.schedule.trials import LEAST_SHARE, Divergence, Option, Round, Trial, choose, pays, told_of
from commopt.schedule.window import Conditions, Measured, Window

SETTLING_STEPS = 2  # buffers and caches follow
LEAST_STEPS = 4
FIRST_DISTANCE_STEPS = 50
LARGEST_DISTANCE_STEPS = 800
_HOPELESS = 1.05  # another strategy that is expected to take so much longer than the best is not tried
_DISAPPOINTING = 1.05  # what takes so much longer than expected has costs that no price knows
_FEW_MESSAGES = 1.5  # and then the messages that ran before may be expected to take so much longer
_STRAGGLING = 0.1
_STOCK = "no strategy beats stock DDP here; detach the hook"


class Search:
    """Plain computation, without clock, chance or communication: windows of measurements in, decisions out.

    options: what may be chosen; the first is what runs without a plan. max_bytes: of a message of several gradients.
    allow: the families a user allowed, () where there is no strategy to choose. nodes: ranks on each.
    adopted: what an earlier tuning came to, to go on with.
    """

    def __init__(
        self,
        options: Sequence[Option],
        costs: Costs,
        max_bytes: int | None = None,
        max_trials: int = 3,
        allow: tuple[str, ...] = (),
        nodes: tuple[int, ...] = (),
        adopted: Tuned | None = None,
    ) -> None:
        self._options = {option.strategy: option for option in options}
        self._default = options[0]
        self._correction = Correction(costs)
        self._max_bytes, self._max_trials = max_bytes, max_trials
        self._allow, self._nodes, self._tuned = allow, nodes, adopted
        self._plan = None if adopted is None else adopted.plan
        self._began: int | None = None
        self._is_new = True
        self._why = "" if adopted else "first plan"  # what the next search is for
        self._round: Round | None = None
        self._trial: Trial | None = None
        self._reference: Conditions | None = None
        self._doubt = ""  # a reason to search again although nothing moved
        self._divergence = Divergence()
        self._refused: set[str] = set()
        self._rounds = self._no_search_before = 0
        self._distance = FIRST_DISTANCE_STEPS
        self._retry_steps = WINDOW_STEPS

    @property
    def costs(self) -> Costs:
        """Costs as corrected so far."""
        return self._correction.costs

    def reprice(self, costs: Costs) -> None:
        """Go by new trials of what messages cost."""
        self._correction = Correction(costs)

    def decide(self, window: Window, step: int) -> Decision:
        """Decide after `step`, with what was measured since the calendar's measure_from."""
        if self._began is None:
            self._began = max(0, step - FIRST_CALENDAR.meet_at)
        if self._round is not None and self._trial is not None:
            return self._after_trial(self._round, self._trial, window, step)
        if len(window.step_us) < LEAST_STEPS:
            return self._measure_again(window, step)
        self._retry_steps = WINDOW_STEPS
        now = Measured.of(window, self._plan)
        if self._is_new:
            self._is_new = False
            if self._allow and self._runs_a_trial(now.plan):
                return self._leave_trial(now.plan, step)
        if self._why:
            why, self._why = self._why, ""
            self._correction.learn(window.observed)
            return self._search(why, now, window, step)
        return self._watch(now, window, step)

    def _measure_again(self, window: Window, step: int) -> Decision:
        """Measure again, each time twice as many steps later, until a window will do."""
        meet_at = step + self._retry_steps
        self._retry_steps = min(2 * self._retry_steps, LARGEST_DISTANCE_STEPS)
        reason = f"{len(window.step_us)} steps could be measured, fewer than {LEAST_STEPS}; measuring again"
        return Decision(None, Calendar(meet_at - WINDOW_STEPS + 1, meet_at), reason)

    def _runs_a_trial(self, plan: Plan) -> bool:
        """Return whether a checkpoint brought what was on trial when it was written."""
        if self._plan is not None:
            return plan.contents != self._plan.contents
        return plan.strategy != self._default.strategy

    def _leave_trial(self, plan: Plan, step: int) -> Decision:
        """Do as before the search that the trial belonged to: nothing is known of what it is to be compared with."""
        if self._plan is None:
            self._plan = Plan(plan.groups, self._default.strategy, "measured")
        reason = "what runs is not what tuning came to, as after a checkpoint from the middle of a search; going back"
        return Decision(self._plan, _settled(step), reason)

    # ------------------------------------------------------------------------------------- searching

    def _search(self, why: str, now: Measured, window: Window, step: int) -> Decision:
        option = self._options.get(now.plan.strategy, self._default)
        name = f"{option.name} as found" if self._tuned is None else self._tuned.name
        if not name.endswith((" as found", " as before")):
            name += " as before"
        late = window.straggler(_STRAGGLING)
        self._round = Round(f"{why}; {late}" if late else why, [Trial(name, option, now.plan, measured=now)])
        return self._next(self._round, step)

    def _after_trial(self, search: Round, trial: Trial, window: Window, step: int) -> Decision:
        measured = None
        if len(window.step_us) >= LEAST_STEPS:
            self._correction.learn(window.observed)
            now = Measured.of(window, self._plan)
            if now.plan is self._plan:  # else DDP had other buckets meanwhile, as in join()
                measured = now
        search.end_trial(trial, measured)
        return self._next(search, step)

    def _next(self, search: Round, step: int) -> Decision:
        """Try what promises most, or end the search."""
        trial = self._promising(search) if search.trials < self._max_trials else None
        trial = trial or search.to_confirm()
        if trial is None:
            return self._conclude(search, step)
        self._trial, self._plan = trial, trial.plan
        step_us, exposed_us = trial.expected or (trial.step_us, search.base.exposed.value)
        verb = "trying" if trial.measured is None else "measuring once more"
        reason = (
            f"{search.why}: {verb} {trial}, a step of {ms(step_us)} expected, {ms(exposed_us)} of it exposed; "
            f"{search.tried[-1].words}"
        )
        return Decision(trial.plan, _settled(step), reason)

    def _promising(self, search: Round) -> Trial | None:
        """Return the next plan to try, None when none is left that could pay."""
        last = search.tried[-1]
        if last.expected is not None and last.step_us > _DISAPPOINTING * last.expected[0]:
            # Few messages cost processors that are busy less than any price says.
            plan = Plan(search.before.plan.groups, last.option.strategy, "measured")
            expected = search.base.expected_of(plan, self.costs)
            if not search.knows(plan) and expected[0] <= _FEW_MESSAGES * search.fastest.step_us:
                return Trial(f"{last.option.name} in DDP's buckets", last.option, plan, expected)
        known = {trial.option.strategy for trial in [*search.tried, *search.abandoned]}
        hopeful = []
        for trial in self._untried(search):
            assert trial.expected is not None  # it was just predicted
            step_us, exposed_us = trial.expected
            new = bool(self._allow) and trial.option.strategy not in known
            most = _HOPELESS if new else 1 - LEAST_GAIN
            saves = exposed_us < (1 - LEAST_SHARE) * search.base.exposed.value or search.before.option.lossy
            if saves and step_us <= most * search.fastest.step_us:
                hopeful.append(trial)
        return min(hopeful, key=lambda trial: trial.expected or (), default=None)

    def _untried(self, search: Round) -> Iterator[Trial]:
        """Yield the best plan of each strategy by all that was learned so far, no two alike."""
        reference = search.fastest.measured
        assert reference is not None  # it was measured
        names = [trial.name for trial in [*search.tried, *search.abandoned]]
        for option in self._options.values():
            if option.strategy in self._refused or option.strategy not in self.costs.prices:
                continue
            plan = Plan(search.before.plan.groups, option.strategy, "measured")
            if reference.movable:
                plan = best_plan(reference.units, self.costs.only([option.strategy]), self._max_bytes, SPARE)
            if not search.knows(plan):
                own = (f"{option.name},", f"{option.name} in ")  # not those of "hierarchical quantized"
                tried = [name for name in names if name == option.name or name.startswith(own)]
                again = sum(not name.endswith((" found", " before")) for name in tried)
                name = option.name + (f", refined {again}" if again > 1 else ", refined" if again else "")
                yield Trial(name, option, plan, reference.expected_of(plan, self.costs))

    def _conclude(self, search: Round, step: int) -> Decision:
        best = choose(search.tried)
        assert best.measured is not None  # it was tried
        seem = [each for each in search.tried[1:] if each.measured is not None and pays(search.base, each.measured, 0)]
        self._doubt = "a gain was within the noise" if best is search.before and seem else ""
        self._reference, self._round, self._trial = best.measured.conditions, None, None
        self._rounds += 1
        self._no_search_before = step + FIRST_DISTANCE_STEPS * 2**self._rounds
        self._distance, self._divergence = FIRST_DISTANCE_STEPS, Divergence()
        running = search.before.plan if self._plan is None else self._plan
        predicted = best.measured.expected(self.costs)
        self._plan = replace(best.plan, predicted=predicted)
        warning = ""
        if best is search.before:
            gain = f"{LEAST_SHARE:.0%} of the exposed communication" if search.trials else f"{LEAST_GAIN:.0%} of a step"
            reason = f"{search.why}: {best}, as before: nothing {'tried' if search.trials else 'else'} saves {gain}"
            if self._goes_as_stock_ddp(best.plan):
                warning = f"{_STOCK} ({best.words})"
        else:
            reason = f"{search.why}: {best}: {search.before.words} -> {best.words}"
        if self._allow:
            considered = [*search.tried, *search.abandoned, *self._untried(search)]
            told = tuple(each.told(search.base, self.costs) for each in considered)
            planned = None if self._goes_as_stock_ddp(best.plan) else self._plan
            steps = step + 1 - (self._began or 0)
            self._tuned = Tuned(best.name, self._allow, self._nodes, steps, told, planned, reason)
        decision = replace(self._later(step, reason), tuned=self._tuned, warning=warning)
        if best.plan.contents == running.contents:
            return replace(decision, predicted=predicted)
        return replace(decision, plan=self._plan)

    def _goes_as_stock_ddp(self, plan: Plan) -> bool:
        """Return whether `auto` sends everything as it would go without it."""
        return bool(self._allow) and plan.origin == "found" and plan.strategy == self._default.strategy

    # ------------------------------------------------------------------------------------- watching

    def _watch(self, now: Measured, window: Window, step: int) -> Decision:
        moved = "" if self._reference is None else now.conditions.drift_from(self._reference, self.costs)
        self._correction.learn(window.observed, drifted=bool(moved))
        option = self._options.get(now.plan.strategy)
        if self._reference is None:
            # An earlier tuning's is new with the run: residuals have yet to become what they are going to be.
            self._reference = now.conditions
        elif option is not None and option.lossy and (diverged := self._divergence.seen(window.quality)):
            return self._fall_back(diverged, now, step)
        distance = self._distance // 2 if moved else 2 * self._distance
        self._distance = min(max(distance, FIRST_DISTANCE_STEPS), LARGEST_DISTANCE_STEPS)
        name = now.plan.strategy if option is None else option.name
        news = moved or self._doubt
        if not news:
            return self._later(step, f"{name}: nothing moved by more than {DRIFT:.0%}; {told_of(now)}")
        if step < self._no_search_before:
            return self._later(step, f"{name}: {news}; too soon to search again")
        if len(self._options) == 1:  # what it costs was observed
            self._began = step
            return self._search(news, now, window, step)
        self._why, self._began = news, step
        reason = f"{name}: {news}; trying out what messages cost now"
        return Decision(None, Calendar(step + 1, step + WINDOW_STEPS), reason, try_out=True)

    def _fall_back(self, diverged: str, now: Measured, step: int) -> Decision:
        """Average exactly from now on; what diverged is not chosen again."""
        assert self._tuned is not None  # which chose what is lossy
        self._refused.add(now.plan.strategy)
        exact = [option.strategy for option in self._options.values() if not option.lossy]
        groups = now.plan.groups
        if now.movable:
            groups = best_plan(now.units, self.costs.only(exact), self._max_bytes, SPARE).groups
        plans = [Plan(groups, strategy, "measured") for strategy in exact]
        plan = min(plans, key=lambda plan: now.expected_of(plan, self.costs))
        option = self._options[plan.strategy]
        self._plan, self._reference = plan, None
        trial = Trial(f"{option.name} after divergence", option, plan)
        reason = f"{self._tuned.name} -> {trial.name}: {diverged}"
        considered = tuple(tried for tried in self._tuned.considered if tried.name != trial.name)
        told = trial.told(now, self.costs)
        self._tuned = replace(self._tuned, name=trial.name, considered=(*considered, told), plan=plan, reason=reason)
        return replace(self._later(step, reason), plan=plan, tuned=self._tuned)

    def _later(self, step: int, reason: str) -> Decision:
        meet_at = max(step + self._distance, self._no_search_before if self._doubt else 0)
        return Decision(None, Calendar(meet_at - WINDOW_STEPS + 1, meet_at), reason)


def _settled(step: int) -> Calendar:
    """Return when to measure another plan, which is followed after `step`."""
    begin = step + 1 + SETTLING_STEPS
    return Calendar(begin, begin + WINDOW_STEPS - 1)
