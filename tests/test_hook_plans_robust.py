# SPDX-License-Identifier: Apache-2.0
"""Plans where training does not go by the book: frozen parameters, checkpoints, freeze(), compilers, devices."""

from __future__ import annotations

import gc
import pickle
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.recording import GradientTimes
from commopt.schedule import Plan
from commopt.schedule.controller import Phase
from tests.hook_training import SMALL_BUCKET, Tower, assert_identical, batch_of, ddp_buckets, loss_of, seeded, train
from tests.plan_changes import Changing, changing, heard, needs_caps, plan_of
from tests.ranks import run


def steps(ddp: nn.Module, rank: int, count: int) -> None:
    for step in range(count):
        ddp.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()


# --------------------------------------------------------------------- parameters that do not train all the time


def thaw(rank: int, world_size: int) -> tuple[str, int]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET, find_unused_parameters=True)
    weight = ddp.module.layers[0].weight

    def before(step: int) -> None:
        weight.requires_grad_(not 1 <= step <= 6)

    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        digest = train(ddp, rank, world_size, commopt.Flat(), steps=12, before=before)
    return digest, len(state.decisions)


def test_a_parameter_that_was_frozen_for_a_while_is_averaged_again() -> None:
    results = run(thaw, 2)
    assert_identical([digest for digest, _ in results])
    assert all(decisions >= 3 for _, decisions in results)


def discriminate(rank: int, world_size: int) -> tuple[str, list[int], list[int]]:
    """Between two steps somebody else's gradients go through the model, which is frozen meanwhile."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)

    def before(step: int) -> None:
        ddp.requires_grad_(False)
        ddp(batch_of(rank, step)[0].requires_grad_()).sum().backward()
        ddp.requires_grad_(True)

    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive", record=True)
        digest = train(ddp, rank, world_size, commopt.Flat(), steps=7, before=before)
    assert state.plan is not None
    sizes = {name: parameter.nbytes for name, parameter in ddp.module.named_parameters()}
    planned = [sum(map(sizes.__getitem__, group)) for group in state.plan.groups]
    return digest, ddp_buckets(state), planned


@needs_caps
def test_buckets_are_not_made_anew_while_a_model_is_frozen() -> None:
    results = run(discriminate, 2)
    assert_identical([digest for digest, _, _ in results])
    for _, found, planned in results:
        assert found == planned


def ignore(rank: int, world_size: int) -> int:
    class Root(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.gain

    module = seeded(Root)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["layers.0.weight", ".gain"])
    ddp = TorchDDP(module, **SMALL_BUCKET)
    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        steps(ddp, rank, 8)
    assert state.plan is not None
    assert not {"layers.0.weight", "gain"} & set(state.plan.names)
    return len(state.decisions)


def test_parameters_that_ddp_ignores_are_in_no_plan() -> None:
    assert run(ignore, 2) == [2, 2]


def test_gradient_hooks_skip_the_frozen_and_keep_no_model_alive() -> None:
    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    readiness = GradientTimes(torch.device("cpu"))
    readiness.start(dict(module.named_parameters()))
    module(torch.ones(1, 3)).sum().backward()
    readiness.end_step(0)
    assert list(readiness.times_us()[0]) == ["weight"]
    weight = ref(module.weight)
    del module, readiness  # in the middle of a measurement
    gc.collect()
    assert weight() is None


# --------------------------------------------------------------------- what changes between two steps


def meet_and(rank: int, world_size: int, do: str) -> tuple[Plan | None, int]:
    """Let the ranks meet, and do something before anybody hears what was decided."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        steps(ddp, rank, 2)
        saved = {**state.state_dict(), "steps": 1000}
        steps(ddp, rank, 2)
        assert state._registration.controller.phase is Phase.SYNCHRONISING
        if do == "freeze":
            state.freeze()
        else:
            state.load_state_dict(saved)
        steps(ddp, rank, 3)
        return state.plan, state._registration.controller._window.last_step


def test_after_freeze_nothing_changes_any_more() -> None:
    assert [plan for plan, _ in run(meet_and, 2, "freeze")] == [None, None]


def freeze_early(
    rank: int, world_size: int, aggregator: commopt.Aggregator | None, knows: bool
) -> tuple[int, int, bool]:
    """Freeze before it is known what averages (None), or before a state that was saved has found the other ranks."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.HookState(aggregator, plan="adaptive")
    if aggregator is not None:
        state = pickle.loads(pickle.dumps(state))
    state.freeze()
    if knows:
        state.set_module(ddp.module)
    with changing():
        ddp.register_comm_hook(state, commopt.PRESETS["flat"] if aggregator is None else commopt.hook)
        steps(ddp, rank, 8)
    return state.stats()["steps"], len(state.decisions), state._registration.exact_sample is not None


@pytest.mark.parametrize(
    ("aggregator", "knows"),
    [(None, False), (commopt.Flat(), False), (commopt.Flat(), True), (commopt.Auto("quantized"), False)],
    ids=str,
)
def test_freeze_holds_from_before_the_first_step(aggregator: commopt.Aggregator | None, knows: bool) -> None:
    assert run(freeze_early, 2, aggregator, knows) == [(8, 0, False)] * 2


def test_what_was_decided_before_a_checkpoint_was_loaded_is_forgotten() -> None:
    assert run(meet_and, 2, "load") == [(None, 1003), (None, 1003)]


def save_or_load(rank: int, world_size: int, saved: Any, asked_for: Plan | str) -> Any:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    state = commopt.attach(ddp, commopt.Hierarchical(), plan=asked_for)
    if saved is None:
        steps(ddp, rank, 2)
        return state.gathered_state_dict()
    state.load_state_dict(saved)
    steps(ddp, rank, 2)
    return state.plan


def test_the_plan_of_a_checkpoint_is_for_one_world_and_gives_way_to_what_was_asked_for() -> None:
    names = [name for name, _ in reversed(list(Tower().named_parameters()))]
    plan = plan_of(names[:6], names[6:])  # by Flat(), which is a choice of Hierarchical() only where there are nodes
    other = plan_of(names, strategy=repr(commopt.Hierarchical()))
    saved = run(save_or_load, 4, None, plan, nodes=(2, 2))[0]
    assert run(save_or_load, 4, saved, "adaptive", nodes=(2, 2)) == [plan] * 4
    assert run(save_or_load, 4, saved, "adaptive") == [None] * 4
    assert run(save_or_load, 4, saved, "ddp", nodes=(2, 2)) == [None] * 4
    assert run(save_or_load, 4, saved, other, nodes=(2, 2)) == [other] * 4


def resume_static(rank: int, world_size: int) -> tuple[str, int]:
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET, static_graph=True)
    state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
    names = [name for name, _ in reversed(list(ddp.module.named_parameters()))]
    saved = state.state_dict() | {"plan": plan_of(*[[name] for name in names]).to_json()}
    state.load_state_dict(saved)
    steps(ddp, rank, 12)
    assert state.plan is not None
    return state.decisions[0].reason, len(state.plan.groups) - len(names)


def test_a_plan_that_ddp_does_not_follow_keeps_its_own_prediction() -> None:
    (reason, more), (_, others) = run(resume_static, 2)
    assert "as before" in reason
    assert more == others == 0


def late(rank: int, world_size: int) -> bool:
    """An interrupt while the ranks meet must not let this one miss what was decided."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        steps(ddp, rank, 4)
        with pytest.MonkeyPatch.context() as patch:

            def interrupted(plan: Plan) -> None:
                raise KeyboardInterrupt

            patch.setattr(state._registration.controller, "_follow", interrupted)
            if rank == 1:
                with pytest.raises(KeyboardInterrupt):
                    ddp(*batch_of(rank, 0))
        steps(ddp, rank, 1)
    plans: list[Any] = [None] * world_size
    dist.all_gather_object(plans, None if state.plan is None else state.plan.digest())
    return plans[0] is not None and plans[0] == plans[1]


def test_ctrl_c_at_a_meeting_does_not_part_the_ranks() -> None:
    assert all(run(late, 2))


def compile_it(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, list[str], int]:
    ddp = TorchDDP(seeded(Tower), **(SMALL_BUCKET | options if options else {}))  # torch.compile refuses small caps
    with changing(), heard() as said:
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        trained: Any = ddp if options else torch.compile(ddp, backend="eager")
        steps(trained, rank, 9)
    whole = [message for _, message in said if "own buckets stay" in message]
    return len(state.decisions), whole, max(map(len, Changing.shown), default=0)


@pytest.mark.parametrize(("options", "why"), [({}, "compiled from outside"), ({"static_graph": True}, "static_graph")])
def test_where_ddp_keeps_its_buckets_that_is_said_once(options: dict[str, bool], why: str) -> None:
    (decisions, said, largest), (_, others, _) = run(compile_it, 2, options)
    assert decisions >= 2
    assert len(said) == 1
    assert why in said[0]
    assert others == []
    assert largest > 1, "units are DDP's buckets"
