"""Find the way of averaging that pays, on live steps, and leave it when it stops paying; decided on rank 0.

measured as it is -> trial -> trial .. -> the best, or what ran before -> watch -> drift -> trial ..
                                                                            \\> less faithful -> an exact average

Each trial is a plan that all ranks follow for nine steps. Its messages correct the prices, by which the next one is
chosen. What is compared in the end was measured, all of it in this run.

Prices follow what is observed within reason only. So before a search because conditions have moved, messages are
tried out anew.

A search makes max_trials trials at most, whatever becomes of them. Before a small gain is believed, what ran before is
measured again: its first window may have seen a program that warms up. With 4 trials, and a first window that can be
measured, a search is over after 10 + 4 * 9 = 46 steps, or 55 with that; nine more where a checkpoint came out of the
middle of another search.

A window is looked at 50, 100, .. 800 steps apart while nothing moves; news halves the distance. The k-th tuning keeps
the next one 50 * 2^k steps away, so that T steps see at most log2(T / 50) after the first, whatever is measured.
"""

from __future__ import annotations

from dataclasses import replace

from commopt.plan import Calendar, Costs, Decision, Measured, Plan, Tuned, Window
from commopt.plan.conditions import Conditions
from commopt.plan.correction import Correction
from commopt.plan.evidence import DRIFT, ms
from commopt.plan.patience import Patience
from commopt.tuning.guard import Guard
from commopt.tuning.round import Round
from commopt.tuning.verdict import LEAST_SHARE, choose
from commopt.tuning.ways import Proposals, Way

_SETTLING_STEPS = 2
_WINDOW_STEPS = 7
_LEAST_STEPS = 4
_FIRST_DISTANCE_STEPS = 50
_LARGEST_DISTANCE_STEPS = 800
_HOPELESS = 1.05  # what is expected to take so much longer than the best is not tried
_DISAPPOINTING = 1.05  # what takes so much longer than expected has costs that no price knows
_REFINED = 0.98  # what another plan of the best kind must promise, with all that trials taught
_PLAIN = 1.5  # and what the buckets that ran before may, at one strength


class Tuning:
    """Plain computation, without clock, chance or communication: windows of measurements in, decisions out.

    nodes: ranks on each. adopted: what an earlier tuning came to, to go on with.
    """

    first = Calendar(3, 3 + _WINDOW_STEPS - 1)

    def __init__(
        self,
        proposals: Proposals,
        costs: Costs,
        allow: tuple[str, ...],
        max_trials: int,
        nodes: tuple[int, ...],
        adopted: Tuned | None = None,
    ) -> None:
        self._proposals = proposals
        self._correction = Correction(costs)
        self._allow, self._max_trials, self._nodes = allow, max_trials, nodes
        self._tuned = adopted
        self._plan = None if adopted is None else adopted.plan
        self._is_new = True
        self._began: int | None = None
        self._round: Round | None = None
        self._guard = Guard()
        self._reference: Conditions | None = None
        self._refused: set[str] = set()
        self._moved = ""  # what a search is about to begin for
        self._rounds = self._no_round_before = 0
        self._distance = _FIRST_DISTANCE_STEPS
        self._patience = Patience(_WINDOW_STEPS, _LEAST_STEPS)

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
            self._began = max(0, step - self.first.meet_at)
        if self._round is not None:
            return self._after_trial(self._round, window, step)
        if again := self._patience.wait(window, step):
            return again
        now = Measured.of(window, self._plan)
        if self._is_new:
            self._is_new = False
            if self._runs_a_trial(now.plan):
                return self._leave_trial(now.plan, step)
        if self._tuned is None:
            self._correction.learn(window.observed)
            return self._search("first tuning", now, step)
        if self._moved:
            why, self._moved = self._moved, ""
            self._correction.learn(window.observed)
            self._began = step
            return self._search(why, now, step)
        return self._watch(self._tuned, now, window, step)

    # ------------------------------------------------------------------------------------- beginning

    def _goes_as_found(self, plan: Plan) -> bool:
        """Return whether everything is sent as it is without a plan."""
        return {bucket.strategy for bucket in plan.buckets} == {next(iter(self._proposals.exact.values()))}

    def _runs_a_trial(self, plan: Plan) -> bool:
        """Return whether a checkpoint brought what was on trial when it was written."""
        return not self._goes_as_found(plan) if self._plan is None else plan.contents != self._plan.contents

    def _leave_trial(self, plan: Plan, step: int) -> Decision:
        """Do as before the search that the trial belonged to: nothing is known of what it is to be compared with."""
        if self._plan is None:
            exact = next(iter(self._proposals.exact.values()))
            buckets = tuple(replace(bucket, strategy=exact, chunks=1) for bucket in plan.buckets)
            self._plan = Plan(buckets, plan.order, origin="measured")
        reason = "what runs is not what tuning came to, as after a checkpoint from the middle of a search; going back"
        return Decision(self._plan, _settled(step), reason)

    # ------------------------------------------------------------------------------------- searching

    def _search(self, why: str, now: Measured, step: int) -> Decision:
        before = replace(self._proposals.way(self._running(), now.plan), measured=now)
        ways = [way for way in self._proposals.ways(now.units, self.costs) if way.kind not in self._refused]
        waiting = [way for way in ways if way.plan.contents != now.plan.contents]
        self._round = Round(before, waiting, self._began or 0, why, [before])
        return self._next(self._round, step)

    def _running(self) -> str:
        """Return what to call what runs before a search, so that nothing that it finds is called the same."""
        if self._tuned is None:
            return f"{next(iter(self._proposals.exact))} as found"
        name = self._tuned.name
        return name if name.endswith((" as found", " as before")) else f"{name} as before"

    def _after_trial(self, search: Round, window: Window, step: int) -> Decision:
        now = None
        if len(window.step_us) >= _LEAST_STEPS:
            self._correction.learn(window.observed)
            now = Measured.of(window, self._plan)
        if now is not None and now.plan is not self._plan:
            now = None  # DDP went other ways meanwhile, as in join()
        search.end_trial(now)
        return self._next(search, step)

    def _next(self, search: Round, step: int) -> Decision:
        """Try what promises most, or end the search."""
        way = self._promising(search) if search.trials < self._max_trials else None
        way = way or search.to_confirm()
        if way is None:
            return self._conclude(search, step)
        step_us, exposed_us = expects = way.prediction(search.base, self.costs)
        search.on_trial = way if way.measured is not None else replace(way, expected=expects)
        self._plan = way.plan
        expected = f"a step of {ms(step_us)} expected, {ms(exposed_us)} of it exposed"
        verb = "trying" if way.measured is None else "trying once more"
        reason = f"{search.why}: {verb} {way.name}, {expected}; {_told(search.tried[-1])}"
        return Decision(way.plan, _settled(step), reason)

    def _promising(self, search: Round) -> Way | None:
        """Return the next way to try, None when none is left that could pay."""
        waiting = sorted(search.waiting, key=lambda way: way.prediction(search.base, self.costs))
        best = search.best_tried
        if best is not None and best.disappoints(_DISAPPOINTING) and (way := self._plain(search, best.kind)):
            return way
        for way in waiting:
            step_us, exposed_us = way.prediction(search.base, self.costs)
            saves = exposed_us < (1 - LEAST_SHARE) * search.base.exposed.value
            if step_us <= _HOPELESS * search.least_us and (saves or not search.before.exact):
                search.waiting.remove(way)
                return way
        if best is None:
            return None
        kinds = dict.fromkeys(way.kind for way in [best, *search.tried[1:], *search.abandoned, *waiting])
        plain = (way for kind in kinds if (way := self._plain(search, kind)))
        return self._refined(search, best) or next(plain, None) or search.second_look()

    def _refined(self, search: Round, best: Way) -> Way | None:
        """Return another plan of the kind that did best, made of all that was learned, if it promises more."""
        assert best.measured is not None  # it was tried
        way = self._proposals.best(best.kind, best.measured.units, self.costs)
        return self._varied(search, way, "refined", best.measured, _REFINED)

    def _plain(self, search: Round, kind: str) -> Way | None:
        """Return the buckets that ran before, at one strength of a kind, if that may do better than all so far.

        Few messages, and little work, cost processors that are busy less than any price says. What another plan of the
        kind has cost them says nothing about it.
        """
        way = self._proposals.plain(kind, search.before.plan.buckets)
        return None if way is None else self._varied(search, way, "plain", search.base, _PLAIN)

    def _varied(self, search: Round, way: Way, variation: str, base: Measured, most: float) -> Way | None:
        """Return `way` as a variation, once, if it is expected to take less than `most` times the least step."""
        known = {each.plan.contents for each in [*search.tried, *search.abandoned]}
        if (way.kind, variation) in search.varied or way.plan.contents in known:
            return None
        if way.prediction(base, self.costs)[0] >= most * search.least_us:
            return None
        search.varied.add((way.kind, variation))
        return replace(way, variation=variation)

    def _conclude(self, search: Round, step: int) -> Decision:
        best = choose(search.tried)
        assert best.measured is not None  # it was tried
        self._round, self._reference = None, best.measured.conditions
        running = self._plan if self._plan is not None else search.before.plan
        stays = best.plan.contents == running.contents
        predicted = best.measured.expected(self.costs)
        self._plan = replace(best.plan, predicted=predicted)
        by = f"{best.name}, {len(best.plan.buckets)} buckets"
        if best is search.before:
            reason = f"{by}, as before: nothing tried saves {LEAST_SHARE:.0%} of the exposed communication"
        else:
            reason = f"{by}: {_told(search.before)} -> {_told(best)}"
        considered = [way.told(search.base, self.costs) for way in [*search.tried, *search.abandoned, *search.waiting]]
        planned = best.plan.origin != "found" or not self._goes_as_found(best.plan)
        self._tuned = Tuned(
            best.name,
            self._allow,
            self._nodes,
            step + 1 - search.began,
            tuple(considered),
            self._plan if planned else None,
            reason,
        )
        self._rounds += 1
        self._no_round_before = step + _FIRST_DISTANCE_STEPS * 2**self._rounds
        self._distance = _FIRST_DISTANCE_STEPS
        self._guard = Guard()
        decision = self._later(step, reason)
        if stays:  # where no plan is followed there is none to have a prediction
            return replace(decision, predicted=predicted if planned else None, tuned=self._tuned)
        return replace(decision, plan=self._plan, tuned=self._tuned)

    # ------------------------------------------------------------------------------------- watching

    def _watch(self, tuned: Tuned, now: Measured, window: Window, step: int) -> Decision:
        moved = "" if self._reference is None else now.conditions.drift_from(self._reference, self.costs)
        self._correction.learn(window.observed, drifted=bool(moved))
        # An earlier tuning's is new with the run: residuals have yet to become what they are going to be.
        watched = self._reference is not None and self._proposals.lossy_kinds(now.plan)
        if watched and (astray := self._guard.astray(window.fidelity)):
            return self._fall_back(tuned, astray, now, step)
        if self._reference is None:
            self._reference = now.conditions
        distance = self._distance // 2 if moved else 2 * self._distance
        self._distance = min(max(distance, _FIRST_DISTANCE_STEPS), _LARGEST_DISTANCE_STEPS)
        if not moved:
            return self._later(step, f"{tuned.name}: nothing moved by more than {DRIFT:.0%}; {_told_of(now)}")
        if step < self._no_round_before:
            return self._later(step, f"{tuned.name}: {moved}; too soon to tune again")
        self._moved = moved
        reason = f"{tuned.name}: {moved}; trying out what messages cost now"
        return Decision(None, Calendar(step + 1, step + _WINDOW_STEPS), reason, try_out=True)

    def _fall_back(self, tuned: Tuned, astray: str, now: Measured, step: int) -> Decision:
        """Average exactly from now on; what went astray is not chosen again."""
        self._refused |= self._proposals.lossy_kinds(now.plan)
        exact = min(
            (way for way in self._proposals.ways(now.units, self.costs) if way.exact),
            key=lambda way: way.prediction(now, self.costs),
        )
        self._plan, self._reference = exact.plan, None
        reason = f"{tuned.name} -> {exact.name}: {astray}"
        considered = tuple(tried for tried in tuned.considered if tried.name != exact.name)
        told = exact.told(now, self.costs)
        self._tuned = replace(tuned, name=exact.name, considered=(*considered, told), plan=exact.plan, reason=reason)
        return replace(self._later(step, reason), plan=exact.plan, tuned=self._tuned)

    def _later(self, step: int, reason: str) -> Decision:
        meet_at = step + self._distance
        # Nothing but flat averages of DDP's own buckets then: a hook can only cost.
        as_ddp_does = self._tuned is not None and self._tuned.plan is None
        calendar = Calendar(meet_at - _WINDOW_STEPS + 1, meet_at)
        return Decision(None, calendar, reason, leave_to_ddp=as_ddp_does)


def _settled(step: int) -> Calendar:
    """Return when to measure another plan, which is followed after `step`."""
    begin = step + 1 + _SETTLING_STEPS
    return Calendar(begin, begin + _WINDOW_STEPS - 1)


def _told(way: Way) -> str:
    return f"{way.name} takes {'nothing' if way.measured is None else _told_of(way.measured)}"


def _told_of(measured: Measured) -> str:
    return f"{ms(measured.step.value)}, {ms(measured.exposed.value)} of it exposed"
