# SPDX-License-Identifier: Apache-2.0
"""DDP's buckets made anew: the plan's own in the very next backward, and nobody waits for anybody meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt.schedule import Plan, reducer
from tests.hook_training import (
    SMALL_BUCKET,
    Branches,
    Tower,
    assert_identical,
    batch_of,
    branching,
    ddp_buckets,
    seeded,
    train,
)
from tests.plan_changes import Changing, changing, needs_caps
from tests.ranks import run

# --------------------------------------------------------------------- forwards that not all ranks make


def forward_alone(
    rank: int, world_size: int, kind: type[nn.Module], options: dict[str, Any]
) -> tuple[str, int, list[int]]:
    """One rank, not always the same, makes a forward of its own before every step; the other goes on to a barrier.

    Not before the second step, in which DDP compares its own buckets.
    """
    ddp = TorchDDP(seeded(kind), **SMALL_BUCKET, **options)
    batch = branching if kind is Branches else batch_of
    made = []

    def before(step: int) -> None:
        if step > 1 and rank == step // 2 % 2:
            ddp(*batch(rank, step))
            made.append(step)
        dist.barrier()

    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        digest = train(ddp, rank, world_size, commopt.Flat(), steps=14, batch=batch, before=before)
    return digest, sum(decision.plan is not None for decision in state.decisions), made


@needs_caps
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Tower, {}),
        (Tower, {"gradient_as_bucket_view": True}),
        (Branches, {"find_unused_parameters": True}),
    ],
    ids=["default", "views", "unused"],
)
def test_a_forward_on_one_rank_waits_for_nobody(kind: type[nn.Module], options: dict[str, Any]) -> None:
    results = run(forward_alone, 2, kind, options, timeout_s=30.0)
    assert_identical([digest for digest, _, _ in results])
    assert [changes for _, changes, _ in results] == [4, 4]
    assert sorted(step for _, _, made in results for step in made) == list(range(2, 14))


# --------------------------------------------------------------------- what DDP is left with


def make_anew(rank: int, world_size: int, unused: bool) -> list[list[str]]:
    """Return the parameters of DDP's buckets, in their order, of the backward right after a change."""
    ddp = TorchDDP(seeded(Tower), find_unused_parameters=unused)
    shown: list[list[str]] = []
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}

    def hook(state: object, bucket):
        shown.append([names[id(parameter)] for parameter in bucket.parameters()])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    config, group = ddp._bucket_config, ddp.process_group
    for _ in range(2):
        ddp(*batch_of(rank, 0)).sum().backward()
    by_name = dict(ddp.module.named_parameters())
    mixed = [["layers.3.bias", "layers.5.weight"], ["layers.0.weight"], [n for n in by_name if n[7] in "124"]]
    assert reducer.why_not(ddp, by_name) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
        assert "DDP_SET_LAST_BUCKET_CAP" in reducer.why_not(ddp, by_name)
    mixed[1] += [name for name in by_name if not any(name in part for part in mixed)]
    reducer.rebuild(ddp, [[by_name[name] for name in part] for part in mixed])
    assert ddp._bucket_config is config
    assert ddp.process_group is group
    shown.clear()
    ddp(*batch_of(rank, 1)).sum().backward()
    assert shown == mixed
    shown.clear()
    assert not ddp.reducer._rebuild_buckets(), "DDP would make buckets again"
    ddp(*batch_of(rank, 2)).sum().backward()
    assert ddp._get_ddp_logging_data()["comm_hook"] == hook.__qualname__
    return shown if shown == mixed else []


@needs_caps
@pytest.mark.parametrize("unused", [False, True])
def test_ddp_has_the_buckets_it_is_given_from_the_next_backward_on(unused: bool) -> None:
    (shown,) = run(make_anew, 1, unused)
    assert [len(names) for names in shown] == [2, 4, 6]


def test_a_torch_that_lacks_anything_that_is_needed_is_left_alone() -> None:
    def model() -> Any:
        ddp = SimpleNamespace(**dict.fromkeys(reducer._NEEDED), mixed_precision=None, static_graph=False)
        ddp.reducer = SimpleNamespace(**dict.fromkeys(reducer._NEEDED_OF_REDUCER))
        ddp._bucket_config = SimpleNamespace(per_bucket_bytes_caps=())
        ddp._join_config = SimpleNamespace(enable=False)
        return ddp

    assert reducer.why_not(model(), {}) == ""
    places = [(None, name) for name in reducer._NEEDED] + [("reducer", name) for name in reducer._NEEDED_OF_REDUCER]
    for part, name in [*places, ("_bucket_config", "per_bucket_bytes_caps")]:
        ddp = model()
        delattr(ddp if part is None else getattr(ddp, part), name)
        assert reducer.why_not(ddp, {}) != "", name
    for name in ("_use_python_reducer", "mixed_precision", "static_graph"):
        ddp = model()
        setattr(ddp, name, True)
        assert reducer.why_not(ddp, {}) != "", name
    ddp = model()
    ddp._join_config.enable = True
    assert "DDP.join()" in reducer.why_not(ddp, {})


def name_by_number(rank: int, world_size: int) -> list[int]:
    """Without a module parameters are known, in the order of backward, once DDP has shown them."""
    numbers = [f"parameter {number}" for number in range(12)]
    plan = Plan((tuple(numbers[:3]), tuple(numbers[3:])), repr(commopt.Flat()))
    ddp = commopt.DistributedDataParallel(seeded(Tower), **SMALL_BUCKET)
    state = commopt.HookState(commopt.Flat(), plan=plan, record=True)
    ddp.register_comm_hook(state, commopt.hook)
    for step in range(3):
        ddp.zero_grad()
        ddp(*batch_of(rank, step)).sum().backward()
    return ddp_buckets(state)


@needs_caps
def test_a_plan_may_name_parameters_by_number() -> None:
    (nbytes,) = run(name_by_number, 1)
    assert len(nbytes) == 2


def thaw_before_attach(rank: int, world_size: int) -> tuple[int, int, bool]:
    """DDP was made without a parameter that trains now: it is in no bucket, so it can be in no plan."""
    module = seeded(Tower)
    weight = module.layers[0].weight  # type: ignore[union-attr, index]
    weight.requires_grad_(False)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    weight.requires_grad_(True)
    with changing():
        state = commopt.attach(ddp, commopt.Flat(), plan="adaptive")
        for step in range(8):
            ddp.zero_grad()
            ddp(*batch_of(rank, step)).sum().backward()
    assert state.plan is not None
    merged = rank > 0 or max(map(len, Changing.shown)) > 1
    return len(state.plan.names), len(state.decisions), merged


def test_a_parameter_that_ddp_does_not_know_does_not_end_the_training() -> None:
    assert run(thaw_before_attach, 2) == [(11, 2, True), (11, 2, True)]
