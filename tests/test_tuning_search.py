"""The tuner's decisions, on a machine in the model of the planner whose truth is not what was predicted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from commopt import Auto, ConfigurationError, PowerSGD
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.plan import Calendar, Costs, Decision, Faithfulness, Plan, Tuned, Window
from commopt.tuning import Losses, Proposals, explain, ladders, unit_energies
from commopt.tuning.guard import Guard
from tests.plan_machine import Truth, line
from tests.tuning_machine import EIGHT, FOLLOWS, FOUR, LADDER, LOSSES, NAMES, PRICES, TWO, TunedMachine


def test_finds_the_compression_that_pays_within_sixty_steps() -> None:
    machine = TunedMachine(noise=0.01).run(300)
    assert machine.tuned_after <= 60
    assert machine.tuned.steps == machine.tuned_after
    assert machine.tuned.name.startswith("quantized")
    assert {bucket.strategy for bucket in machine.plan.buckets} & {EIGHT, FOUR, TWO}
    best = min(machine.step_us(way, 300) for way in machine.every_plan())
    assert machine.step_us(machine.plan, 300) <= 1.05 * best


@pytest.mark.parametrize("slower", [0.2, 2.0], ids=["better than before", "worse than before"])
def test_few_buckets_at_one_strength_are_tried_too(slower: float) -> None:
    """Each message slows everything down, which no price knows: what ran before has the fewest."""

    def bias(plan: Plan) -> float:
        return 1 + slower * max(0, len(plan.buckets) - 6)

    # A price without latency makes the planner send as many messages as there are gradients.
    prices = {key: line(1.0, table.last_slope) for key, table in PRICES.items()}
    costs = Costs(prices, overhead_us=1.0)
    machine = TunedMachine(costs=costs, truth=lambda _: Truth(bias=bias), noise=0.005).run(100)
    assert len(machine.plan.buckets) <= 6, machine.tuned.reason
    assert machine.tuned.name == "quantized, plain"
    steps = {tried.name: tried.step_us for tried in machine.tuned.considered if tried.step_us is not None}
    assert (steps["quantized"] > steps["flat as found"]) == (slower > 1)
    assert {bucket.strategy for bucket in machine.plan.buckets} == {FOUR}
    assert machine.tuned_after <= 60


def test_one_strength_keeps_the_limit() -> None:
    machine = TunedMachine(max_error=0.05)
    plain = machine.proposals.plain("quantized", machine.found.buckets)
    assert plain is not None
    assert {bucket.strategy for bucket in plain.plan.buckets} == {EIGHT}
    assert TunedMachine(max_error=0.001).proposals.plain("quantized", machine.found.buckets) is None
    assert machine.proposals.plain("flat", machine.found.buckets) is None


def test_compresses_only_if_allowed() -> None:
    machine = TunedMachine(ladders=()).run(300)
    assert {bucket.strategy for bucket in machine.plan.buckets} <= {"flat", "hierarchical"}
    assert machine.tuned.allow == ("lossless",)
    assert machine.tuned.used.error == 0


def test_keeps_what_runs_where_nothing_pays() -> None:
    fast = Costs({key: line(100.0, 1e-6) for key in PRICES}, overhead_us=100.0)
    machine = TunedMachine(costs=fast, noise=0.01).run(400)
    assert machine.changes == []
    assert machine.tuned.name == "flat as found"
    assert machine.tuned.plan is None
    assert "as before" in machine.tuned.reason
    later = [decision for _, decision in machine.log if decision.calendar.measure_from > 60]
    assert later
    assert all(decision.leave_to_ddp for decision in later)


def test_nothing_is_left_to_ddp_before_it_is_known_or_where_something_pays() -> None:
    machine = TunedMachine(noise=0.01).run(300)
    assert machine.tuned.plan is not None
    assert not any(decision.leave_to_ddp for _, decision in machine.log)
    fast = Costs({key: line(100.0, 1e-6) for key in PRICES}, overhead_us=100.0)
    before = [decision for step, decision in TunedMachine(costs=fast).run(400).log if step < 9]
    assert not any(decision.leave_to_ddp for decision in before)


def test_takes_nothing_that_only_promises_to_pay() -> None:
    """Compression is twice as slow as was predicted, and more."""
    truth = Truth(transfers={EIGHT: 20.0, FOUR: 20.0, TWO: 20.0})
    machine = TunedMachine(truth=lambda _: truth, noise=0.01).run(300)
    assert {bucket.strategy for bucket in machine.plan.buckets} <= {"flat", "hierarchical"}
    tried = {each.name for each in machine.tuned.considered if each.step_us is not None}
    assert any(name.startswith("quantized") for name in tried)
    assert machine.tuned_after <= 60


def test_trials_are_no_more_than_allowed() -> None:
    for most in (1, 2, 4):
        machine = TunedMachine(max_trials=most, noise=0.02).run(200)
        tried = [each for each in machine.tuned.considered if each.step_us is not None]
        assert len(tried) <= most + 1
        assert machine.tuned_after <= 10 + 9 * most


def test_leaves_out_no_more_than_the_reference_strength_does_everywhere() -> None:
    machine = TunedMachine().run(200)
    assert 0 < machine.tuned.used.error <= 0.1 + 1e-9


def test_leaves_out_no_more_than_was_asked_for() -> None:
    for most in (0.02, 0.05, 0.3):
        machine = TunedMachine(max_error=most).run(200)
        assert machine.tuned.used.error <= most


def test_only_what_is_exposed_is_compressed_hard() -> None:
    """Messages that hide behind backward leave out less than those after it."""
    machine = TunedMachine(max_error=0.3).run(200)
    order = {EIGHT: 1, FOUR: 2, TWO: 3, "flat": 0, "hierarchical": 0}
    strength = [order[bucket.strategy] for bucket in machine.plan.buckets]
    assert strength[0] <= strength[-1]


def test_a_faster_network_ends_compression() -> None:
    def truth(step: int) -> Truth:
        exact = 1.0 if step < 150 else 0.02
        lossy = 1.0 if step < 150 else 0.8
        return Truth(transfers={"flat": exact, "hierarchical": exact, EIGHT: lossy, FOUR: lossy, TWO: lossy})

    machine = TunedMachine(truth=truth, noise=0.005).run(140)
    assert machine.tuned.used.error > 0
    machine.run(5000)
    assert machine.tuned.used.error == 0
    assert machine.step_us(machine.plan, 5000) <= 1.03 * machine.step_us(machine.found, 5000)


def test_a_slower_network_is_tuned_for_anew() -> None:
    slow = {name: 40.0 for name, _ in PRICES}
    fast = Costs({key: table.along(0.01, 0.0) for key, table in PRICES.items()}, overhead_us=100.0)
    machine = TunedMachine(costs=fast, truth=lambda step: Truth(transfers=slow if step > 200 else {}), noise=0.005).run(
        150
    )
    assert machine.tuned.used.error == 0
    machine.run(2000)
    assert machine.tuned.used.error > 0
    assert len(machine.changes) < 30


def test_falls_back_when_updates_stray_from_the_gradients() -> None:
    bad = Faithfulness(cosine=0.2, residual_norm=1.0)
    machine = TunedMachine(fidelity={0: FOLLOWS, 400: bad}).run(380)
    assert machine.tuned.used.error > 0
    machine.run(1500)
    assert machine.tuned.used.error == 0
    assert "cosine" in machine.tuned.reason
    assert {bucket.strategy for bucket in machine.plan.buckets} <= {"flat", "hierarchical"}


def test_guard_compares_with_the_beginning() -> None:
    guard = Guard()
    assert guard.astray(None) == ""
    assert guard.astray(Faithfulness(0.6, 2.0)) == ""
    assert guard.astray(Faithfulness(0.31, 7.9)) == ""
    assert "0.60 to 0.29" in guard.astray(Faithfulness(0.29, 2.0))
    assert "grew from 2 to 8.1" in guard.astray(Faithfulness(0.6, 8.1))
    assert guard.astray(Faithfulness(None, 2.0)) == ""


def test_goes_on_from_an_earlier_tuning_without_trials() -> None:
    before = TunedMachine(noise=0.01).run(100).tuned
    machine = TunedMachine(adopted=Tuned.from_json(before.to_json()), noise=0.01).run(1000)
    assert machine.changes == []
    assert machine.plan == before.plan


def test_few_measured_steps_are_not_enough() -> None:
    machine = TunedMachine(steps_lost=5).run(200)
    assert all("fewer than" in decision.reason for _, decision in machine.log)


def test_a_decision_survives_its_way_to_the_other_ranks() -> None:
    machine = TunedMachine(noise=0.01).run(300)
    for _, decision in machine.log:
        assert Decision.from_json(decision.to_json()) == decision


def test_explains_itself() -> None:
    machine = TunedMachine(noise=0.01).run(100)
    decisions = [decision for _, decision in machine.log]
    text = explain(None, machine.tuned, decisions)
    for tried in machine.tuned.considered:
        assert tried.name in text
    assert "used" in text
    assert decisions[-1].reason in text
    assert all(bucket.names[0] in text or bucket.strategy in text for bucket in machine.plan.buckets)
    assert "nothing was decided yet" in explain(None, None, [])
    assert "without the hook" not in text
    assert "without the hook" in explain(None, machine.tuned, decisions, by_ddp=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 9}, "format 9"),
        ({"name": "other"}, "'other'"),
        ({"nodes": [0]}, "ranks of a node"),
        ({"considered": [{"name": "flat"}]}, "strategies"),
        ({"reason": ""}, "reason"),
    ],
)
def test_broken_files_are_refused(change: dict[str, object], named: str) -> None:
    document = json.loads(TunedMachine().run(100).tuned.to_json()) | change
    with pytest.raises(ConfigurationError, match=named):
        Tuned.from_json(json.dumps(document))


# ------------------------------------------------------------------------------------------ what goes wrong


class Stubborn(TunedMachine):
    """DDP goes on in its own buckets, whatever the plan."""

    def window(self) -> Window:
        planned, self.plan = self.plan, self.found
        window = super().window()
        self.plan = planned
        return window


class Weightless(TunedMachine):
    """On the one gradient that was measured compression left nothing out, as on an average by the same PowerSGD."""

    @property
    def proposals(self) -> Proposals:
        nothing = {strategy: dict.fromkeys(NAMES, 0.0) for strategy in (EIGHT, FOUR, TWO)}
        return replace(super().proposals, losses=Losses(nothing, LOSSES.squares))


def test_a_trial_that_ddp_does_not_follow_is_a_trial() -> None:
    machine = Stubborn(max_trials=1).run(200)
    assert machine.tuned_after == 10 + 9
    assert machine.changes == [9, 18]
    assert machine.tuned.name == "flat as found"
    assert sum(each.step_us is not None for each in machine.tuned.considered) == 1


def test_a_trial_that_cannot_be_measured_is_over_in_time() -> None:
    machine = TunedMachine().run(10)
    tried = machine.plan
    machine.steps_lost = 5
    machine.run(200)
    assert tried != machine.found
    assert machine.tuned_after <= 46
    assert machine.tuned.name == "flat as found"
    assert machine.plan.contents == machine.found.contents
    assert len(machine.tuned.considered) > 1


def test_what_was_used_before_has_a_name_of_its_own() -> None:
    machine = TunedMachine(
        truth=lambda step: Truth(transfers={name: 3.0 if step > 300 else 1.0 for name, _ in PRICES}), noise=0.005
    ).run(2000)
    outcomes = [decision.tuned for _, decision in machine.log if decision.tuned is not None]
    assert len(outcomes) > 1
    for tuned in outcomes:
        names = [tried.name for tried in tuned.considered]
        assert len(set(names)) == len(names)
    assert {tried.name for tried in outcomes[1].considered} >= {"quantized", "quantized as before"}


def test_what_went_astray_is_refused_under_any_name() -> None:
    found = TunedMachine().run(100).tuned
    by_hand = replace(found, name="by hand", considered=(replace(found.used, name="by hand"),))
    machine = TunedMachine(
        adopted=by_hand,
        fidelity={0: FOLLOWS, 200: Faithfulness(cosine=0.2, residual_norm=1.0), 400: FOLLOWS},
        truth=lambda step: Truth(transfers={name: 3.0 if step > 1000 else 1.0 for name, _ in PRICES}),
    ).run(4000)
    outcomes = [decision.tuned for _, decision in machine.log if decision.tuned is not None]
    assert "cosine" in outcomes[0].reason
    assert len(outcomes) > 1
    assert not any(tried.name.startswith("quantized") for tried in outcomes[-1].considered)


def test_falls_back_to_what_is_exact_rather_than_to_what_seemed_to_be() -> None:
    machine = Weightless(fidelity={0: FOLLOWS, 400: Faithfulness(cosine=0.2, residual_norm=1.0)}).run(380)
    assert {bucket.strategy for bucket in machine.plan.buckets} & {EIGHT, FOUR, TWO}
    machine.run(1500)
    assert {bucket.strategy for bucket in machine.plan.buckets} <= {"flat", "hierarchical"}


def test_residuals_may_fill_up_after_an_earlier_tuning() -> None:
    before = TunedMachine().run(100).tuned
    machine = TunedMachine(adopted=before, fidelity={0: FOLLOWS, 40: Faithfulness(0.9, 5.0)}).run(1000)
    assert machine.changes == []


@pytest.mark.parametrize("adopted", [False, True], ids=["first tuning", "later tuning"])
def test_a_checkpoint_from_the_middle_of_a_search_starts_from_what_was_before(adopted: bool) -> None:
    """Of a search that no choice had come before, or only one to change nothing."""
    fast = Costs({key: line(100.0, 1e-6) for key in PRICES}, overhead_us=100.0)
    nothing_pays = TunedMachine(costs=fast).run(100).tuned
    assert nothing_pays.plan is None
    trial = TunedMachine().run(100).plan
    machine = TunedMachine(adopted=nothing_pays if adopted else None)
    machine.plan, machine.calendar = trial, Calendar(5003, 5009)
    machine.run(5100)
    back = machine.log[0][1].plan
    assert back is not None
    assert {bucket.strategy for bucket in back.buckets} == {"flat"}
    if not adopted:
        assert machine.tuned.considered[0].error == 0
        assert machine.tuned.steps == machine.tuned_after - 5000 <= 55


def test_steps_are_counted_from_the_checkpoint() -> None:
    machine = TunedMachine()
    machine.calendar = Calendar(703, 709)
    machine.run(800)
    assert machine.tuned.steps == machine.tuned_after - 700 <= 46


def test_an_empty_gradient_tells_nothing() -> None:
    layout = Layout.of_parameters([("weight", (30, 40))])
    with pytest.raises(FloatingPointError, match="all gradients are zero"):
        unit_energies({EIGHT: LADDER.rungs[0]}, [(layout, torch.zeros(1200))], [("weight",)])


def test_guard_waits_for_the_first_sample() -> None:
    guard = Guard()
    assert guard.astray(Faithfulness(None, 1.0)) == ""
    assert guard.astray(Faithfulness(0.8, 1.0)) == ""
    assert "0.80 to 0.30" in guard.astray(Faithfulness(0.3, 1.0))


def test_strengths_between_those_that_were_tried_out_cost_what_lies_between() -> None:
    (ladder,) = ladders(Auto(allow="powersgd"), TeamShape.of((1, 1)))
    assert [name for name in ladder.tried_out] == [repr(PowerSGD(rank)) for rank in (16, 4, 1)]
    whole = Layout.of_parameters([("a", (512, 512))])
    # The middle is dearer than both ends, as bits that are packed can be: no line through the ends would find that.
    tried = dict(zip(ladder.tried_out, (line(1000.0, 0.0), line(3000.0, 0.0), line(500.0, 0.0)), strict=True))
    prices = ladder.priced(
        {(name, 1): price for name, price in tried.items()}, whole, torch.float32, TeamShape.of((1, 1))
    )
    found = [prices[repr(rung), 1](2**20) for rung in ladder.rungs]
    # Of rank r each side sends r rows: 16, 8, 4 and 4, 2, 1 lie a third of the way from the stronger one.
    assert found == pytest.approx([1000.0, 1000 + 2000 * 8 / 12, 3000.0, 3000 - 2500 * 2 / 3, 500.0], rel=1e-6)


def test_a_single_strength_is_tried_out() -> None:
    (ladder,) = ladders(Auto(allow="onebit"), TeamShape.of((1, 1)))
    prices = {(name, 1): line(7.0, 0.0) for name in ladder.tried_out}
    whole = Layout.of_parameters([("a", (64, 64))])
    assert ladder.priced(prices, whole, torch.float32, TeamShape.of((1, 1))) == prices
