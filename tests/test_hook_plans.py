# SPDX-License-Identifier: Apache-2.0
"""Plans in a training that goes on: right gradients whatever travels together, and the same plan on every rank."""

from __future__ import annotations

import random
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.lanes import registry
from commopt.schedule import Costs, Decision, Measurement, Plan, sync
from tests.hook_training import (
    BUCKETS_CAN_BE_GIVEN,
    SMALL_BUCKET,
    Branches,
    ManyDtypes,
    Tower,
    assert_identical,
    batch_of,
    branching,
    digest_of,
    loss_of,
    seeded,
    train,
)
from tests.plan_changes import Changing, changing
from tests.ranks import run


def random_plan(module: nn.Module, strategy: str, seed: int) -> Plan:
    """Cut the parameters, in about the order of backward, anywhere."""
    dice = random.Random(seed)
    parameters = [name for name, p in reversed(list(module.named_parameters())) if p.requires_grad]
    if dice.random() < 0.3:
        dice.shuffle(parameters)
    ends = sorted(dice.sample(range(1, len(parameters)), dice.randrange(len(parameters))))
    parts = zip([0, *ends], [*ends, len(parameters)], strict=True)
    return Plan(tuple(tuple(parameters[begin:end]) for begin, end in parts), strategy, origin=f"dice {seed}")


# --------------------------------------------------------------------- another plan before every step


FEATURES: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any]]] = {
    "default": (Tower, SMALL_BUCKET, {}),
    "views": (Tower, SMALL_BUCKET | {"gradient_as_bucket_view": True}, {"micros": 2}),
    "unused": (Branches, SMALL_BUCKET | {"find_unused_parameters": True}, {"batch": branching}),
    "static": (Tower, SMALL_BUCKET | {"static_graph": True}, {}),
    "dtypes": (ManyDtypes, SMALL_BUCKET, {}),
}


EXACT = ("default", "views", "unused")  # DDP is given the plan's buckets; else its own stay


def change_plans(rank: int, world_size: int, preset: str, feature: str) -> tuple[str, list[bool]]:
    kind, options, training = FEATURES[feature]
    module = seeded(kind)
    ddp = TorchDDP(module, **options)
    state = commopt.attach(ddp, preset, plan="ddp")
    strategy = repr(state.aggregator)
    to_the_letter = []

    def before(step: int) -> None:
        if state.plan is not None:
            sent = [tuple(name for name, *_ in buffer) for buffer in state.state_dict()["buckets"]]
            to_the_letter.append(sent == list(state.plan.groups))
        if step:
            state._registration.controller.follow(random_plan(module, strategy, step))

    aggregator = commopt.PRESETS[preset].build()
    return train(ddp, rank, world_size, aggregator, steps=8, before=before, **training), to_the_letter


@pytest.mark.parametrize(
    ("preset", "feature"),
    [
        *(("hierarchical", feature) for feature in FEATURES),
        *(("hierarchical_quantized", feature) for feature in ("default", "views", "dtypes")),
        *(("hierarchical_powersgd", feature) for feature in ("default", "unused")),
    ],
)
def test_gradients_stay_right_while_plans_change(preset: str, feature: str) -> None:
    results = run(change_plans, 4, preset, feature, nodes=(2, 2))
    assert_identical([digest for digest, _ in results])
    for _, to_the_letter in results:
        assert to_the_letter == [feature in EXACT and BUCKETS_CAN_BE_GIVEN] * 6


# --------------------------------------------------------------------- rank 0 decides


class Restless(Changing):
    """Decides on rank 0 only."""

    def __init__(self, options: Sequence[Any], costs: Costs, max_bytes: int, *_: object) -> None:
        assert torch.distributed.get_rank() == 0
        super().__init__(options, costs, max_bytes)


def follow_rank_0(rank: int, world_size: int, kind: type[Changing]) -> tuple[str, list[str], str | None]:
    with changing(kind):
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        digest = train(ddp, rank, world_size, commopt.Flat(), steps=12)
    plan = state.plan
    assert state.stats()["steps"] == 12
    return digest, [decision.reason for decision in state.decisions], None if plan is None else plan.digest()


def test_every_rank_follows_what_rank_0_decides() -> None:
    results = run(follow_rank_0, 4, Restless, nodes=(2, 2))
    assert_identical([digest for digest, _, _ in results])
    assert results[0][1] == ["cut at 4", "cut at 7", "cut at 10"]
    assert len({(tuple(reasons), digest) for _, reasons, digest in results}) == 1


class Confused(Changing):
    """Fails at its first synchronisation point."""

    def decide(self, window: Measurement, step: int) -> Decision:
        raise ZeroDivisionError("a flaw in the planner")


def test_a_planner_that_fails_does_not_end_the_training() -> None:
    results = run(follow_rank_0, 2, Confused)
    assert_identical([digest for digest, _, _ in results])
    assert [rest for _, *rest in results] == [[[], None]] * 2


def run_out_of_data(rank: int, world_size: int) -> tuple[str, int]:
    with changing():
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)

        def steps(count: int) -> None:
            for step in range(count):
                optimizer.zero_grad()
                loss_of(ddp, batch_of(rank, step)).backward()
                optimizer.step()

        steps(3)
        with ddp.join():
            steps(5 + 4 * rank)
        steps(4)
    return digest_of(ddp.module), len(state.decisions)


def test_plans_change_while_a_rank_has_run_out_of_data() -> None:
    results = run(run_out_of_data, 2)
    assert_identical([digest for digest, _ in results])
    assert [decisions for _, decisions in results] == [4, 4]


def fail_behind_the_last_bucket(rank: int, world_size: int) -> None:
    """A decision fails while backward is still under way, as where a peer has left; the next step says so."""
    with changing(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync.Coordinator, "decide", Mock(side_effect=RuntimeError("nobody meets")))
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        registration = commopt.attach(ddp, commopt.Flat(), plan="adaptive")._registration
        raise_lost = registration._raise_lost
        patch.setattr(registration, "_raise_lost", lambda: registry.finish() and raise_lost())
        for step in range(4):
            loss_of(ddp, batch_of(rank, step)).backward()
        with pytest.raises(commopt.LaneError, match="planning after step 3"):
            loss_of(ddp, batch_of(rank, 4)).backward()


def test_a_backward_whose_buckets_have_arrived_does_not_fail_with_the_meeting_behind_them() -> None:
    run(fail_behind_the_last_bucket, 2, fresh=True)


def adapt(rank: int, world_size: int, preset: str, kind: type[nn.Module], options: dict[str, Any]) -> tuple[str, int]:
    training: dict[str, Any] = {"batch": branching} if kind is Branches else {}
    ddp = TorchDDP(seeded(kind), **SMALL_BUCKET | options)
    state = commopt.attach(ddp, preset, plan="adaptive")
    digest = train(ddp, rank, world_size, commopt.PRESETS[preset].build(), steps=30, **training)
    return digest, len(state.decisions)


@pytest.mark.parametrize(
    ("preset", "kind", "options"),
    [
        ("hierarchical_quantized", Tower, {}),
        ("hierarchical", Branches, {"find_unused_parameters": True}),
    ],
    ids=["quantized", "a graph that changes"],
)
def test_adaptive_by_itself(preset: str, kind: type[nn.Module], options: dict[str, Any]) -> None:
    results = run(adapt, 4, preset, kind, options, nodes=(2, 2))
    assert_identical([digest for digest, _ in results])
    assert all(decisions for _, decisions in results), "never met"


def given(rank: int, world_size: int, folder: Path) -> tuple[str | None, str | None]:
    module = seeded(Tower)
    plans = [random_plan(module, repr(commopt.Flat()), seed) for seed in (1, 2)]
    path = folder / f"plan-{rank}.json"
    path.write_text(plans[rank].to_json())
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.attach(ddp, commopt.Flat(), plan=path)
    train(ddp, rank, world_size, commopt.Flat())
    assert state.plan is not None
    return state.plan.digest(), plans[0].digest()


def test_of_different_given_plans_rank_0_s_is_followed(tmp_path: Path) -> None:
    for followed, first in run(given, 2, tmp_path):
        assert followed == first


def refuse(rank: int, world_size: int) -> None:
    def plan(name: str, strategy: str) -> Plan:
        return Plan(((name,),), strategy)

    module = nn.Linear(3, 3, bias=False)
    for bad, words in (
        (plan("other", "Flat()"), "other parameters"),
        (plan("weight", "Hierarchical()"), "averages with Flat"),
        ("adaptiv", "cannot be read"),
    ):
        with pytest.raises(commopt.ConfigurationError, match=words):
            commopt.attach(TorchDDP(module), commopt.Flat(), plan=bad)  # what users may do
    wish = "ddp" if rank else "adaptive"
    with pytest.raises(commopt.MismatchError, match=r"plan.*adaptive"):
        commopt.attach(TorchDDP(module), commopt.Flat(), plan=wish)


def test_bad_plans_are_refused_on_every_rank() -> None:
    run(refuse, 2)


def resume(rank: int, world_size: int) -> tuple[str, str]:
    def start() -> tuple[TorchDDP, commopt.HookState]:
        ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
        return ddp, commopt.attach(ddp, "hierarchical_quantized", plan="adaptive")  # too short to make one

    ddp, state = start()
    plan = random_plan(ddp.module, repr(state.aggregator), 5)
    aggregator = commopt.PRESETS["hierarchical_quantized"].build()
    train(
        ddp,
        rank,
        world_size,
        aggregator,
        before=lambda step: state._registration.controller.follow(plan) if step == 1 else None,
    )
    saved, weights = state.state_dict(), {k: v.clone() for k, v in ddp.module.state_dict().items()}
    resumed, again = start()
    resumed.module.load_state_dict(weights)
    again.load_state_dict(saved)
    digests = []
    for model in (ddp, resumed):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch_of(rank, 100 + step)).backward()
            optimizer.step()
        digests.append(digest_of(model.module))
    return digests[0], digests[1]


def test_a_checkpoint_goes_on_with_its_plan_bit_by_bit() -> None:
    results = run(resume, 4, nodes=(2, 2))
    assert len({digest for pair in results for digest in pair}) == 1


# --------------------------------------------------------------------- what can be seen of it


class Sleepy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


class SleepyTower(Tower):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Sleepy.apply(torch.tanh(self.layers[0](x)), self.seconds))


def watch(rank: int, world_size: int, late_s: float) -> tuple[list[tuple[int, float]], str]:
    torch.manual_seed(7)
    ddp = TorchDDP(SleepyTower(0.02 + (late_s if rank == 1 else 0.0)), **SMALL_BUCKET)
    state = commopt.attach(ddp, "hierarchical", plan="ddp", record=True)
    with pytest.raises(commopt.ConfigurationError, match="no step was recorded"):
        state.report()
    for step in range(12):
        ddp.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
    report = state.report()
    return [(each.rank, each.late_us / 1000) for each in report.analysis.stragglers], str(report)


@pytest.mark.parametrize("late_s", [0.2, pytest.param(0.0, marks=pytest.mark.alone)])
def test_a_rank_that_sleeps_is_named_and_else_nobody(late_s: float) -> None:
    for found, text in run(watch, 2, late_s):
        assert [rank for rank, _ in found] == ([1] if late_s else [])
        assert all(late_ms > 100 for _, late_ms in found)
        assert ("rank 1" in text) or not late_s


def go_on(rank: int, world_size: int, steps: int) -> tuple[int, int, int]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, "hierarchical_quantized", plan="adaptive", record=True)
    batch = batch_of(rank, 0)
    threads, peak_kb = 0, 0
    for step in range(steps):
        ddp.zero_grad()
        loss_of(ddp, batch).backward()
        if step == 150:
            threads, peak_kb = threading.active_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kb
    return threading.active_count() - threads, grown_kb, len(state.decisions)


def test_nothing_grows_in_500_steps() -> None:
    for threads, grown_kb, decisions in run(go_on, 2, 500):
        assert threads <= 0  # one of an earlier job may end
        assert grown_kb < 4000
        assert decisions >= 3


def train_by_default(rank: int, world_size: int, freeze: bool) -> int:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, commopt.Flat())
    train(ddp, rank, world_size, commopt.Flat(), steps=6)
    if freeze:
        state.freeze()
    train(ddp, rank, world_size, commopt.Flat(), steps=8)
    return len(state.decisions)


@pytest.mark.parametrize(
    ("freeze", "wish", "decisions"),
    [(False, None, 0), (True, "adaptive", 0), (False, "ddp", 0), (False, "adaptive", 1)],
)
def test_plans_are_made_unless_frozen_or_unwished(freeze: bool, wish: str | None, decisions: int) -> None:
    assert run(train_by_default, 2, freeze, env={"COMMOPT_PLAN": wish}) == [decisions] * 2
