# SPDX-License-Identifier: Apache-2.0
"""States that are asked for while training goes on: of one moment, whole, and without a trace in what training does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Compressed, ConfigurationError, LocalSGD, OneBit, Outer, Quantize
from tests.catalogue import LAYOUTS
from tests.feedback_training import STRATEGIES, Training, alike
from tests.gpu_training import ON_GPU, on_ranks
from tests.hook_training import BUCKETS_CAN_BE_GIVEN, SMALL_BUCKET, Tower, batch_of, loss_of, seeded
from tests.ranks import run
from tests.sharded_training import NODES, Made, Net, attached, batch, local, over_all_ranks, same

# What gathered_state_dict() returned on two nodes, with "inter rank 2" after TAKEN_AT steps, before this file was.
RECORDED = Path(__file__).parent / "recorded" / "state_of_format_1.pt"
STEPS = 8
TAKEN_AT = 4  # of the state that training goes on from; DDP has settled its buckets then

# ------------------------------------------------------------------------------------- DDP


def with_snapshots(rank: int, world_size: int, device: str, strategy: str) -> dict[str, Any]:
    """Train without snapshots, with one after each step, and from one of those on."""
    digests, after_each = [], list[Any]()
    for asks in (False, True):
        training, snapshots = Training(rank, world_size, STRATEGIES[strategy], device=device), []
        for step in range(STEPS):
            training.step()
            if asks:  # read at the end only, when later steps have been made
                snapshots.append(training.comm.async_state_dict())
                after_each.append(training.comm.state_dict())
            if step + 1 == TAKEN_AT:
                training.forget()
                model = {name: each.clone() for name, each in training.module.state_dict().items()}
        digests.append(training.digest())
    results = [snapshot.result() for snapshot in snapshots]
    resumed = Training(rank, world_size, STRATEGIES[strategy], device=device)
    resumed.module.load_state_dict(model)
    resumed.comm.load_state_dict(results[TAKEN_AT - 1])
    resumed.steps = TAKEN_AT
    while resumed.steps < STEPS:
        resumed.step()
    return {
        "as state_dict": [alike(one, other) for one, other in zip(results, after_each, strict=True)],
        "all different": len({repr(each["residuals"]) for each in results}) == STEPS,
        "in host memory": all(values.device.type == "cpu" for values in tensors_of(results)),
        "digests": [*digests, resumed.digest()],
    }


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    children = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("device", "strategy", "layout"),
    [
        ("cpu", "8 bits", "2"),
        ("cpu", "inter 2 bits", "2x2"),
        ("cpu", "inter rank 2", "2x2"),
        ("cpu", "top 5%", "2"),
        ("cpu", "inter adam", "2x2"),
        pytest.param("cuda", "8 bits", "2", marks=ON_GPU),
        pytest.param("cuda", "inter adam", "2x2", marks=ON_GPU),
    ],
)
def test_snapshots_of_ddp(device: str, strategy: str, layout: str) -> None:
    world_size, nodes = LAYOUTS[layout]
    for found in on_ranks(device, with_snapshots, world_size, strategy, nodes=nodes):
        assert all(found["as state_dict"])
        assert found["all different"]
        assert found["in host memory"]
        alike_until = None if BUCKETS_CAN_BE_GIVEN else -1  # else the first step after it has buckets of its own
        assert len(set(found["digests"][:alike_until])) == 1


def of_auto(rank: int, world_size: int) -> list[bool]:
    """Ask after every step while strategies are tried."""
    module = seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    comm = commopt.attach(ddp, "auto", timeout=60)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    kept = []
    for step in range(40):
        optimizer.zero_grad()
        loss_of(ddp, batch_of(rank, step)).backward()
        kept.append((comm.async_state_dict(), comm.state_dict()))
        optimizer.step()
    return [alike(snapshot.result(), state) for snapshot, state in kept]


def test_snapshots_of_auto() -> None:
    for found in run(of_auto, 2, nodes=(1, 1)):
        assert len(found) == 40
        assert all(found)


# ------------------------------------------------------------------------------------- local SGD

ROUNDS = {
    "under way": LocalSGD(period=3, outer=Outer(0.7, 0.9), delay=2, merge=0.5),
    "compressed": LocalSGD(period=4, compressor=Quantize(bits=8), outer=Outer(0.7, 0.9), delay=1),
    "one bit": LocalSGD(period=3, compressor=OneBit(), decay=0.9),
}


def of_local_sgd(rank: int, world_size: int, rounds: str, taken_at: int) -> dict[str, Any]:
    def train(
        module: nn.Module, comm: Any, optimizer: Any, first: int, last: int, ask: Callable[[int], None] = lambda _: None
    ) -> list[torch.Tensor]:
        for step in range(first, last):
            optimizer.zero_grad()
            loss_of(ddps[id(module)], batch_of(rank, step)).backward()
            optimizer.step()
            ask(step + 1)
        comm.average_parameters()
        return [each.detach().clone() for each in module.parameters()]

    ddps: dict[int, TorchDDP] = {}

    def make() -> tuple[nn.Module, Any, Any]:
        module = seeded(Tower)
        ddps[id(module)] = ddp = TorchDDP(module, **SMALL_BUCKET)
        return module, commopt.attach(ddp, ROUNDS[rounds], timeout=60), torch.optim.SGD(module.parameters(), 0.01)

    plain, observed, resumed = make(), make(), make()
    taken: list[Any] = []

    def ask(step: int) -> None:
        model = {name: each.clone() for name, each in observed[0].state_dict().items()}
        taken.append((observed[1].async_state_dict(), observed[1].state_dict(), model))

    ends = [train(*plain, 0, STEPS), train(*observed, 0, STEPS, ask)]
    snapshot, _, model = taken[taken_at - 1]
    resumed[0].load_state_dict(model)
    resumed[1].load_state_dict(snapshot.result())
    ends.append(train(*resumed, taken_at, STEPS))
    return {
        "as state_dict": [alike(one.result(), other) for one, other, _ in taken],
        "under way": bool(snapshot.result()["rounds"]["underway"]),
        "equal": [same(ends[0], other) for other in ends[1:]],
    }


@pytest.mark.parametrize(
    ("rounds", "taken_at", "under_way"), [("under way", 4, True), ("compressed", 5, False), ("one bit", 4, False)]
)
def test_snapshots_of_local_sgd(rounds: str, taken_at: int, under_way: bool) -> None:
    for found in run(of_local_sgd, 2, rounds, taken_at, nodes=(1, 1)):
        assert all(found["as state_dict"])
        assert found["under way"] or not under_way
        assert found["equal"] == [True, True]


# ------------------------------------------------------------------------------------- FSDP2, and files of torch

SHARDED: dict[str, dict[str, Any]] = {
    "hsdp": {"choice": Compressed(Quantize(2, 64))},
    "over all ranks": {"choice": "hierarchical_quantized:bits=4"},
    "weights": {
        "choice": "hierarchical_quantized:bits=4",
        "weights": commopt.Weights(Quantize(bits=8), difference=True),
    },
}


def of_fsdp(rank: int, world_size: int, device: str, name: str, folder: str) -> dict[str, Any]:
    with torch.device(device):
        return _of_fsdp(name, folder)


def _of_fsdp(name: str, folder: str) -> dict[str, Any]:
    given = dict(SHARDED[name])
    choice, mesh = given.pop("choice"), None if name == "hsdp" else over_all_ranks()
    ends, found, kept = [], dict[str, Any](), list[Any]()
    writing: Any = None
    group = dist.new_group(backend="gloo")  # FSDP gathers over the other, in this thread
    for mode in ("plain", "observed", "resumed"):
        net = Made(mesh=mesh)()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        with attached(net, choice, **given) as comm:
            if mode == "resumed":
                assert writing is not None
                writing.result()
                model, state = get_state_dict(net, optimizer)
                saved: dict[str, Any] = {"model": model, "optimizer": state, "comm": commopt.Checkpointed(comm)}
                dcp.load(saved, checkpoint_id=folder)
                set_state_dict(net, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
            for step in range(TAKEN_AT if mode == "resumed" else 0, STEPS):
                one_step(net, optimizer, step)
                if mode == "observed":
                    kept.append((comm.async_state_dict(), comm.state_dict()))
                if mode == "observed" and step + 1 == TAKEN_AT:
                    model, state = get_state_dict(net, optimizer)
                    saved = {"model": model, "optimizer": state, "comm": commopt.Checkpointed(comm)}
                    writing = dcp.async_save(saved, checkpoint_id=folder, process_group=group)
            ends.append([each.cpu() for each in local(net)])
    found["as state_dict"] = [alike(one.result(), other) for one, other in kept]
    found["equal"] = [same(ends[0], other) for other in ends[1:]]
    return found


def one_step(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    net(batch(step, width=net.width).to(next(net.parameters()).device), side=True).square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("device", "name"), [*(("cpu", name) for name in SHARDED), pytest.param("cuda", "hsdp", marks=ON_GPU)]
)
def test_snapshots_of_fsdp_and_async_save(tmp_path: Path, device: str, name: str) -> None:
    for found in on_ranks(device, of_fsdp, 4, name, str(tmp_path), nodes=NODES):
        assert all(found["as state_dict"])
        assert found["equal"] == [True, True]


def save_beside_training(rank: int, world_size: int, folder: str, stages: bool) -> list[str]:
    """Let torch write the checkpoint of a moment while later steps are made."""
    training, options = Training(rank, world_size, STRATEGIES["4 bits"]), dict[str, Any]()
    options["process_group"] = dist.new_group(backend="gloo")
    if stages:
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        options["async_stager"] = BlockingAsyncStager(cache_staged_state_dict=False)
    for _ in range(TAKEN_AT):
        training.step()
    training.forget()
    saved = {"model": training.module.state_dict(), "comm": commopt.Checkpointed(training.comm)}
    writing: Any = dcp.async_save(saved, checkpoint_id=folder, **options)
    while training.steps < STEPS:
        training.step()
    writing.result()
    resumed = Training(rank, world_size, STRATEGIES["4 bits"])
    dcp.load({"model": resumed.module.state_dict(), "comm": commopt.Checkpointed(resumed.comm)}, checkpoint_id=folder)
    resumed.steps = TAKEN_AT
    while resumed.steps < STEPS:
        resumed.step()
    return [training.digest(), resumed.digest()]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("stages", [False, True])
def test_async_save_of_ddp(tmp_path: Path, stages: bool) -> None:
    for one, other in run(save_beside_training, 2, str(tmp_path), stages):
        assert one == other


# ------------------------------------------------------------------------------------- in the middle of a step


def in_backward(rank: int, world_size: int, sharded: bool) -> dict[str, Any]:
    """Ask in the hook of a parameter whose gradient comes after the first message has left."""
    made: Any = None
    if sharded:
        made = Made()()
        comm, parameter = commopt.attach(made, Compressed(Quantize(4, 64)), timeout=30), made.layers[0][0].weight
        optimizer = torch.optim.SGD(made.parameters(), 0.01)
    else:
        training = Training(rank, world_size, STRATEGIES["4 bits"])
        comm, parameter = training.comm, training.module.get_parameter("second.weight")
    messages: list[str] = []

    def ask(_: Any) -> None:
        for name in ("state_dict", "async_state_dict", "gathered_state_dict"):
            try:
                getattr(comm, name)()
            except ConfigurationError as error:
                messages.append(str(error))

    for step in range(4):
        handle = parameter.register_post_accumulate_grad_hook(ask) if step == 2 else None
        if sharded:
            one_step(made, optimizer, step)
        else:
            training.step()
        if handle is not None:
            handle.remove()
    return {"messages": messages, "steps": comm.state_dict()["steps"]}


@pytest.mark.parametrize("sharded", [False, True])
def test_in_a_step_it_is_refused_on_every_rank(sharded: bool) -> None:
    world_size, nodes = (4, NODES) if sharded else (2, None)
    for found in run(in_backward, world_size, sharded, nodes=nodes):
        assert len(found["messages"]) == 3
        for name, message in zip(("state_dict", "async_", "gathered_"), found["messages"], strict=True):
            assert message.startswith(name)
            assert "while a backward was under way" in message
            assert "call it between two steps" in message
        assert found["steps"] == 4


def from_another_thread(rank: int, world_size: int) -> dict[str, Any]:
    """Ask all the time, in a thread of its own, and compare what comes with the states between steps."""
    training = Training(rank, world_size, STRATEGIES["4 bits"])
    training.step()
    found, refused, ended = list[Any](), list[str](), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                found.append(training.comm.state_dict())
            except ConfigurationError as error:
                refused.append(str(error))

    thread = threading.Thread(target=ask)
    known = {1: training.comm.state_dict()}
    thread.start()
    for _ in range(30):
        training.step()
        state = training.comm.state_dict()
        known[state["steps"]] = state
    ended.set()
    thread.join()
    return {
        "whole": [alike(each["residuals"], known[each["steps"]]["residuals"]) for each in found],
        "refused": len(refused),
    }


def test_another_thread_gets_whole_states_or_an_error() -> None:
    for found in run(from_another_thread, 2):
        assert found["whole"]
        assert all(found["whole"])
        assert found["refused"]


def after_a_step_that_raised(rank: int, world_size: int) -> list[Any]:
    training = Training(rank, world_size, STRATEGIES["4 bits"])
    for _ in range(3):
        training.step()
    good = training.comm.state_dict()

    def fail(_: Any) -> None:
        raise ValueError("out of something")

    handle = training.module.get_parameter("second.weight").register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="out of something"):
        training.step()
    handle.remove()
    with pytest.raises(ConfigurationError, match="or after one that raised"):
        training.comm.state_dict()
    training.comm.load_state_dict(good)
    return [alike(training.comm.state_dict()["residuals"], good["residuals"])]


def test_after_a_step_that_raised_it_is_refused_until_a_checkpoint_is_loaded() -> None:
    assert run(after_a_step_that_raised, 2) == [[True], [True]]


# ------------------------------------------------------------------------------------- formats


def read_recorded(rank: int, world_size: int, change: str) -> Any:
    saved = torch.load(RECORDED, weights_only=True)
    training = Training(rank, world_size, STRATEGIES["inter rank 2"])
    for part in saved["ranks"]:
        for name in change.split():
            if name in ("members", "sharding", "adam_steps", "expected_square", "dropped"):
                del part[name]  # as the first states of this format had them not
    if change == "newer":
        saved["format"] = 2
    if change == "newer part":
        saved["ranks"][0]["format"] = 7
    try:
        training.comm.load_state_dict(saved)
    except ConfigurationError as error:
        return str(error)
    state = training.comm.state_dict()
    mine = saved["ranks"][rank]
    training.step()
    return [alike(state[name], mine[name]) for name in ("steps", "residuals", "factors")]


@pytest.mark.parametrize("change", ["", "members sharding adam_steps expected_square dropped"])
def test_recorded_states_of_this_format_are_read(change: str) -> None:
    assert run(read_recorded, 2, change, nodes=(1, 1)) == [[True] * 3] * 2


@pytest.mark.parametrize(("change", "number"), [("newer", 2), ("newer part", 7)])
def test_a_newer_format_is_refused_on_every_rank(change: str, number: int) -> None:
    first, second = run(read_recorded, 2, change, nodes=(1, 1))
    assert first == second
    assert f"of format {number}, which a newer commopt has written" in first
