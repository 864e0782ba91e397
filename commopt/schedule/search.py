# SPDX-License-Identifier: Apache-2.0
"""Find the plan that pays on live steps, keep it while conditions last, and leave it when it stops paying.

measured as it is -> trial -> trial .. -> the best, or what ran before -> watch -> drift -> trial ..
                                                                            \\> falls behind -> an exact average

Decided on rank 0 and followed by all, for adaptive buckets (one strategy, or two exact ones) as for `auto` (all that
is allowed). Each trial is a plan that all ranks follow for nine steps. `auto` tries a strategy in the buckets that ran
before, then in those planned for it. Messages of a trial correct the prices, by which the next one is made. What is
compared in the end was measured, all of it in this run, and what does not pay is taken back. Before a small gain is
believed, what ran before is measured again: its first window may have seen a program that warms up.

A search makes max_trials trials at most. With 4, and a first window that can be measured, it is over after
10 + 4 * 9 = 46 steps, or 55 with the second look at what ran before.

A window is looked at 50, 100, .. 800 steps apart while nothing moves; news halves the distance. The k-th search keeps
the next one 50 * 2^k steps away, so that T steps see at most log2(T / 50) after the first, whatever is measured, and
each changes the plan max_trials + 2 times at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from commopt.aggregate.auto import LOCAL
from commopt.feedback import falls_behind
from commopt.schedule.decision import FIRST_CALENDAR, WINDOW_STEPS, Calendar, Decision, Option, Tuned
from commopt.schedule.estimate import DRIFT, LEAST_GAIN, ms
from commopt.schedule.learning import LEARNED_LOCAL
from commopt.schedule.plan import Plan
from commopt.schedule.planner import SPARE, best_plan
from commopt.schedule.prices import Correction, Costs
from commopt.schedule.rounds import expected
from commopt.schedule.trials import LEAST_SHARE, Round, Trial, choose, pays
from commopt.schedule.window import Window

SETTLING_STEPS = 2  # buffers and caches follow
LEAST_STEPS = 4
FIRST_DISTANCE_STEPS = 50
LARGEST_DISTANCE_STEPS = 800
_HOPELESS = 1.05  # another strategy that is expected to take so much longer than the best is not tried
_STOCK = "no strategy beats stock DDP here; detach the hook"


class Search:
    """Plain computation, without clock, chance or communication: windows of measurements in, decisions out.

    options: what may be chosen; the first is what runs without a plan. max_bytes: of a message of several gradients.
    allow: the families a user allowed, () where there is no strategy to choose. nodes: ranks on each.
    adopted: what an earlier tuning came to, to go on with. optimizer: as Tuned has it.
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
        optimizer: str = "",
    ) -> None:
        self._options = {option.strategy: option for option in options}
        self._default = options[0]
        self._correction = Correction(costs)
        self._max_bytes = max_bytes
        self._max_trials = max_trials
        self._allow = allow
        self._nodes = nodes
        self._tuned = adopted
        self._optimizer = optimizer
        self._plan = None if adopted is None else adopted.plan
        self._began: int | None = None
        self._why = "" if adopted else "first plan"  # what the next search is for
        self._round: Round | None = None
        self._reference: Window | None = None
        self._doubt = ""  # a reason to search again although nothing moved
        self._refused: set[str] = set()
        self._warned = False
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
        if self._plan is not None and self._plan.contents == window.plan.contents:
            window = replace(window, plan=self._plan)  # else DDP has other buckets, as in join()
        enough = len(window.step_us) >= LEAST_STEPS
        if self._round is not None:
            if enough:
                self._correction.learn(window.observed)
            self._round.end_trial(window if enough and window.plan is self._plan else None)
            return self._next(self._round, step)
        if not enough:  # measure again, each time twice as many steps later
            meet_at = step + self._retry_steps
            self._retry_steps = min(2 * self._retry_steps, LARGEST_DISTANCE_STEPS)
            reason = f"{len(window.step_us)} steps could be measured, fewer than {LEAST_STEPS}; measuring again"
            return Decision(None, Calendar(meet_at - WINDOW_STEPS + 1, meet_at), reason)
        self._retry_steps = WINDOW_STEPS
        if not self._why:
            return self._watch(window, step)
        self._correction.learn(window.observed)
        return self._search(window, step)

    # ------------------------------------------------------------------------------------- searching

    def _search(self, window: Window, step: int) -> Decision:
        option = self._options.get(window.plan.strategy, self._default)
        why, self._why = self._why, ""
        name = f"{option.name} as {'found' if self._plan is None else 'before'}"
        self._round = Round(why, Trial(name, option, window.plan, measured=window), window)
        return self._next(self._round, step)

    def _next(self, search: Round, step: int) -> Decision:
        """Try what promises most, or end the search."""
        last = search.tried[-1]
        hopeful = [trial for trial in self._untried(search) if self._is_hopeful(search, trial)]
        if hopeful and len(search.tried) <= self._max_trials:
            trial = min(hopeful, key=lambda trial: trial.option.steps * (trial.expected or (0.0,))[0])
        elif (before := search.to_confirm()) is not None:
            trial = before
        else:
            return self._conclude(search, step)
        search.running = trial
        self._plan = trial.plan
        step_us, exposed_us = trial.expected or (search.base.step.value, search.base.exposed.value)
        verb = "trying" if trial.measured is None else "measuring once more"
        expected = f"a step of {ms(step_us)} expected, {ms(exposed_us)} of it exposed"
        return Decision(trial.plan, _settled(step), f"{search.why}: {verb} {trial}, {expected}; {last.words}")

    def _untried(self, search: Round) -> Iterator[Trial]:
        """Yield the next plan of each strategy by all that was learned so far, no two alike."""
        reference = search.fastest.did
        found = search.before.plan.groups
        for option in self._options.values():
            if option.strategy in self._refused or option.strategy not in self.costs.prices:
                continue
            plan, name = Plan(found, option.strategy, "measured"), option.name
            tried = [trial.plan for trial in search.tried if trial.option is option]
            if reference.movable and (tried or not self._allow):
                plan = best_plan(reference.units, self.costs.only([option.strategy]), self._max_bytes, SPARE)
                again = sum(each.groups != found for each in tried)
                name += " in planned buckets" + (f", refined {again}" if again else "")
            if not search.knows(plan):
                yield Trial(name, option, plan, reference.expected_of(plan, self.costs))

    def _is_hopeful(self, search: Round, trial: Trial) -> bool:
        """Return whether a plan is expected to save enough, or to show what a strategy of `auto` does."""
        assert trial.expected is not None  # it was predicted
        step_us, exposed_us = trial.expected
        known = trial.option in [each.option for each in search.tried]
        most = 1 - LEAST_GAIN if known or not self._allow else _HOPELESS
        saves = exposed_us < (1 - LEAST_SHARE) * search.base.exposed.value or search.before.option.lossy
        return saves and trial.option.steps * step_us <= most * search.fastest.to_loss.value

    def _conclude(self, search: Round, step: int) -> Decision:
        best = choose(search.tried)
        others = [each for each in search.tried[1:] if each.measured is not None]
        seems_better = best is search.before and any(pays(search.before, each, errors=0) for each in others)
        self._doubt = "a gain was within the noise" if seems_better else ""
        self._reference = best.did
        self._round = None
        self._rounds += 1
        self._no_search_before = step + FIRST_DISTANCE_STEPS * 2**self._rounds
        self._distance = FIRST_DISTANCE_STEPS
        running = search.running.plan
        predicted = best.did.predicted(self.costs)
        self._plan = replace(best.plan, predicted=predicted)
        as_stock = bool(self._allow) and best.plan.origin == "found" and best.plan.strategy == self._default.strategy
        warning = ""
        if best is search.before:
            gain = f"{LEAST_SHARE:.0%} of the exposed communication" if others else f"{LEAST_GAIN:.0%} of a step"
            reason = f"{search.why}: {best}, as before: nothing {'tried' if others else 'else'} saves {gain}"
            if as_stock and not self._warned:
                warning, self._warned = f"{_STOCK} ({best.words})", True
        else:
            reason = f"{search.why}: {best}: {search.before.words} -> {best.words}"
        if self._allow:
            told = tuple(each.told(search.base, self.costs) for each in [*search.tried, *self._untried(search)])
            if LOCAL in self._allow and len(self._nodes) > 1:
                told += tuple(
                    expected(average, learned, to_loss, search.base, self.costs)
                    for average, learned in LEARNED_LOCAL.items()
                    if (to_loss := learned.steps(self._optimizer)) is not None
                )
            steps = step + 1 - (self._began or 0)
            planned = None if as_stock else self._plan
            self._tuned = Tuned(best.name, self._allow, self._nodes, steps, told, planned, reason, self._optimizer)
        decision = replace(self._later(step, reason), tuned=self._tuned, warning=warning)
        if best.plan.contents == running.contents:
            return replace(decision, predicted=predicted)
        return replace(decision, plan=self._plan)

    # ------------------------------------------------------------------------------------- watching

    def _watch(self, window: Window, step: int) -> Decision:
        moved = "" if self._reference is None else window.drift_from(self._reference, self.costs)
        self._correction.learn(window.observed)
        option = self._options.get(window.plan.strategy)
        if self._reference is None:
            # An earlier tuning's is new with the run: residuals have yet to become what they are going to be.
            self._reference = window
        elif option is not None and option.lossy and (behind := falls_behind(window.steps_behind)):
            return self._fall_back(behind, window, step)
        distance = self._distance // 2 if moved else 2 * self._distance
        self._distance = min(max(distance, FIRST_DISTANCE_STEPS), LARGEST_DISTANCE_STEPS)
        name = window.plan.strategy if option is None else option.name
        news = moved or self._doubt
        if not news:
            return self._later(step, f"{name}: nothing moved by more than {DRIFT:.0%}; {window}")
        if step < self._no_search_before:
            return self._later(step, f"{name}: {news}; too soon to search again")
        self._why = news
        self._began = step
        reason = f"{name}: {news}; trying out what messages cost now"
        return Decision(None, Calendar(step + 1, step + WINDOW_STEPS), reason, try_out=True)

    def look(self, steps_behind: float | None, step: int) -> str:
        """Return as JSON the decision to leave, between two windows, what falls behind exact averages; "" to go on."""
        behind, last = falls_behind(steps_behind), self._reference
        if not behind or last is None or self._round is not None or self._tuned is None:
            return ""
        return self._fall_back(behind, last, step).to_json()

    def _fall_back(self, behind: str, window: Window, step: int) -> Decision:
        """Average exactly from now on; what fell behind is not chosen again."""
        assert self._tuned is not None  # which chose what is lossy
        self._refused.add(window.plan.strategy)
        exact = [option for option in self._options.values() if not option.lossy]
        trials = [
            Trial(f"{option.name} instead", option, Plan(window.plan.groups, option.strategy, "measured"))
            for option in exact
        ]
        trial = min(trials, key=lambda trial: window.expected_of(trial.plan, self.costs))
        self._plan = trial.plan
        self._reference = None
        reason = f"{self._tuned.name} -> {trial.name}: {behind}"
        considered = [tried for tried in self._tuned.considered if tried.name != trial.name]
        self._tuned = replace(
            self._tuned,
            name=trial.name,
            considered=(*considered, trial.told(window, self.costs)),
            plan=trial.plan,
            reason=reason,
        )
        return replace(self._later(step, reason), plan=trial.plan, tuned=self._tuned)

    def _later(self, step: int, reason: str) -> Decision:
        meet_at = max(step + self._distance, self._no_search_before if self._doubt else 0)
        return Decision(None, Calendar(meet_at - WINDOW_STEPS + 1, meet_at), reason)


def _settled(step: int) -> Calendar:
    """Return when to measure another plan, which is followed after `step`."""
    begin = step + 1 + SETTLING_STEPS
    return Calendar(begin, begin + WINDOW_STEPS - 1)
