# SPDX-License-Identifier: Apache-2.0
"""Plans and decisions as data: what they refuse, and that they survive JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from commopt import ConfigurationError
from commopt.cost import PriceTable
from commopt.schedule import Costs, Decision, Plan, Unit, Window, best_plan, simulate

UNITS = [Unit((f"p{number}", f"q{number}"), 1000 * number, 10.0 * number, "float32") for number in range(6)]
PLAN = best_plan(UNITS, Costs({"flat": PriceTable((0, 10_000), (7.0, 90.0))}))


def test_json_round_trip() -> None:
    assert len(PLAN.groups) > 1
    assert PLAN.predicted is not None
    for plan in (PLAN, replace(PLAN, predicted=None, origin="given")):
        assert Plan.from_json(plan.to_json()) == plan


def test_a_decision_may_bring_a_new_prediction_for_the_plan_that_goes_on() -> None:
    assert PLAN.predicted is not None
    later = replace(PLAN.predicted, exposed_us=PLAN.predicted.exposed_us + 50.0)
    decision = Decision(None, Window(16, 25), "accepted", later)
    assert Decision.from_json(decision.to_json()) == decision
    updated = decision.updated(PLAN)
    assert updated == replace(PLAN, predicted=later)
    assert updated.digest() == PLAN.digest()
    assert replace(decision, predicted=None).updated(PLAN) == PLAN
    with pytest.raises(ConfigurationError, match="a plan and a prediction"):
        Decision(PLAN, Window(16, 25), "both", later)
    with pytest.raises(ConfigurationError, match='decision, predicted: "compute_us" is missing'):
        Decision.from_json(decision.to_json().replace("compute_us", "computed"))


def test_the_digest_is_of_what_runs() -> None:
    assert replace(PLAN, predicted=None, origin="given").digest() == PLAN.digest()
    assert Plan.from_json(PLAN.to_json()).digest() == PLAN.digest()
    others = [
        replace(PLAN, groups=PLAN.groups[::-1]),
        replace(PLAN, strategy="tree"),
        replace(PLAN, groups=(PLAN.groups[0][::-1], *PLAN.groups[1:])),
    ]
    assert len({PLAN.digest(), *(other.digest() for other in others)}) == 4
    assert PLAN.contents == others[0].contents == others[2].contents != others[1].contents


def changed(path: str, value: Any) -> str:
    """PLAN as JSON with one value replaced, or removed if it is ...; '/' goes down."""
    document = json.loads(PLAN.to_json())
    *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
    place = document
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 1, "format 1, but this commopt reads format 2"),
        ("format", ..., "format None"),
        ("groups", ..., '"groups" is missing'),
        ("groups", [], "groups are ()"),
        ("groups", {"a": 1}, "must be a list"),
        ("groups/0", "p0", "groups[0] is 'p0'; it must be a list"),
        ("groups/0", [], "at least one parameter name"),
        ("groups/0", ["p0", ""], "must be non-empty text"),
        ("groups/0", [["p0"]], "must be text"),
        ("groups/0", ["p0", "q0", "p5"], "'p5' is in it more than once"),
        ("strategy", 3, "strategy is 3; it must be text"),
        ("strategy", "", "must be non-empty text"),
        ("origin", None, "it must be text"),
        ("predicted", 5, "predicted is 5; it must be an object"),
        ("predicted/finish_us", "late", "must be a number"),
        ("predicted/group_finish_us", [1.0], "1 predicted finish times"),
    ],
)
def test_a_document_that_is_no_plan_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        Plan.from_json(changed(path, value))
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"plan"', "[" * 100_000])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"plan: (not JSON|a \w+ instead of an object)"):
        Plan.from_json(text)


def test_a_plan_is_for_one_set_of_parameters() -> None:
    PLAN.require_names(reversed(PLAN.names))
    PLAN.require_names(PLAN.names[2:], optional=[*PLAN.names[:2], "new"])
    with pytest.raises(ConfigurationError, match="it lacks 'new'"):
        PLAN.require_names([*PLAN.names, "new"])
    with pytest.raises(ConfigurationError, match="the model does not train 'p0', 'q0'; make a new plan"):
        PLAN.require_names(PLAN.names[2:])
    with pytest.raises(ConfigurationError, match="and 9 more"):
        PLAN.require_names([])


def test_values_that_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="ready_us is nan"):
        Unit(("p",), 1, float("nan"), "float32")
    with pytest.raises(ConfigurationError, match="dtype is ''"):
        Unit(("p",), 1, 0.0, "")
    with pytest.raises(ConfigurationError, match="give a tuple"):
        Unit(["p"], 1, 0.0, "float32")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="must not be later"):
        Window(5, 4)
    with pytest.raises(ConfigurationError, match="reason is ''"):
        Decision(None, Window(0, 1), "")


def test_a_step_by_hand() -> None:
    rows = ((100, 50.0), (20, 60.0), (20, 500.0))
    units = [Unit((f"p{place}",), nbytes, ready, "float32") for place, (nbytes, ready) in enumerate(rows)]
    costs = Costs({"flat": PriceTable((0, 1000), (10.0, 1010.0))}, overhead_us=5.0)
    prediction = simulate(units, [("p0", "p1"), ("p2",)], "flat", costs)
    # 5 + 10 + 120 from 60 on; then 5 + 10 + 20 from 500 on.
    assert prediction.group_finish_us == (195.0, 535.0)
    assert (prediction.compute_us, prediction.finish_us, prediction.exposed_us) == (500.0, 535.0, 35.0)
    assert prediction.communication_us == 135.0 + 35.0
    with pytest.raises(ConfigurationError, match="'c' is in a group but in no unit"):
        simulate(units, [("c",)], "flat", costs)
