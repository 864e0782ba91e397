# SPDX-License-Identifier: Apache-2.0
"""Mistakes end in an error on every rank that names the value, the rule and the fix; nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import (
    DGC,
    Cast,
    Communicator,
    Compressed,
    ConfigurationError,
    Flat,
    Hierarchical,
    HookState,
    MismatchError,
    PowerSGD,
    UnsupportedTensorError,
)
from commopt.attached.replay import replay_wanted
from commopt.doctor.verdict.facts import Measurements
from commopt.document import write_whole
from commopt.groups.membership import checking
from commopt.kernels.loader import kernels_wanted
from commopt.patches import Reader, Writer
from commopt.schedule import Tuned
from commopt.server.scheduler import host_and_port
from commopt.simulate.workload import load as load_workload
from tests.ranks import run
from tests.speed import limit
from topology.cluster import read_host_identity

WORLD = 4


@dataclass(frozen=True)
class Raised:
    """What one rank saw."""

    kind: type
    message: str
    seconds: float


def outcome(call: Callable[[], object]) -> Raised:
    """Return the error that `call` raises; DDP may pass a hook's error on as a bare RuntimeError."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        return Raised(type(error), str(error), time.monotonic() - started)
    return Raised(type(None), "was accepted", time.monotonic() - started)


def assert_works() -> None:
    """A call refused on all ranks leaves everything usable."""
    assert commopt.all_reduce(torch.ones(3), op="sum").tolist() == [dist.get_world_size()] * 3


def assert_raised(results: list[Raised], kind: type[BaseException], *parts: str, within_s: float = 5.0) -> None:
    for rank, raised in enumerate(results):
        assert issubclass(raised.kind, kind), f"rank {rank}: {raised}"
        assert raised.seconds < limit(within_s), f"rank {rank}: {raised}"
        for part in parts:
            assert part in raised.message, f"rank {rank} does not say {part!r}: {raised.message}"


def linear_ddp(kind: type[TorchDDP] = TorchDDP) -> TorchDDP:
    return kind(nn.Linear(4, 4))


class Unshared:
    """An array of DLPack that is not given away."""

    def __dlpack__(self, **options: object) -> object:
        raise BufferError("memory of another process")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


# ------------------------------------------------------------------------------ refused at once, on every rank

Calls = dict[str, tuple[Callable[[], object], tuple[str, ...]]]
# name: (call, what the message of its ConfigurationError must contain)
MISUSED: Calls = {
    "unknown preset": (lambda: commopt.attach(linear_ddp(), "hierarchicl"), ("'hierarchicl'", *commopt.PRESETS)),
    "option for an aggregator": (
        lambda: commopt.attach(linear_ddp(), Flat(), matrix_rank=4),
        ("Flat()", "matrix_rank"),
    ),
    "ranks_per_node does not divide": (lambda: HookState(ranks_per_node=3), ("3", "4", "ranks_per_node")),
    "ranks_per_node too large": (lambda: Communicator(ranks_per_node=8), ("8", "ranks_per_node")),
    "ddp as state": (lambda: HookState(linear_ddp()), ("aggregator", "attach")),  # type: ignore[arg-type]
    "ddp as process group": (
        lambda: HookState(process_group=linear_ddp()),
        ("DistributedDataParallel", "ProcessGroup"),
    ),
    "attach to a bare module": (
        lambda: commopt.attach(nn.Linear(4, 4), "flat"),
        ("Linear", "DistributedDataParallel"),
    ),
    "attach's arguments swapped": (
        lambda: commopt.attach("flat", linear_ddp()),  # type: ignore[call-overload]
        ("str", "DistributedDataParallel"),
    ),
    "attach a number": (
        lambda: commopt.attach(linear_ddp(), 8),  # type: ignore[call-overload]
        ("8", "preset"),
    ),
    "preset name as state's aggregator": (
        lambda: HookState("hierarchical"),  # type: ignore[arg-type]
        ("'hierarchical'", "attach"),
    ),
    "state without a hook": (
        lambda: linear_ddp(commopt.DistributedDataParallel).register_comm_hook(HookState()),  # type: ignore[call-arg]
        ("hook", "commopt.hierarchical"),
    ),
    "scaler that is none": (lambda: HookState(scaler=1024.0), ("float", "GradScaler")),
    "module that is none": (lambda: HookState(module="gpt"), ("str", "Module")),  # type: ignore[arg-type]
    "negative timeout": (lambda: HookState(timeout=-1), ("timeout", "-1")),
    "op max": (lambda: commopt.all_reduce(torch.ones(2), op="max"), ("'max'", "'avg'", "'sum'")),  # type: ignore[arg-type]
    "aggregator by name": (
        lambda: commopt.all_reduce(torch.ones(2), aggregator="flat"),  # type: ignore[arg-type]
        ("'flat'", "commopt.Flat()"),
    ),
    "src out of range": (lambda: Communicator().broadcast(torch.ones(1), src=4), ("4", "0 to 3")),
    "src a fraction": (lambda: Communicator().broadcast(torch.ones(1), src=0.5), ("0.5", "0 to 3")),  # type: ignore[arg-type]
    "src text": (lambda: Communicator().broadcast(torch.ones(1), src="0"), ("'0'", "0 to 3")),  # type: ignore[arg-type]
    "no src": (lambda: Communicator().broadcast(torch.ones(1), src=None), ("None", "0 to 3")),  # type: ignore[arg-type]
    "src True": (lambda: Communicator().broadcast(torch.ones(1), src=True), ("True", "0 to 3")),
    "ops": (lambda: commopt.all_reduce(torch.ones(2), op=np.array(["avg", "sum"])), ("'avg', 'sum'", "use")),  # type: ignore[arg-type]
    "wire_bytes of a fraction": (lambda: Communicator().wire_bytes(0.5, torch.float32), ("0.5", "whole")),  # type: ignore[arg-type]
    "wire_bytes of fewer than none": (lambda: Communicator().wire_bytes(-1, torch.float32), ("-1", "whole")),
    "wire_bytes of a name": (lambda: Communicator().wire_bytes(4, "float32"), ("'float32'", "torch.dtype")),  # type: ignore[arg-type]
    "reduce_scatter shapes": (lambda: Communicator().reduce_scatter(torch.ones(3), torch.ones(13)), ("13", "3", "12")),
    "all_gather shapes": (lambda: Communicator().all_gather(torch.ones(7), torch.ones(2)), ("7", "2", "8")),
    "all_to_all shapes": (lambda: Communicator().all_to_all(torch.ones(6), torch.ones(6)), ("6", "world_size=4")),
}
# The same with an UnsupportedTensorError.
UNSUPPORTED: Calls = {
    "integer average": (lambda: commopt.all_reduce(torch.ones(2, dtype=torch.int64)), ("avg", "int64", "sum")),
    "integer through a lossy aggregator": (
        lambda: commopt.all_reduce(torch.ones(2, dtype=torch.int64), op="sum", aggregator=Compressed(Cast())),
        ("int64", "Flat()"),
    ),
    "complex tensor": (lambda: commopt.all_reduce(torch.ones(2, dtype=torch.complex64)), ("complex64", "view_as_real")),
    "complex parameter": (
        lambda: commopt.attach(TorchDDP(nn.Linear(2, 2, dtype=torch.complex64)), "flat"),
        ("'weight'", "complex64", "view_as_complex"),
    ),
    "sparse tensor": (lambda: commopt.all_reduce(torch.eye(3).to_sparse()), ("sparse", "to_dense")),
    "sparse gradients": (
        lambda: commopt.attach(TorchDDP(nn.Sequential(nn.Embedding(8, 2, sparse=True))), "flat"),
        ("'0.weight'", "sparse=False"),
    ),
    "bool tensor": (lambda: commopt.all_reduce(torch.ones(2, dtype=torch.bool), op="sum"), ("bool", "int32")),
    "quantized tensor": (
        lambda: Communicator().broadcast(torch._empty_affine_quantized((3,), scale=1.0, dtype=torch.quint8)),
        ("quint8", "dequantize"),
    ),
    "nested tensor": (
        lambda: Communicator().broadcast(torch.nested.nested_tensor([torch.ones(2)])),
        ("nested", "to_padded_tensor"),
    ),
    "what torch cannot share": (lambda: commopt.all_reduce(Unshared()), ("Unshared", "of another process")),
    "list": (lambda: commopt.all_reduce([1.0, 2.0]), ("list", "torch", "NumPy")),
    "strings": (lambda: commopt.all_reduce(np.array(["a"])), ("NumPy",)),
}
CALLS: dict[str, tuple[Callable[[], object], type[Exception], tuple[str, ...]]]
CALLS = {name: (call, ConfigurationError, parts) for name, (call, parts) in MISUSED.items()}
CALLS |= {name: (call, UnsupportedTensorError, parts) for name, (call, parts) in UNSUPPORTED.items()}


def make_calls(rank: int, world_size: int) -> dict[str, Raised]:
    """Make every call of CALLS; communication must work after each."""
    results = {}
    for name, (call, *_) in CALLS.items():
        results[name] = outcome(call)
        assert_works()
    return results


@pytest.fixture(scope="module")
def refused() -> list[dict[str, Raised]]:
    return run(make_calls, WORLD)


@pytest.mark.parametrize("name", CALLS)
def test_refused(name: str, refused: list[dict[str, Raised]]) -> None:
    _, kind, parts = CALLS[name]
    assert_raised([mine[name] for mine in refused], kind, *parts)


# ------------------------------------------------------------------------------ no process group needed


CONFIGURATIONS: tuple[Callable[..., object], ...] = (
    *(commopt.Adam, commopt.Auto, Cast, partial(Compressed, compressor=Cast()), DGC, commopt.Feedback, Hierarchical),
    *(commopt.LocalSGD, commopt.OneBit, commopt.Outer, commopt.ParameterServer, PowerSGD, commopt.Quantize),
    commopt.Weights,
)
NO_VALUES: tuple[object, ...] = ("false", "x", [[1]], object())


@pytest.mark.parametrize("make", CONFIGURATIONS)
def test_a_value_of_another_type_is_refused_in_every_field(make: Callable[..., Any]) -> None:
    """So nowhere does a command line's "false" count as true."""
    for field in fields(make()):
        for wrong in NO_VALUES:
            if field.name == "address" and isinstance(wrong, str):
                continue
            refused = outcome(partial(make, **{field.name: wrong}))
            assert refused.kind is ConfigurationError, f"{field.name}={wrong!r}: {refused}"


@pytest.mark.parametrize("make", [commopt.Gathered, commopt.Checkpointed])
def test_a_checkpoint_of_something_else_is_refused_before_training(make: Callable[[object], object]) -> None:
    with pytest.raises(ConfigurationError, match=rf"{make.__name__}\(Linear\) needs the state that commopt.attach"):
        make(nn.Linear(1, 1))


@pytest.mark.parametrize("text", [3, None, ["flat"]])
def test_a_preset_is_named_by_text(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no text; pass for example build_preset"):
        commopt.build_preset(text)


@pytest.mark.parametrize("value", [3, 2.5, b"x", ["x"], None], ids=str)
def test_a_path_or_a_text_of_another_type_is_named(value: Any) -> None:
    calls: tuple[Callable[[Any], object], ...] = (
        *(commopt.Links.load, Tuned.load, Measurements.load, load_workload, commopt.load_checkpoint),
        *(partial(commopt.save_checkpoint, {}), partial(write_whole, content=b""), Writer, Reader),
        *(commopt.Plan.from_json, Tuned.from_json, partial(commopt.Links.read, name="x"), commopt.Preset),
    )
    for call in calls:
        refused = outcome(partial(call, value))
        assert refused.kind is ConfigurationError, f"{call}: {refused}"
        assert isinstance(value, bytes) or str(value) in refused.message or type(value).__name__ in refused.message


@pytest.mark.parametrize(
    ("read", "variable"),
    [(checking, "COMMOPT_CHECK"), (replay_wanted, "COMMOPT_REPLAY"), (kernels_wanted, "COMMOPT_KERNELS")],
)
def test_an_unknown_value_of_a_variable_is_refused(
    read: Callable[[], object], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("false", "yes", "2", " "):
        monkeypatch.setenv(variable, value)
        with pytest.raises(ConfigurationError, match=variable):
            read()
    monkeypatch.setenv(variable, "")
    read()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: Hierarchical(form="ring"), ("'ring'", "reduce_scatter", "leader")),  # type: ignore[arg-type]
        (lambda: Hierarchical(inter=Cast()), ("Cast", "Compressed(Cast(")),  # type: ignore[arg-type]
        (lambda: Compressed("bf16"), ("'bf16'", "Cast(")),  # type: ignore[arg-type]
        (lambda: Cast(torch.float32), ("float32", "bfloat16", "float16")),
        (lambda: DGC(2), ("density", "2", "1")),
        (lambda: Hierarchical(inter=DGC()), ("DGC", "Compressed(Cast(")),  # type: ignore[arg-type]
        (lambda: Compressed(PowerSGD()), ("PowerSGD", "Compressor")),  # type: ignore[arg-type]
        (lambda: PowerSGD(0), ("matrix_rank", "0")),
        (lambda: commopt.all_reduce(torch.ones(1)), ("init_process_group",)),
        (lambda: HookState().cluster, ("init_process_group",)),
        (lambda: HookState(process_group=3), ("init_process_group",)),
        (lambda: Communicator(), ("init_process_group",)),
        (lambda: commopt.powersgd(timeout=4), ("timeout=4", "commopt.attach(ddp, commopt.powersgd, timeout=4)")),
        (lambda: commopt.powersgd(8), ("commopt.powersgd got 8", "by name", "matrix_rank")),  # type: ignore[call-overload]
    ],
)
def test_refused_without_a_group(make: Callable[[], object], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as info:
        make()
    for part in parts:
        assert part in str(info.value)


def test_a_superscript_is_no_number() -> None:
    """Though `"\u00b2".isdigit()`."""
    assert read_host_identity({"LOCAL_RANK": "\u00b2"}).local_rank is None
    with pytest.raises(ConfigurationError, match="is not host:port"):
        host_and_port("node0:\u00b2")


# ------------------------------------------------------------------------------ environment


def make_communicator(rank: int, world_size: int) -> Raised:
    return outcome(Communicator)


@pytest.mark.parametrize("value", ["3", "zwei", "0", "\u00b2", "9" * 5000])
def test_bad_ranks_per_node_in_the_environment(value: str) -> None:
    results = run(make_communicator, WORLD, env={"COMMOPT_RANKS_PER_NODE": value})
    assert_raised(results, ConfigurationError, value)


# ------------------------------------------------------------------------------ hooks


def register_twice(rank: int, world_size: int) -> dict[str, Raised]:
    one = linear_ddp(commopt.DistributedDataParallel)
    one.register_comm_hook(commopt.flat)  # type: ignore[call-arg]
    two = linear_ddp()
    commopt.attach(two, "hierarchical")
    results = {
        "preset twice": outcome(lambda: one.register_comm_hook(commopt.hierarchical)),  # type: ignore[call-arg]
        "two arguments": outcome(lambda: one.register_comm_hook(HookState(), commopt.hierarchical)),
        "attach after register": outcome(lambda: commopt.attach(one, "flat")),
        "attach twice": outcome(lambda: commopt.attach(two, "flat")),
    }
    two(torch.ones(1, 4)).sum().backward()  # the first registration stands
    assert_works()
    return results


def test_a_second_hook_is_refused() -> None:
    results = run(register_twice, 2)
    for name in results[0]:
        assert_raised([mine[name] for mine in results], ConfigurationError, "already", "new DistributedDataParallel")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.table(x.long().clamp(0, 7))
        return y


def fail_in_backward(rank: int, world_size: int) -> dict[str, Raised]:
    """Registered without `module`, so the gradients themselves are what shows the mistake."""
    models: dict[str, tuple[nn.Module, object, torch.Tensor]] = {
        "no state": (nn.Linear(4, 4), None, torch.ones(1, 4)),
        "foreign state": (nn.Linear(4, 4), {"a": 1}, torch.ones(1, 4)),
        "sparse": (Sparse(), HookState(), torch.ones(3)),
    }
    results = {}
    for name, (module, state, x) in models.items():
        ddp = TorchDDP(module)
        ddp.register_comm_hook(state, commopt.hierarchical)
        results[name] = outcome(ddp(x).abs().sum().backward)
        assert_works()
    return results


def test_mistakes_that_only_backward_shows() -> None:
    results = run(fail_in_backward, 2)
    expected = {
        "no state": ("None", "ddp.register_comm_hook(commopt.HookState(), commopt.hierarchical)"),
        "foreign state": ("HookState", "commopt.hierarchical"),
        "sparse": ("sparse", "sparse=False"),
    }
    for name, parts in expected.items():
        assert_raised([mine[name] for mine in results], Exception, *parts)


# ------------------------------------------------------------------------------ groups


def stand_outside(rank: int, world_size: int) -> list[Raised]:
    group = dist.new_group([0, 1])
    if rank < 2:
        assert commopt.all_reduce(torch.ones(1), op="sum", group=group).item() == 2
        HookState(process_group=group)
        return []
    results = [
        outcome(lambda: Communicator(group)),
        outcome(lambda: commopt.all_reduce(torch.ones(1), group=group)),
        outcome(lambda: HookState(process_group=group)),
    ]
    dist.barrier(dist.new_group([2, 3], use_local_synchronization=True))
    return results


def test_a_group_without_this_rank() -> None:
    for rank, results in enumerate(run(stand_outside, 4)):
        assert_raised(results, ConfigurationError, f"rank {rank}", "not a member")
        assert len(results) == (3 if rank > 1 else 0)


def use_after_destroy(rank: int, world_size: int, folder: str) -> list[Raised]:
    comm, ddp, one_of_two = Communicator(), linear_ddp(), dist.new_group([0, 1])
    state = commopt.attach(ddp, "hierarchical")
    ddp(torch.ones(1, 4)).sum().backward()
    sub = Communicator(one_of_two)
    sub.all_reduce(torch.ones(1))
    dist.destroy_process_group(one_of_two)
    results = [outcome(lambda: sub.all_reduce(torch.ones(1))), outcome(lambda: Communicator(one_of_two))]
    comm.all_reduce(torch.ones(1))  # the world lives on
    dist.destroy_process_group()
    results += [
        outcome(lambda: comm.all_reduce(torch.ones(1))),
        outcome(lambda: comm.broadcast(torch.ones(1), async_op=True)),
        outcome(lambda: commopt.all_reduce(torch.ones(1))),
        outcome(lambda: ddp(torch.ones(1, 4)).sum().backward()),
    ]
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world_size)
    results.append(outcome(lambda: comm.all_reduce(torch.ones(1))))
    assert_works()
    assert state.stats()["buckets"] == 1
    return results


def test_a_process_group_destroyed_meanwhile(tmp_path: Any) -> None:
    for results in run(use_after_destroy, 2, str(tmp_path)):
        assert_raised([*results[:4], results[6]], ConfigurationError, "process group", "destroyed")
        assert_raised([results[4]], ConfigurationError, "init_process_group")
        assert_raised([results[5]], Exception, "destroyed")


# ------------------------------------------------------------------------------ ranks that disagree


# (field, on most ranks, on rank 2, what the message must contain)
DIFFERENCES: list[tuple[str, Any, Any, tuple[str, ...]]] = [
    ("aggregator", Hierarchical(), Flat(), ("Hierarchical(", "Flat()")),
    ("aggregator", Compressed(Cast(torch.bfloat16)), Compressed(Cast(torch.float16)), ("bfloat16", "float16")),
    ("aggregator", Compressed(DGC(0.1)), Compressed(DGC(0.1, min_elements=9)), ("min_elements=9",)),
    ("aggregator", PowerSGD(2), PowerSGD(2, start_step=9), ("PowerSGD(matrix_rank=2)", "start_step=9")),
    ("aggregator", Flat(), None, ("Flat()",)),
    ("ranks_per_node", 2, 4, ("2", "4")),
    ("timeout", 30, 40, ("30", "40")),
]


def hook_states_differ(rank: int, world_size: int) -> list[Raised]:
    results = []
    for field, usual, odd, _ in DIFFERENCES:
        options = {field: odd if rank == 2 else usual}
        results.append(outcome(partial(HookState, **options)))
        assert_works()
    return results


def test_another_configuration_on_one_rank() -> None:
    results = run(hook_states_differ, WORLD)
    for index, (field, _, _, parts) in enumerate(DIFFERENCES):
        assert_raised([mine[index] for mine in results], MismatchError, "rank 2", field, *parts)


def calls_differ(rank: int, world_size: int) -> list[Raised]:
    comm = Communicator()
    results = [outcome(lambda: comm.all_reduce(torch.ones(9), aggregator=Flat() if rank == 1 else Hierarchical()))]
    presets = [commopt.hierarchical, commopt.flat]

    def train() -> None:
        ddp = linear_ddp()
        ddp.register_comm_hook(HookState(), presets[rank == 1])
        ddp(torch.ones(1, 4)).sum().backward()

    results.append(outcome(train))
    return results


def test_another_aggregator_on_one_rank() -> None:
    results = run(calls_differ, 3, fresh=True)
    assert_raised([mine[0] for mine in results], MismatchError, "rank 1", "aggregator", "Flat()", "Hierarchical(")
    assert_raised([mine[1] for mine in results], Exception, "rank 1", "Flat()", "Hierarchical(")


def lengths_differ(rank: int, world_size: int, known: tuple[int, ...]) -> list[Raised]:
    """Rank 1 calls with length 8, the others with 4, after calls of some lengths were made on all ranks."""
    comm, mine = Communicator(), 8 if rank == 1 else 4
    for numel in known:
        comm.all_reduce(torch.ones(numel))
    results = [outcome(lambda: comm.all_reduce(torch.ones(mine)))]
    handles = [comm.broadcast(torch.ones(numel), async_op=True) for numel in (3, mine, 5)]
    results += [outcome(handle.wait) for handle in reversed(handles)]
    results.append(outcome(handles[1].get_future().wait))
    assert_works()
    return results


@pytest.mark.parametrize("known", [(4,), ()], ids=str)
def test_calls_of_another_length_on_one_rank(known: tuple[int, ...]) -> None:
    results = run(lengths_differ, 3, known, fresh=True)
    for number in (0, 2):
        assert_raised([mine[number] for mine in results], MismatchError, "rank 1", "shape", "(8,)", "(4,)")
    assert [mine[number].kind for mine in results for number in (1, 3)] == [type(None)] * 6
    assert_raised([mine[4] for mine in results], RuntimeError, "MismatchError", "rank 1", "shape")


def shapes_differ(rank: int, world_size: int) -> list[Raised]:
    """Rank 1 calls with another shape of as many elements."""
    comm, mine = Communicator(), torch.ones((3, 2) if rank == 1 else (2, 3))
    results = [
        outcome(lambda: comm.all_reduce(mine)),
        outcome(lambda: comm.broadcast(mine)),
        outcome(lambda: commopt.all_reduce(mine)),
    ]
    blocks = torch.empty((world_size * 2, 3) if rank == 1 else (world_size, 6))
    comm.all_gather(blocks, mine)  # of blocks only the number of elements counts
    comm.all_to_all(blocks, blocks)
    comm.reduce_scatter(mine, blocks)
    return results


def test_calls_of_another_shape_on_one_rank() -> None:
    results = run(shapes_differ, 2)
    for number in range(3):
        assert_raised([mine[number] for mine in results], MismatchError, "rank 1", "shape", "(3, 2)", "(2, 3)")


def refuse_on_one_rank(rank: int, world_size: int) -> list[Raised]:
    """Rank 1 refuses its first call; its second is like the first of the others."""
    comm, results = Communicator(), []
    calls: list[Callable[..., object]] = [comm.all_reduce, comm.broadcast, commopt.all_reduce]
    for call in calls:
        if rank == 1:
            assert_raised([outcome(partial(call, [1.0]))], UnsupportedTensorError, "list")
        results.append(outcome(partial(call, torch.ones(4))))
        if rank != 1:
            outcome(partial(call, [1.0]))
    assert_works()
    return results


def test_a_call_that_one_rank_refused() -> None:
    for mine in run(refuse_on_one_rank, 2, fresh=True):
        assert_raised(mine, MismatchError, "rank 1", "about call", "Communicator", "operation")


# name: (option, its value on rank 1, what the message must contain there)
MISTAKES: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "timeout": ("timeout", "30", ("timeout '30'", "str", "seconds or a timedelta")),
    "timeout True": ("timeout", True, ("timeout True", "bool")),
    "ranks_per_node": ("ranks_per_node", "2", ("ranks_per_node '2'", "str", "whole number")),
}


def mistake_on_one_rank(rank: int, world_size: int) -> dict[str, Raised]:
    results = {}
    for number, kind in enumerate((Communicator, HookState, Communicator)):  # the last two once the groups exist
        for name, (option, value, _) in MISTAKES.items():
            options = {option: value} if rank == 1 else {}
            results[f"{name} {number}"] = outcome(partial(kind, **options))
        assert_works()
    return results


def test_an_argument_of_another_type_on_one_rank() -> None:
    results = run(mistake_on_one_rank, 2)
    for key in results[0]:
        parts = MISTAKES[key.rpartition(" ")[0]][2]
        assert_raised([results[1][key]], ConfigurationError, *parts)
        assert_raised([results[0][key]], ConfigurationError, "rank 1 cannot take part in", *parts)


def sharded_linear(*shape: int) -> nn.Module:
    names = ("replicate", "shard")[-len(shape) :]
    return cast("nn.Module", fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names)))


def attach_with_a_mistake_on_one_rank(rank: int, world_size: int) -> dict[str, Raised]:
    """Rank 1 has another name, another option, or a hook already; the others are right."""
    models: dict[str, Callable[[], nn.Module]] = {
        "DDP": linear_ddp,
        "replicas": partial(sharded_linear, 2, 1),
        "shards": partial(sharded_linear, 2),
    }
    results = {}
    mistakes: list[tuple[Any, dict[str, Any]]] = [("quantised", {}), ("quantized", {"bit": 4}), (3, {})]
    for name, make in models.items():
        for choice, options in mistakes:
            mine, given = (choice, options) if rank == 1 else ("quantized", {})
            results[f"{name} {choice} {options}"] = outcome(partial(commopt.attach, make(), mine, **given))
    ddp = linear_ddp()
    if rank == 1:
        ddp.register_comm_hook(None, fp16_compress_hook)
    results["already"] = outcome(lambda: commopt.attach(ddp, "quantized"))
    commopt.attach(linear_ddp(), "quantized")
    assert_works()
    return results


def test_attach_with_a_mistake_on_one_rank() -> None:
    results = run(attach_with_a_mistake_on_one_rank, 2, fresh=True)  # meshes are remembered
    assert len(results[0]) == 10
    for key in results[0]:
        assert_raised([mine[key] for mine in results], ConfigurationError)
        assert_raised([results[0][key]], ConfigurationError, "rank 1 cannot take part in", results[1][key].message)


def ask_for_others_beside_groups(rank: int, world_size: int) -> dict[str, Raised]:
    """Rank 1 is alone with a mistake, or with groups that exist; the others ask for new ones."""
    commopt.all_reduce(torch.ones(3))
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "'8' is a str": ({"timeout": "8"}, {"timeout": 8}),
        "timeout in seconds: rank 1 has None": ({}, {"timeout": 8}),
        "ranks_per_node: rank 1 has None": ({}, {"ranks_per_node": 1}),
        "site: rank 1 has that of": ({}, {"site": "berlin"}),
        "timeout nan is not": ({"timeout": float("nan")}, {"timeout": float("nan")}),
    }
    return {words: outcome(partial(Communicator, **pair[rank != 1])) for words, pair in kinds.items()}


def test_ranks_that_ask_for_other_groups_than_exist_do_not_wait_for_each_other() -> None:
    results = run(ask_for_others_beside_groups, 3, timeout_s=30)
    for words in results[0]:
        assert_raised([mine[words] for mine in results], commopt.CommoptError, words)


def no_folder_for_temporary_files(rank: int, world_size: int) -> Raised:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COMMOPT_FLIGHT")
        patch.setattr("tempfile.tempdir", None)
        patch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nowhere"] if rank == 1 else ["/tmp"])
        return outcome(Communicator)


def test_a_full_disk_on_one_rank() -> None:
    results = run(no_folder_for_temporary_files, 2, timeout_s=30)
    assert_raised(results, ConfigurationError, "/nowhere", "COMMOPT_FLIGHT")


def wait_with_a_timedelta(rank: int, world_size: int) -> None:
    team = Communicator(timeout=timedelta(seconds=30))._membership
    assert team.timeout_s == 30
    assert Communicator(timeout=30)._membership is HookState(timeout=timedelta(seconds=30)).membership is team


def test_a_timeout_may_be_a_timedelta() -> None:
    run(wait_with_a_timedelta, 2)


def environments_differ(rank: int, world_size: int) -> Raised:
    import os

    if rank == 1:
        os.environ["COMMOPT_RANKS_PER_NODE"] = "1"
    return outcome(Communicator)


def test_another_environment_on_one_rank() -> None:
    assert_raised(run(environments_differ, 2, fresh=True), MismatchError, "rank 1", "COMMOPT_RANKS_PER_NODE", "1")


def one_never_arrives(rank: int, world_size: int) -> Raised | None:
    if rank == 2:
        time.sleep(4)
        return None
    return outcome(lambda: HookState(timeout=2))


def test_a_rank_that_never_arrives() -> None:
    results = run(one_never_arrives, 3, fresh=True)
    present = [raised for raised in results if raised is not None]
    assert len(present) == 2
    assert_raised(present, MismatchError, "rank 2", "2")
