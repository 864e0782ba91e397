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
from commopt.bucketing.assembly import Assembly
from commopt.bucketing.messages import Held, Message
from commopt.bucketing.readiness import Readiness
from commopt.feedback import Layout
from commopt.plan import Bucket, Plan
from tests.hook_training import SMALL_BUCKET, Tower, assert_identical, batch_of, ddp_buckets, loss_of, seeded, train
from tests.plan_changes import Changing, changing, needs_caps, plan_of
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
    planned = [bucket.nbytes for bucket in state.plan.buckets]
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
    readiness = Readiness(torch.device("cpu"))
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
        assert state._planning._pending is not None
        if do == "freeze":
            state.freeze()
        else:
            state.load_state_dict(saved)
        steps(ddp, rank, 3)
        return state.plan, state._planning._measuring.calendar.meet_at


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
        state.know(ddp.module)
    with changing():
        ddp.register_comm_hook(state, commopt.PRESETS["flat"] if aggregator is None else commopt.hook)
        steps(ddp, rank, 8)
    return state.stats()["steps"], len(state.decisions), state._registration.watches_cosine


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


def register_again(rank: int, world_size: int) -> tuple[int, int]:
    ddp = TorchDDP(seeded(Tower))
    names = [name for name, _ in reversed(list(ddp.module.named_parameters()))]
    state = commopt.attach(ddp, commopt.Flat(), plan=plan_of(names[:2], names[2:]), record=True)
    cap = ddp.bucket_bytes_cap
    steps(ddp, rank, 3)
    assert len(ddp_buckets(state)) == 2
    with pytest.raises(commopt.ConfigurationError, match="has a communication hook already"):
        commopt.attach(ddp, commopt.Flat())
    return cap, ddp.bucket_bytes_cap


@needs_caps
def test_new_buckets_leave_the_rest_of_ddp_as_it_was() -> None:
    ((before, after),) = run(register_again, 1)
    assert before == after, "torch.compile refuses caps below 1 MiB"


def compile_it(rank: int, world_size: int) -> tuple[tuple[tuple[str, ...], ...], int, float]:
    ddp = TorchDDP(seeded(Tower))
    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        compiled: Any = torch.compile(ddp, backend="eager")
        steps(compiled, rank, 6)
    return Changing.shown, len(state.decisions), Changing.costs.pack_us_per_byte if rank == 0 else 0.0


def test_what_is_compiled_shows_no_forwards_and_keeps_its_buckets() -> None:
    (units, decisions, packing_us_per_byte), _ = run(compile_it, 2)
    assert decisions == 1
    assert packing_us_per_byte > 0.0, "merged buckets are packed"
    assert [len(names) for names in units] == [12]


# --------------------------------------------------------------------- messages


def test_a_message_is_of_one_device() -> None:
    layouts = [Layout.of_parameters([(name, (3,))]) for name in "abcd"]
    devices = [torch.device(kind) for kind in ("cpu", "cpu", "meta", "meta")]
    for checkpoint in (False, True):
        assembly = Assembly()
        assembly.follow(Plan((Bucket(("a", "b", "c"), 36, "Flat()"), Bucket(("d",), 12, "Flat()"))))
        for _ in range(2):
            if checkpoint:
                assembly.imitate([Layout.of_parameters([(name, (3,)) for name in "abcd"])])
            assembly.begin_step()
            sent = [
                message
                for number, (layout, device) in enumerate(zip(layouts, devices, strict=True))
                for message in assembly.add(Held(number, layout, torch.zeros(3, device=device)), last=number == 3)
            ]
            assert sorted(number for message in sent for number in message.numbers) == [0, 1, 2, 3]
            assert all(len({each.bucket.device for each in message.held}) == 1 for message in sent)
        assert not assembly.settled


def test_the_buffers_of_a_checkpoint_are_averaged_as_the_plan_says() -> None:
    """Else a resumed run adds in another order, and its bits are others, until it has found its buckets."""
    buckets = [Layout.of_parameters([(name, (3,)) for name in names]) for names in ("ab", "cd")]
    assembly = Assembly()
    assembly.imitate(buckets)
    assembly.follow(Plan((Bucket(("a", "b"), 24, "Flat()"), Bucket(("c", "d"), 24, "Hierarchical()"))))
    assembly.begin_step()
    whole = Layout.of_parameters([(name, (3,)) for name in "dcba"])
    (message,) = assembly.add(Held(0, whole, torch.zeros(12)), last=True)
    assert message.layouts == tuple(buckets)
    assert message.shares == (0, 1)


def test_neighbours_are_packed_in_one_piece() -> None:
    layouts = [Layout.of_parameters([(f"{letter}{number}", (2,)) for number in range(50)]) for letter in "ab"]
    held = [Held(number, layout, torch.ones(100)) for number, layout in enumerate(layouts)]
    ((first, second),) = Message.joined(held).parts()
    assert first.data_ptr() == held[0].bucket.data_ptr()
    assert second.data_ptr() == held[1].bucket.data_ptr()
    assert Message.joined(held).layouts[0] is Message.joined(held).layouts[0], "worked out in every step"


def late(rank: int, world_size: int) -> bool:
    """An interrupt while the ranks meet must not let this one miss what was decided."""
    ddp = TorchDDP(seeded(Tower), **SMALL_BUCKET)
    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        steps(ddp, rank, 4)
        with pytest.MonkeyPatch.context() as patch:

            def interrupted(plan: Plan) -> None:
                raise KeyboardInterrupt

            patch.setattr(state._planning._following, "follow", interrupted)
            if rank == 1:
                with pytest.raises(KeyboardInterrupt):
                    ddp(*batch_of(rank, 0))
        steps(ddp, rank, 1)
    plans: list[Any] = [None] * world_size
    dist.all_gather_object(plans, None if state.plan is None else state.plan.digest())
    return plans[0] is not None and plans[0] == plans[1]


def test_ctrl_c_at_a_meeting_does_not_part_the_ranks() -> None:
    assert all(run(late, 2))
