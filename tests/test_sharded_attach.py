# SPDX-License-Identifier: Apache-2.0
"""What attach takes and refuses, on every rank; ranks that fail, replicas that differ, steps that are dropped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Compressed, ConfigurationError, Flat, HookState, LocalSGD, Quantize
from commopt.sharded import ShardedState, seams
from tests.feedback_training import gradients, same_residuals
from tests.ranks import run
from tests.sharded_training import (
    NODES,
    Made,
    Net,
    attached,
    batch,
    each_layer,
    hsdp_mesh,
    local,
    modules_of,
    over_all_ranks,
    plain_steps,
    policy,
    same,
)
from tests.test_groups import message_of
from tests.test_sharded_feedback import sharded

# ------------------------------------------------------------------------------------------- refusals


def some_replicas_cannot(rank: int, world_size: int) -> tuple[str, bool]:
    def check(self: object, team: object) -> None:
        if rank % 2 == 0:
            raise ConfigurationError("not on these ranks")

    began, scaler = time.monotonic(), torch.amp.GradScaler("cpu")
    with patch.object(Compressed, "check", check), pytest.raises(ConfigurationError) as caught:
        commopt.attach(Made()(), Compressed(Quantize(8)), scaler=scaler, timeout=60)
    return str(caught.value), time.monotonic() - began < 50


def test_what_only_some_replicas_cannot_do_is_heard_by_all_at_once() -> None:
    for said, at_once in run(some_replicas_cannot, 4, nodes=NODES, fresh=True):
        assert "not on these ranks" in said
        assert at_once


def hooked(net: Net) -> None:
    for module in modules_of(net):
        module.set_all_reduce_hook(lambda buffer: None)


def attached_twice(rank: int) -> object:
    net = Made()()
    with attached(net, "flat"):
        return commopt.attach(net, "flat")


def hooked_later(rank: int) -> object:
    net = Made()()
    with attached(net, "flat"):
        hooked(net)
        net(batch(0)).square().mean().backward()
    return None


def with_options(choice: Any = "flat", made: Made | None = None, **options: Any) -> Callable[[int], object]:
    return lambda rank: commopt.attach((made or Made())(), choice, **options)


def on_one_rank(**options: Any) -> Callable[[int], object]:
    return lambda rank: commopt.attach(Made()(), "flat", **(options if rank == 1 else {}))


def complex_numbers(net: Net) -> None:
    net.head.register_parameter("phase", nn.Parameter(torch.zeros(4, dtype=torch.complex64)))


REFUSED: dict[str, tuple[Callable[[int], object], tuple[str, ...]]] = {
    "auto": (with_options("auto"), ("DDP models only", "plans of DDP's buckets")),
    "LocalSGD with buffers": (with_options(LocalSGD(buffers=True)), ("leave buffers out",)),
    "a plan": (with_options(plan="adaptive"), ("plan='adaptive'", "leave plan out")),
    "links": (with_options(links="links.json"), ("links=", "leave links out")),
    "tuned": (with_options(tuned="tuned.json"), ("tuned=", "leave tuned out")),
    "ranks_per_node": (with_options(ranks_per_node=2), ("COMMOPT_RANKS_PER_NODE",)),
    "process_group": (with_options(process_group=object()), ("the mesh of fully_shard",)),
    "weights": (with_options(weights=object()), ("weights=", "leave weights out")),
    "no scaler": (with_options(scaler=8), ("scaler is a int",)),
    "a wrong timeout": (with_options(timeout="soon"), ("timeout", "str")),
    "no name": (with_options("flatt"), ("flatt",)),
    "a hook already": (with_options(made=Made(adjust=hooked)), ("has an all-reduce hook already",)),
    "attached twice": (attached_twice, ("has an all-reduce hook already",)),
    "a hook later": (hooked_later, ("all_reduce_hook after commopt.attach",)),
    "integers": (with_options(made=Made(options=policy(None, torch.int32))), ("reduce_dtype=torch.int32",)),
    "complex numbers": (with_options(made=Made(change=complex_numbers)), ("complex",)),
    "a part of a group": (
        lambda rank: commopt.attach(together().layers[0], "flat"),
        ("attach the model that has all of them",),
    ),
    "a plan on one rank": (on_one_rank(plan="adaptive"), ("plan='adaptive'",)),
    "a scaler on one rank": (on_one_rank(scaler=8), ("scaler is a int",)),
    "a name that torch lacks": (lambda rank: without_a_seam(), ("FSDPParamGroup.gone", torch.__version__)),
}
DISAGREE: dict[str, Callable[[int], object]] = {
    "aggregators": lambda rank: commopt.attach(Made()(), "flat" if rank else "hierarchical"),
    "models": lambda rank: commopt.attach(Made(sizes=(33, 17 + (rank == 2), 5))(), "flat"),
    "recording": lambda rank: commopt.attach(Made()(), "flat", record=rank == 3),
}


def together() -> Net:
    def shard(net: Net, **options: Any) -> None:
        fully_shard([net.layers[0], net.layers[1]], **options)

    return Made(shard=shard)()


def without_a_seam() -> object:
    with patch.object(seams, "_OF_A_GROUP", ("fsdp_params", "gone")):
        return commopt.attach(Made()(), "flat")


def refusals(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    found = {}
    for name, call in {**{name: case[0] for name, case in REFUSED.items()}, **DISAGREE}.items():
        try:
            call(rank)
            found[name] = ("nothing", "")
        except commopt.CommoptError as error:
            found[name] = (type(error).__name__, str(error))
    return found


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    results = run(refusals, 4, nodes=NODES, timeout_s=300)
    for name, (_, words) in REFUSED.items():
        for result in results:
            kind, text = result[name]
            assert kind in ("ConfigurationError", "UnsupportedTensorError"), (name, kind, text)
            assert all(word in text for word in words), (name, text)
    for name in DISAGREE:
        assert all(result[name][0] == "MismatchError" for result in results), (name, results[0][name])


# ------------------------------------------------------------------------------------------- wrappers


class Fabric(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module = model


def wrapped(rank: int, world_size: int) -> dict[str, Any]:
    taken: dict[str, Any] = {
        "compiled DDP": torch.compile(TorchDDP(nn.Linear(4, 4))),
        "Fabric's DDP": Fabric(TorchDDP(nn.Linear(4, 4))),
        "compiled inside Fabric": Fabric(cast(nn.Module, torch.compile(TorchDDP(nn.Linear(4, 4))))),
        "FSDP2 of a compiled one": fully_shard(cast(nn.Module, torch.compile(Net())), mesh=hsdp_mesh(2, 1)),
        "compiled FSDP2": torch.compile(Made(mesh=hsdp_mesh(2, 1))()),
    }
    found: dict[str, Any] = {}
    for name, model in taken.items():
        with attached(model, "flat") as state:
            found[name] = type(state)
            if isinstance(state, ShardedState):
                found["names"] = sorted(state.state_dict()["parameters"])
    refused = {
        "bare": nn.Linear(4, 4),
        "FSDP1": FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")),
        "DataParallel": nn.DataParallel(nn.Linear(4, 4)),
        "composable": composable(),
    }
    for name, model in refused.items():
        with pytest.raises(ConfigurationError) as caught:
            commopt.attach(model, "flat")
        found[name] = str(caught.value)
    return found


def composable() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(nn.Linear(4, 4))


def test_wrappers_are_taken_off_or_named() -> None:
    for found in run(wrapped, 2):
        for name in ("compiled DDP", "Fabric's DDP", "compiled inside Fabric"):
            assert found[name] is HookState, name
        for name in ("FSDP2 of a compiled one", "compiled FSDP2"):
            assert found[name] is ShardedState
        assert "layers.0.0.weight" in found["names"]
        assert "commopt.DistributedDataParallel(model)" in found["bare"]
        assert "fully_shard" in found["bare"]
        assert "FSDP1 is not supported" in found["FSDP1"]
        assert "no processes" in found["DataParallel"]
        assert "model.register_comm_hook(commopt.HookState(module=model)" in found["composable"]


# ------------------------------------------------------------------------------------------- a rank fails


@contextmanager
def broken_average() -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise ValueError("out of order")

    with patch.object(Flat, "all_reduce", fail):
        yield


def until_it_ends(rank: int, folder: str, steps: Callable[[], None]) -> None:
    """Train as a script does: what it raises ends the process, and with it what others wait for in FSDP's groups."""
    try:
        steps()
    except RuntimeError as error:  # LaneError is one, and so is gloo's
        Path(folder, f"rank {rank}").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


def fail_in_the_hook(rank: int, world_size: int, folder: str) -> None:
    net = Made()()
    commopt.attach(net, Flat(), timeout=30)

    def steps() -> None:
        net(batch(0)).square().mean().backward()
        with broken_average() if rank == 1 else nullcontext():
            net(batch(1)).square().mean().backward()

    until_it_ends(rank, folder, steps)


def differ(rank: int, world_size: int, folder: str, alike_first: bool) -> None:
    """One replica uses the side branch, the other does not."""

    def shard(net: Net, **options: Any) -> None:
        fully_shard(net.side, **options)
        each_layer(net, **options)

    net = Made(shard=shard)()
    commopt.attach(net, Flat(), timeout=3)

    def steps() -> None:
        if alike_first:
            net(batch(0), side=True).square().mean().backward()
        net(batch(1), side=rank < 2).square().mean().backward()

    until_it_ends(rank, folder, steps)


FAILURES: dict[str, tuple[Callable[..., None], tuple[bool, ...], tuple[str, ...]]] = {
    "a rank fails": (fail_in_the_hook, (), ("rank 1 (", "out of order")),
    "replicas differ": (differ, (False,), ("ranks disagree", "set_reduce_scatter_unused_params(True)")),
    "replicas differ later": (differ, (True,), ("set_reduce_scatter_unused_params(True)",)),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_ends_all_ranks_and_says_why(failure: str, tmp_path: Path) -> None:
    job, arguments, words = FAILURES[failure]
    run(job, 4, str(tmp_path), *arguments, nodes=NODES, fresh=True, dies=range(4), timeout_s=25)
    texts = [Path(tmp_path, f"rank {rank}").read_text() for rank in range(4)]
    told = [text for text in texts if text.startswith("LaneError") and all(word in text for word in words)]
    assert len(told) >= 2, texts  # the replicas of a shard; the others may wait for these in FSDP's groups
    assert all("LaneError" in text or "gloo" in text.lower() for text in texts), texts


# ------------------------------------------------------------------------------------------- a step is dropped


def overflow(rank: int, world_size: int, scaled: bool) -> dict[str, Any]:
    """An inf in a row that the first shard owns."""
    model = sharded(hsdp_mesh())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    with attached(model, Compressed(Quantize(4, 64)), scaler=scaler) as state:
        if scaled:
            with pytest.raises(ConfigurationError, match="must be known when"):
                state.scaler = None
        states = []
        for step in range(3):
            model.zero_grad()
            own = gradients(rank, step)
            if step == 2 and rank == 2:
                own["first.weight"][0] = float("inf")
            loss = model(own)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.step(optimizer)
                scaler.update()
            states.append(state.state_dict())
        changed = {
            key
            for role, pieces in states[2]["residuals"].items()
            for key, values in pieces.items()
            if not torch.equal(values, states[1]["residuals"][role][key])
        }
        return {
            "same": same_residuals(states[1], states[2]),
            "changed": {key.partition("[")[0] for key in changed},
            "dropped": state.stats()["dropped_commits"],
            "scale": None if scaler is None else scaler.get_scale(),
        }


def test_a_step_that_a_scaler_drops_changes_no_residual_of_any_shard() -> None:
    for result in run(overflow, 4, True, nodes=NODES):
        assert result["same"]
        assert result["dropped"] == 1
        assert result["scale"] == 512.0


def test_without_a_scaler_each_buffer_is_dropped_by_itself() -> None:
    results = run(overflow, 4, False, nodes=NODES)
    assert [result["dropped"] for result in results] == [1, 0, 1, 0]
    assert "first.weight" not in results[0]["changed"]
    assert "second.weight" in results[0]["changed"]
    assert "first.weight" in results[1]["changed"]


# ------------------------------------------------------------------------------------------- what is told


def reports(rank: int, world_size: int) -> tuple[str, str, dict[str, Any]]:
    net = Made()()
    with attached(net, "hierarchical_quantized", bits=8, record=True) as state:
        for step in range(3):
            net(batch(step)).square().mean().backward()
        return str(state.report()), state.explain(), state.stats()


def test_a_sharded_model_is_reported_on() -> None:
    report, explained, stats = run(reports, 4, nodes=NODES)[0]
    assert "step" in report
    assert "averaged over ranks 0, 2" in explained
    assert stats["cluster"] == "2 nodes x 2 rank(s)"
    assert stats["residual_bytes"] > 0


# ------------------------------------------------------------------------------ back to FSDP, and again


def leave_and_come_back(rank: int, world_size: int, one_dimension: bool) -> tuple[bool, int, str]:
    """Train attached, by FSDP alone beside a model that was never attached, and attached again."""
    made = Made(mesh=over_all_ranks() if one_dimension else None)
    net, stock = made(), made()
    options: dict[str, Any] = {"weights": commopt.Weights(Quantize(8))} if one_dimension else {}
    with attached(net, "hierarchical_quantized", **options) as state:
        plain_steps(net, 2)
    said = message_of(state.gathered_state_dict)
    for ours, theirs in zip(net.parameters(), stock.parameters(), strict=True):
        cast(DTensor, theirs).to_local().detach().copy_(cast(DTensor, ours).to_local().detach())
    for each in (net, stock):
        plain_steps(each, 1, first=2)
    alike = same(local(net), local(stock))
    with attached(net, "hierarchical_quantized", **options) as again:
        plain_steps(net, 2, first=3)
    return alike, again.stats()["steps"], said


@pytest.mark.parametrize("one_dimension", [False, True], ids=["HSDP", "1-D"])
def test_a_closed_model_is_fsdps_own_again_and_can_be_attached_again(one_dimension: bool) -> None:
    for alike, steps, said in run(leave_and_come_back, 4, one_dimension, nodes=NODES):
        assert alike
        assert steps == 2
        assert "was closed" in said
