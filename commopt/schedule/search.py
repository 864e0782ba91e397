# SPDX-License-Identifier: Apache-2.0
"""Find the plan that pays on live steps, keep it while conditions last, and leave it when it stops paying.

measured as it is -> trial -> trial .. -> the best, or the one before -> watch -> drift -> trial ..
                                                                            \\> falls behind -> an exact average

Rank 0 decides and all follow, for adaptive buckets (one strategy, or two that average alike) as for `auto` (all
that is allowed). Each trial is a plan that all ranks follow for nine steps. `auto` tries a strategy in the buckets that
ran before, then in those planned for it. The messages of a trial correct the prices, by which the next one is made. In
the end only measurements of this run are compared, and a plan that does not pay is taken back. Before a small gain is
believed, the plan that ran before is measured again: its first window may have seen a program that warms up.
Of two strategies that average alike the other one is tried even if it should not save: messages are timed for a second
only, and two ways of much the same price may differ by several times.

A search makes max_trials trials at most. With 4, and a first window that can be measured, it is over after
10 + 4 * 9 = 46 steps, or 55 with the second measurement of the plan before.

Windows are 50, 100, .. 800 steps apart while nothing moves; news halves the distance. The k-th search keeps the next
one 50 * 2^k steps away, so that T steps see at most log2(T / 50) searches after the first, whatever is measured, and
each changes the plan max_trials + 2 times at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from commopt.aggregate.auto import LOCAL
from commopt.aggregate.learning import LEARNED_LOCAL
from commopt.feedback import falls_behind
from commopt.schedule.candidates import LEAST_SHARE, Candidate, choose, pays
from commopt.schedule.costs import Costs
from commopt.schedule.decision import FIRST_LOOK, FIRST_WINDOW, WINDOW_STEPS, Decision, Outcome, Tuned, Window
from commopt.schedule.measurement import DRIFT, LEAST_GAIN, Measurement, ms
from commopt.schedule.plan import Plan, digest_of_names
from commopt.schedule.planner import SPARE, best_plan

SETTLING_STEPS = 2  # buffers and caches follow
LEAST_STEPS = 4
FIRST_DISTANCE_STEPS = 50
LARGEST_DISTANCE_STEPS = 800
# A strategy that is expected to take so much longer than the best is not tried: one of auto's, of which there are many,
# or one that averages alike. Messages are timed for a second, which says little of two that are near each other.
_HOPELESS, _HOPELESS_ALIKE = 1.05, 1.25
_WORTH_A_TRIAL = 0.1  # of a step that is exposed: with less, one that averages alike is tried if it should save
_CLEAR = 0.75  # of the step before: with a smaller gain the plan before is measured twice
_FIRST = "first plan"
_STOCK = "no strategy beats stock DDP here; detach the hook"


class _Comparison:
    """The candidates of one search.

    why: the reason for the search.
    before: the candidate that ran before.
    base: the measurement of `before`, which predictions start from.
    running: the candidate on trial.
    tried: all that were measured; the first is `before`.
    """

    def __init__(self, why: str, before: Candidate) -> None:
        self.why = why
        self.before = before
        self.base = before.result
        self.running = before
        self.tried = [before]
        self._confirmed = False

    @property
    def fastest(self) -> Candidate:
        """The candidate with the least time to a loss, whatever noise may explain."""
        return min((each for each in self.tried if each.measured is not None), key=lambda each: each.to_loss.value)

    def has_tried(self, plan: Plan) -> bool:
        """Return whether a plan was tried."""
        return any(each.planned.contents == plan.contents for each in self.tried)

    def to_confirm(self) -> Candidate | None:
        """Return the candidate that ran before, once, if the one to be chosen gains little.

        After a first look also if nothing is to be chosen: its steps are too few to say so.
        """
        best, clear_us = self.fastest, _CLEAR * self.base.step.value
        if self._confirmed or best.result.step.value <= clear_us:
            return None
        if len(self.base.step_us) >= LEAST_STEPS and not pays(self.before, best, errors=0):
            return None
        self._confirmed = True
        return self.before

    def end_trial(self, measured: Measurement | None) -> None:
        """Note what the trial measured; None if nothing could be."""
        if self.running is not self.before:
            self.tried.append(replace(self.running, measured=measured))
        elif measured is not None:  # the candidate before, once more
            few = len(self.base.step_us) < LEAST_STEPS
            self.base = measured if few else replace(measured, earlier=self.base)
            self.before = self.tried[0] = replace(self.before, measured=self.base)


class Search:
    """Plain computation, without clock, chance or communication: from measurements to decisions.

    candidates: the strategies to choose from; the first one needs no plan.
    costs: of messages, as corrected so far; to be set anew when messages were timed again.
    max_bytes: of a message of several gradients.
    max_trials: of one search.
    allow: the families a user allowed, () where there is no strategy to choose.
    nodes: ranks on each node.
    adopted: the result of an earlier tuning, to start from.
    optimizer: as Tuned has it.
    stock: whether the first candidate, in DDP's own buckets, sends what DDP without a hook would.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        costs: Costs,
        max_bytes: int | None = None,
        max_trials: int = 3,
        allow: tuple[str, ...] = (),
        nodes: tuple[int, ...] = (),
        adopted: Tuned | None = None,
        optimizer: str = "",
        stock: bool = True,
    ) -> None:
        self._candidates = {candidate.strategy: candidate for candidate in candidates}
        self._default = candidates[0]
        self.costs = costs
        self._max_bytes = max_bytes
        self._max_trials = max_trials
        self._allow = allow
        self._nodes = nodes
        self._tuned = adopted
        self._optimizer = optimizer
        self._stock = stock
        self._plan = None if adopted is None else adopted.plan
        self._began: int | None = None
        self._why = self._first_reason()  # for the next search
        self._looked = False  # whether the first look is over
        self._comparison: _Comparison | None = None  # of the search under way
        self._reference: Measurement | None = None
        self._doubt = ""  # a reason to search again although nothing moved
        self._refused: set[str] = set()
        self._warned = False
        self._searches = self._no_search_before = 0
        self._distance = FIRST_DISTANCE_STEPS
        self._retry_steps = WINDOW_STEPS

    def _first_reason(self) -> str:
        """Return why the first search begins; "" where an earlier tuning says what its result is."""
        if self._tuned is None:
            return _FIRST
        before, now = self._tuned.optimizer, self._optimizer
        counts = before and now and before != now and any(each.lossy for each in self._candidates.values())
        return f"tuned with {before}, and {now} learns differently" if counts else ""

    def decide(self, measured: Measurement, step: int) -> Decision:
        """Decide after `step`, by the measurement of the window that ends with it."""
        if self._began is None:
            self._began = max(0, step - FIRST_WINDOW.last_step)
        if self._plan is not None and self._plan.contents == measured.plan.contents:
            measured = replace(measured, plan=self._plan)  # else DDP has other buckets, as in join()
        enough = len(measured.step_us) >= LEAST_STEPS
        if self._comparison is not None:
            if enough:
                self._learn(measured)
            self._comparison.end_trial(measured if enough and measured.plan is self._plan else None)
            return self._next(self._comparison, step)
        if (decision := self._at_a_look(measured, step)) is not None:
            return decision
        if not enough:  # measure again, each time twice as many steps later
            window = Window.ending_with(step + self._retry_steps)
            self._retry_steps = min(2 * self._retry_steps, LARGEST_DISTANCE_STEPS)
            reason = f"{len(measured.step_us)} steps could be measured, fewer than {LEAST_STEPS}; measuring again"
            return Decision(None, window, reason)
        self._retry_steps = WINDOW_STEPS
        if not self._why:
            return self._watch(measured, step)
        self._learn(measured)
        return self._search(measured, step)

    def _at_a_look(self, measured: Measurement, step: int) -> Decision | None:
        """Return the decision by the steps of a first look, None if this is none.

        Messages were timed in a hurry. So a search begins with what is expected to save much; what might save less
        waits for a window of the usual length.
        """
        if len(measured.step_us) != FIRST_LOOK.steps or self._why != _FIRST or not self._allow or self._looked:
            return None
        self._looked, before = True, self.costs
        self._learn(measured)
        untried = self._untried(self._compared_with(measured))
        expected = [each.steps * each.expected_us[0] for each in untried if each.expected_us is not None]
        if min(expected, default=measured.step.value) <= _CLEAR * measured.step.value:
            return self._search(measured, step)
        self.costs = before
        reason = f"{_FIRST}: nothing is expected to save a quarter of a step; measuring longer"
        return Decision(None, Window(step + 1, step + WINDOW_STEPS), reason, retime=True)

    def _learn(self, measured: Measurement) -> None:
        self.costs = self.costs.learned(measured.plan.strategy, measured.message_nbytes, measured.lane_us)

    # ------------------------------------------------------------------------------------- searching

    def _search(self, measured: Measurement, step: int) -> Decision:
        self._comparison, self._why = self._compared_with(measured), ""
        return self._next(self._comparison, step)

    def _compared_with(self, measured: Measurement) -> _Comparison:
        """Return the comparison of a new search with what ran before it."""
        candidate = self._candidates.get(measured.plan.strategy, self._default)
        name = f"{candidate.name} as {'found' if self._plan is None else 'before'}"
        return _Comparison(self._why, replace(candidate, name=name, plan=measured.plan, measured=measured))

    def _next(self, comparison: _Comparison, step: int) -> Decision:
        """Try the most promising candidate, or end the comparison."""
        last = comparison.tried[-1]
        hopeful = [each for each in self._untried(comparison) if self._is_hopeful(comparison, each)]
        if hopeful and len(comparison.tried) <= self._max_trials:
            trial = min(hopeful, key=lambda each: each.steps * (each.expected_us or (0.0,))[0])
        elif (before := comparison.to_confirm()) is not None:
            trial = before
        else:
            return self._conclude(comparison, step, all_tried=not hopeful)
        comparison.running = trial
        self._plan = trial.planned
        step_us, exposed_us = trial.expected_us or (comparison.base.step.value, comparison.base.exposed.value)
        verb = "trying" if trial.measured is None else "measuring once more"
        expected = f"a step of {ms(step_us)} expected, {ms(exposed_us)} of it exposed"
        begin = step + 1 + SETTLING_STEPS
        window = Window(begin, begin + WINDOW_STEPS - 1)
        return Decision(self._plan, window, f"{comparison.why}: {verb} {trial}, {expected}; {last.words}")

    def _untried(self, comparison: _Comparison) -> Iterator[Candidate]:
        """Yield the next plan of each strategy, by all that was learned so far, no two alike."""
        reference = comparison.fastest.result
        found = comparison.before.planned.groups
        for candidate in self._candidates.values():
            if candidate.strategy in self._refused or candidate.strategy not in self.costs.prices:
                continue
            plan, name = Plan(found, candidate.strategy, "measured"), candidate.name
            tried = [each.planned for each in comparison.tried if each.strategy == candidate.strategy]
            if reference.movable and (tried or not self._allow):
                plan = best_plan(reference.units, self.costs.only([candidate.strategy]), self._max_bytes, SPARE)
                again = sum(each.groups != found for each in tried)
                name += " in planned buckets" + (f", refined {again}" if again else "")
            if not comparison.has_tried(plan):
                yield replace(candidate, name=name, plan=plan, expected_us=reference.expected_of(plan, self.costs))

    def _is_hopeful(self, comparison: _Comparison, candidate: Candidate) -> bool:
        """Return whether a plan is expected to save enough, or to show how a strategy does that was not tried yet."""
        assert candidate.expected_us is not None  # it was predicted
        step_us, exposed_us = candidate.expected_us
        known = candidate.strategy in [each.strategy for each in comparison.tried]
        base, to_loss_us, least_us = comparison.base, candidate.steps * step_us, comparison.fastest.to_loss.value
        if not (known or self._allow) and base.exposed.value > _WORTH_A_TRIAL * base.step.value:
            return to_loss_us <= _HOPELESS_ALIKE * least_us
        saves = exposed_us < (1 - LEAST_SHARE) * base.exposed.value or comparison.before.lossy
        return saves and to_loss_us <= (1 - LEAST_GAIN if known or not self._allow else _HOPELESS) * least_us

    def _conclude(self, comparison: _Comparison, step: int, *, all_tried: bool) -> Decision:
        """End the comparison. all_tried: whether no hopeful candidate is left."""
        best = choose(comparison.tried)
        others = [each for each in comparison.tried[1:] if each.measured is not None]
        seems_better = best is comparison.before and any(pays(comparison.before, each, errors=0) for each in others)
        self._doubt = "a gain was within the noise" if seems_better else ""
        self._reference = best.result
        self._comparison = None
        self._searches += 1
        self._no_search_before = step + FIRST_DISTANCE_STEPS * 2**self._searches
        self._distance = FIRST_DISTANCE_STEPS
        predicted = best.result.predicted(self.costs)
        self._plan = replace(best.planned, predicted=predicted)
        found = best.planned.origin == "found"
        as_found = bool(self._allow) and found and best.planned.strategy == self._default.strategy
        warning = ""
        if best is comparison.before:
            gain = f"{LEAST_SHARE:.0%} of the exposed communication" if others else f"{LEAST_GAIN:.0%} of a step"
            reason = f"{comparison.why}: {best}, as before: nothing {'tried' if others else 'else'} saves {gain}"
            if as_found and self._stock and all_tried and not seems_better and not self._warned:
                warning, self._warned = f"{_STOCK} ({best.words})", True
        else:
            reason = f"{comparison.why}: {best}: {comparison.before.words} -> {best.words}"
        if self._allow:
            self._tuned = Tuned(
                name=best.name,
                allow=self._allow,
                nodes=self._nodes,
                steps=step + 1 - (self._began or 0),
                considered=self._considered(comparison),
                plan=None if as_found else self._plan,
                reason=reason,
                optimizer=self._optimizer,
                parameters=digest_of_names(self._plan.names),
            )
        decision = replace(self._later(step, reason), tuned=self._tuned, warning=warning)
        if best.planned.contents == comparison.running.planned.contents:
            return replace(decision, predicted=predicted)
        return replace(decision, plan=self._plan)

    def _considered(self, comparison: _Comparison) -> tuple[Outcome, ...]:
        """Return the outcomes of all candidates, tried or not, and what to expect of local SGD."""
        found = [each.outcome(comparison.base, self.costs) for each in [*comparison.tried, *self._untried(comparison)]]
        if LOCAL in self._allow and len(self._nodes) > 1:
            for average, learned in LEARNED_LOCAL.items():
                steps = learned.with_optimizer(self._optimizer)
                if steps is not None:
                    expected_us = comparison.base.expected_of_local_sgd(average, self.costs)
                    found.append(Outcome(learned.preset, repr(average), 0.0, *expected_us, steps=steps))
        return tuple(found)

    # ------------------------------------------------------------------------------------- watching

    def _watch(self, measured: Measurement, step: int) -> Decision:
        moved = "" if self._reference is None else measured.drift_from(self._reference, self.costs)
        self._learn(measured)
        candidate = self._candidates.get(measured.plan.strategy)
        if self._reference is None:
            # The plan of an earlier tuning is new in this run: residuals have not reached their usual size yet.
            self._reference = measured
        elif candidate is not None and candidate.lossy and (behind := falls_behind(measured.steps_behind)):
            return self._fall_back(behind, measured, step)
        distance = self._distance // 2 if moved else 2 * self._distance
        self._distance = min(max(distance, FIRST_DISTANCE_STEPS), LARGEST_DISTANCE_STEPS)
        name = measured.plan.strategy if candidate is None else candidate.name
        news = moved or self._doubt
        if not news:
            return self._later(step, f"{name}: nothing moved by more than {DRIFT:.0%}; {measured}")
        if step < self._no_search_before:
            return self._later(step, f"{name}: {news}; too soon to search again")
        self._why = news
        self._began = step
        reason = f"{name}: {news}; timing messages again"
        return Decision(None, Window(step + 1, step + WINDOW_STEPS), reason, retime=True)

    def look(self, steps_behind: float | None, step: int) -> Decision | None:
        """Return the decision to leave, between two windows, a strategy that falls behind exact averages; or None."""
        behind, last = falls_behind(steps_behind), self._reference
        if not behind or last is None or self._comparison is not None or self._tuned is None:
            return None
        return self._fall_back(behind, last, step)

    def _fall_back(self, behind: str, measured: Measurement, step: int) -> Decision:
        """Average exactly from now on; the strategy that fell behind is not chosen again."""
        assert self._tuned is not None  # which chose a lossy one
        self._refused.add(measured.plan.strategy)
        exact = [
            replace(each, name=f"{each.name} instead", plan=Plan(measured.plan.groups, each.strategy, "measured"))
            for each in self._candidates.values()
            if not each.lossy
        ]
        chosen = min(exact, key=lambda each: measured.expected_of(each.planned, self.costs))
        self._plan = chosen.plan
        self._reference = None
        reason = f"{self._tuned.name} -> {chosen.name}: {behind}"
        considered = [outcome for outcome in self._tuned.considered if outcome.name != chosen.name]
        self._tuned = replace(
            self._tuned,
            name=chosen.name,
            considered=(*considered, chosen.outcome(measured, self.costs)),
            plan=chosen.plan,
            reason=reason,
        )
        return replace(self._later(step, reason), plan=chosen.plan, tuned=self._tuned)

    def _later(self, step: int, reason: str) -> Decision:
        last_step = max(step + self._distance, self._no_search_before if self._doubt else 0)
        return Decision(None, Window.ending_with(last_step), reason)
