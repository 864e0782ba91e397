"""What a trial teaches is used at once: messages with an overhead of their own, beside a backward they slow down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commopt.plan import Costs, Plan, best_plan, simulate, surprise
from commopt.plan.adapt import SPARE
from tests.plan_machine import Machine, Truth, line, units_of

# 264 kB take 5.6 ms; backward takes a quarter of a second.
SLOW_LINK = Costs({("flat", 1): line(2000.0, 3600 / 264_000)})
LAYERS = [264_000] * 24
TWO_LARGE = {"found_cap_bytes": 3_300_000, "found_first_cap_bytes": 3_300_000}


def machine_of(truth: Truth, **options: object) -> Machine:
    settings: dict[str, object] = {"units": units_of(LAYERS, gap_us=8000.0, first_us=60_000.0), "costs": SLOW_LINK}
    return Machine(truth=lambda _: truth, **(settings | options))  # type: ignore[arg-type]


def assert_well_predicted(machine: Machine) -> None:
    trace = machine.trace(machine.plan, 0, lambda: 1.0)
    predicted, step_us = machine.plan.predicted, machine.step_us(machine.plan, 0)
    assert predicted is not None
    assert abs(predicted.exposed_us - trace.exposed_us) <= max(0.1 * trace.exposed_us, 0.01 * step_us)
    assert predicted.finish_us == pytest.approx(step_us, rel=0.02)


def assert_best(machine: Machine) -> None:
    """Compare with the best plan for what messages really cost beside the backward there is."""
    ready_us = machine.trace(machine.plan, 0, lambda: 1.0).ready_us
    units = [replace(unit, ready_us=at) for unit, at in zip(machine.units, ready_us, strict=True)]
    costs = machine.conditions(0)[1]
    best = best_plan(units, costs).predicted
    assert best is not None
    assert simulate(units, machine.plan.buckets, costs).finish_us <= 1.02 * best.finish_us


@pytest.mark.parametrize("caps", [TWO_LARGE, {"found_cap_bytes": 1_500_000}], ids=["two", "five"])
@pytest.mark.parametrize("slowdown", [0.0, 0.25])
@pytest.mark.parametrize(("factor", "overhead_us"), [(1.1, 3500.0), (1.1, 8000.0), (2.0, 500.0), (0.8, 6000.0)])
def test_after_three_changes_the_plan_is_good_and_does_what_it_says(
    factor: float, overhead_us: float, slowdown: float, caps: dict[str, int]
) -> None:
    truth = Truth(transfers={"flat": factor}, overhead_us=overhead_us, slowdown=slowdown)
    machine = machine_of(truth, **caps).run(500)
    assert 1 <= len(machine.changes) <= 3
    assert machine.changes[-1] < 60
    assert_well_predicted(machine)
    assert_best(machine)
    assert machine.step_us(machine.plan, 0) <= 1.02 * machine.step_us(machine.found, 0)
    before = machine.changes
    assert machine.run(20_000).changes == before


@pytest.mark.parametrize("seed", range(3))
def test_the_same_with_noise(seed: int) -> None:
    truth = Truth(transfers={"flat": 1.1}, overhead_us=3500.0, slowdown=0.25)
    machine = machine_of(truth, **TWO_LARGE, noise=0.01, seed=seed).run(2000)
    assert 1 <= len(machine.changes) <= 3
    assert_well_predicted(machine)
    assert_best(machine)


def test_a_plan_that_disappoints_is_replaced_in_the_same_meeting() -> None:
    """Two messages of like size say nothing of an overhead; smaller ones do."""
    machine = machine_of(Truth(transfers={"flat": 1.1}, overhead_us=3500.0), **TWO_LARGE).run(100)
    assert machine.changes == [12, 25]
    (_, trial), (_, refined), (_, accepted) = machine.log
    assert trial.plan is not None
    assert refined.plan is not None
    assert len(trial.plan.buckets) > len(refined.plan.buckets)
    assert refined.reason.startswith("refined, 7 buckets: step 301 ms -> 273 ms, but messages by 'flat' take 1.1")
    assert accepted.reason.startswith("accepted, 5 buckets")
    best = best_plan(*machine.conditions(0))
    assert len(machine.plan.buckets) < len(best.buckets)
    assert machine.step_us(machine.plan, 0) <= (1 + SPARE) * machine.step_us(best, 0)


def test_a_backward_that_slows_down_is_planned_with() -> None:
    """Messages take what they should; what surprises is the step."""
    machine = machine_of(Truth(transfers={"flat": 2.0}, overhead_us=500.0, slowdown=0.25)).run(100)
    trial_us = machine.step_us(machine.log[0][1].plan or machine.found, 0)
    assert machine.log[1][1].reason.startswith("refined, 7 buckets: step 407 ms -> 320 ms, but a step takes 320 ms, ")
    assert machine.step_us(machine.plan, 0) < 0.98 * trial_us


def test_two_refinements_and_then_it_waits() -> None:
    """Four strategies look better than what there is, the best first, and each takes half as long again as it looks."""
    names = ("flat", "second", "third", "fourth")
    prices = {(name, 1): line(2000.0, (1 - 0.1 * place) * 3600 / 264_000) for place, name in enumerate(names)}
    truth = Truth(transfers=dict.fromkeys(names[1:], 1.5))
    machine = machine_of(truth, costs=Costs(prices), **TWO_LARGE).run(1000)
    used = [decision.plan.buckets[0].strategy for _, decision in machine.log if decision.plan]
    assert used == ["fourth", "third", "second", "flat"]
    verdicts = [decision.reason.split(",")[0].split(":")[0] for _, decision in machine.log]
    assert verdicts[:4] == ["first plan", "refined", "refined", "accepted"]
    assert machine.changes == [12, 25, 38, 38 + 50 * 2**2]


@pytest.mark.parametrize(("factor", "overhead_us"), [(1.0, 2000.0), (1.1, 1000.0), (1.3, 500.0)])
def test_what_gains_less_than_one_percent_is_no_refinement(factor: float, overhead_us: float) -> None:
    """The trial surprises and another plan would be better, but not by enough."""
    machine = machine_of(Truth(transfers={"flat": factor}, overhead_us=overhead_us), **TWO_LARGE).run(13)
    predicted, window = machine.plan.predicted, machine.window()
    assert predicted is not None
    assert surprise.of_step(window, predicted) != ""
    machine.run(2000)
    assert machine.changes == [12]
    better = best_plan(*machine.conditions(0), spare=SPARE)
    assert 0.99 * machine.step_us(machine.plan, 0) < machine.step_us(better, 0) < machine.step_us(machine.plan, 0)


def test_a_trial_that_was_worse_may_be_followed_by_a_better_plan_at_once() -> None:
    """What ran before all of it stays what the refined plan is compared with."""
    machine = machine_of(Truth(overhead_us=14_000.0), **TWO_LARGE).run(2000)
    (_, trial), (_, refined) = machine.log[:2]
    assert machine.changes == [12, 25]
    assert trial.plan is not None
    assert machine.step_us(trial.plan, 0) > 1.1 * machine.step_us(machine.found, 0)
    assert refined.reason.startswith("refined, 9 buckets: step 308 ms -> 354 ms, but messages by 'flat' take 1.92 ")
    assert "predicted step 308 ms -> 284 ms" in refined.reason
    assert machine.log[2][1].reason.startswith("accepted, 4 buckets: step 308 ms -> 284 ms")


def test_when_refining_fails_too_what_ran_before_all_of_it_comes_back() -> None:
    found = machine_of(Truth(), **TWO_LARGE).found

    def bias(plan: Plan) -> float:
        return 1.0 if plan.digest() == found.digest() else 1.6 if len(plan.buckets) <= 6 else 1.0

    machine = machine_of(Truth(overhead_us=14_000.0, bias=bias), **TWO_LARGE).run(2000)
    assert machine.changes[:3] == [12, 25, 38]
    assert machine.log[2][1].reason.startswith("taken back, 4 buckets -> 2 buckets: step 308 ms")
    taken_back = machine.log[2][1].plan
    assert taken_back is not None
    assert taken_back.digest() == found.digest()
    assert taken_back.predicted is not None
    tried = [decision.plan.digest() for _, decision in machine.log if decision.plan]
    assert all(tried.count(digest) == 1 for digest in tried if digest != found.digest())
    assert machine.plan.digest() == found.digest()


def test_an_accepted_plan_gets_the_prediction_of_the_window_that_verified_it() -> None:
    truth = Truth(slowdown=0.02)
    machine = machine_of(truth, found_cap_bytes=1_500_000).run(30)
    (_, trial), (_, accepted) = machine.log
    assert trial.plan is not None
    assert trial.plan.predicted is not None
    assert accepted.plan is None
    assert accepted.predicted is not None
    assert accepted.predicted.compute_us > trial.plan.predicted.compute_us
    assert machine.plan.digest() == trial.plan.digest()
    assert machine.plan.predicted == accepted.predicted
    quiet = machine.run(200).log[2][1]
    assert quiet.reason.startswith("nothing moved")
    assert quiet.predicted is None
