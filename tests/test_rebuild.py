# SPDX-License-Identifier: Apache-2.0
"""Survivors of a killed rank go on in a new process group, with what they had not sent yet."""

from __future__ import annotations

import copy
import logging
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from commopt import Adam, Aggregator, BufferContext, Compressed, Flat, Hierarchical, LocalSGD, OneBit, Quantize
from commopt.aggregate import Action, Buffer
from commopt.errors import TransportError
from commopt.feedback import save
from tests.hook_training import BUCKETS_CAN_BE_GIVEN, SMALL_BUCKET, Tower, digest_of, seeded
from tests.ranks import run
from tests.sharded_training import local
from tests.speed import limit

WITHIN_S = limit(5.0)
FAILS_AT = 6  # steps, with checks of the replicas after 2 and 4
ROUND_ENDS_AT = 8  # of a LocalSGD
AFTER = 12  # more steps
WIDTH = 64


class Heard(logging.Handler):
    """Keeps what commopt warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("commopt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def batch_of(data: int, step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + data))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - torch.tanh(x)).square().mean()
    return loss


def held_out(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, batch_of(999, 0)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: int, first: int, last: int) -> None:
    """Train with the data of one of the first world's ranks."""
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, batch_of(data, step)).backward()
        optimizer.step()


def error_of_training(model: nn.Module, optimizer: torch.optim.Optimizer, data: int, first: int) -> str:
    """Train until a peer is gone."""
    try:
        train(model, optimizer, data, first, first + 100)
    except Exception as failure:
        return str(failure)
    return "no error"


def die_in_backward(module: nn.Module) -> None:
    """Let this process be killed in the next backward, when the gradients of later layers are on their way."""

    def watch(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))

    assert isinstance(module, Tower)
    module.layers[2].register_forward_hook(watch)


def init_anew(folder: str, rank: int, survivors: Sequence[int]) -> None:
    """Leave the world of the dead, and make one of the survivors."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/next", len(survivors))
    dist.init_process_group("gloo", store=store, rank=survivors.index(rank), world_size=len(survivors))


def kept(state: commopt.CommState) -> dict[str, Tensor]:
    """Return the sum of a rank's residuals by parameter, float64."""
    registration = state._registration  # a state_dict() in the middle of a step is refused
    sums: dict[str, Tensor] = {}
    for role, pieces in save(registration.store)["residuals"].items():
        if any(name in role for name in ("exp_avg", "anchor", "momentum")):
            continue
        for key, values in pieces.items():
            name, _, span = key.rpartition("[")
            begin, end = map(int, span[:-1].split(":"))
            numel = registration.numels[name]
            sums.setdefault(name, torch.zeros(numel, dtype=torch.float64))[begin:end] += values.double()
    return sums


def total(each: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for sums in each:
        for name, values in sums.items():
            found[name] = found.get(name, torch.zeros_like(values)) + values
    return found


@dataclass
class Survived:
    """What a survivor found.

    seconds: from its error to the end of its first step with the others.
    before, after: its residuals.
    steps: after which it went on.
    losses: at the failure and at the end.
    """

    error: str
    seconds: float
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    steps: int
    losses: tuple[float, float]
    digest: str
    heard: list[str]


def lose(rank: int, world_size: int, folder: str, victims: Sequence[int], choice: Any, options: Any) -> Survived:
    """Train, lose ranks in the middle of a backward, go on with the others."""
    heard, module = Heard(), seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state: commopt.CommState = commopt.attach(ddp, choice, check_every=2, **options)
    aggregator = state.aggregator
    assert aggregator is not None
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), 2.0, momentum=0.9)
    if aggregator.adam is not None:
        optimizer = state.optimizer(module.parameters(), 0.003)
    train(ddp, optimizer, rank, 0, FAILS_AT)
    if rank in victims:
        die_in_backward(module)
    error = error_of_training(ddp, optimizer, rank, FAILS_AT)
    begun = time.monotonic()
    before, loss = kept(state), held_out(module)
    survivors = [each for each in range(world_size) if each not in victims]
    init_anew(folder, rank, survivors)
    ddp = TorchDDP(module, init_sync=not isinstance(aggregator, LocalSGD), **SMALL_BUCKET)
    state = commopt.rebuild(state, ddp)
    steps, after = state.stats()["steps"], kept(state)
    train(ddp, optimizer, rank, steps, steps + 1)
    seconds = time.monotonic() - begun
    train(ddp, optimizer, rank, steps + 1, steps + AFTER)
    state.average_parameters()
    assert state.stats()["steps"] == steps + AFTER
    dist.barrier()
    return Survived(error, seconds, before, after, steps, (loss, held_out(module)), digest_of(module), heard.texts)


def survivors_of(
    results: Sequence[Survived], victims: Sequence[int], *, residuals: bool, local: bool = False
) -> list[Survived]:
    """Return what survivors found, once that is as promised. local: nodes may go on to the end of their round."""
    survivors = [each for rank, each in enumerate(results) if rank not in victims]
    for each in survivors:
        # Of two that died at the same moment it may have missed either.
        assert any(f"rank {victim}" in each.error for victim in victims)
        assert each.seconds < WITHIN_S
        assert each.steps == FAILS_AT or (local and each.steps == ROUND_ENDS_AT)  # a step that was ended counts nowhere
        assert each.losses[1] < each.losses[0]
    assert len({each.digest for each in survivors}) == 1
    before, after = total([each.before for each in survivors]), total([each.after for each in survivors])
    assert before.keys() == after.keys()
    assert bool(before) == residuals
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=1e-6, atol=1e-9)
    return survivors


STRATEGIES: dict[str, Aggregator | str] = {
    "flat": "flat",
    "8 bits": "quantized:bits=8",
    "4 bits": "quantized:bits=4",
    "one bit": "onebit",
    "dgc": "dgc",
    "powersgd": "powersgd:start_step=0",
    "adam": Compressed(OneBit(64), adam=Adam()),
    "auto": "auto",
    "hierarchical": "hierarchical",
    "hierarchical 4 bits": "hierarchical_quantized:bits=4",
    "hierarchical one bit": "hierarchical_onebit",
    "hierarchical dgc": "hierarchical_dgc",
    "hierarchical powersgd": "hierarchical_powersgd:start_step=0",
    "hierarchical adam": Hierarchical(Compressed(OneBit(64), adam=Adam())),
    "hierarchical diloco": "diloco:period=4",
    "hierarchical onebit_local": "onebit_local:period=4",
}
WITHOUT_RESIDUALS = ("flat", "auto", "hierarchical", "hierarchical diloco")
QUICK = [
    ("8 bits", (2,)),
    ("hierarchical adam", (3,)),
]
VICTIMS = [(0,), (3,), (2, 3)]
CASES = [
    pytest.param(name, victims, marks=[] if (name, victims) in QUICK else pytest.mark.slow)
    for name in STRATEGIES
    for victims in dict.fromkeys([*VICTIMS, *(victims for quick, victims in QUICK if quick == name)])
]


@pytest.mark.parametrize(("name", "victims"), CASES, ids=lambda value: str(value))
def test_survivors_go_on(name: str, victims: tuple[int, ...], tmp_path: Path) -> None:
    nodes = (2, 2) if name.startswith("hierarchical") else None
    env = {"COMMOPT_PLAN": None} if name == "auto" else {}
    results = run(lose, 4, str(tmp_path), victims, STRATEGIES[name], {}, nodes=nodes, dies=victims, fresh=True, env=env)
    local = name.endswith(("diloco", "onebit_local"))
    survivors = survivors_of(results, victims, residuals=name not in WITHOUT_RESIDUALS, local=local)
    said = [text for text in survivors[0].heard if f"{4 - len(victims)} of 4 ranks go on after step 6" in text]
    assert len(said) == 1
    for victim in victims:
        assert f"rank {victim} (node {victim // 2 if nodes else 0})" in said[0]
        if name not in WITHOUT_RESIDUALS:
            assert f"(rank {victim})" in said[0]
            assert re.search(r"after [46] steps, when last compared", said[0])
    assert not any("go on after step" in text for each in survivors[1:] for text in each.heard)


# ------------------------------------------------------------------------------ beside a run that began with three


def shrink(rank: int, world_size: int, folder: str, choice: str, steps: int) -> dict[str, Any]:
    """Lose a rank of four, and train for long beside a run that begins with three from the same parameters."""
    module = seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state: commopt.CommState = commopt.attach(ddp, choice)
    optimizer = torch.optim.SGD(module.parameters(), 0.5, momentum=0.9)
    train(ddp, optimizer, rank, 0, FAILS_AT)
    if rank == 3:
        die_in_backward(module)
    error_of_training(ddp, optimizer, rank, FAILS_AT)
    init_anew(folder, rank, range(3))
    beside = copy.deepcopy(module)
    optimizer_beside = torch.optim.SGD(beside.parameters(), 0.5, momentum=0.9)
    optimizer_beside.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.rebuild(state, ddp)
    begun = TorchDDP(beside, **SMALL_BUCKET)
    commopt.attach(begun, choice)
    start = held_out(module)
    train(ddp, optimizer, rank, FAILS_AT, FAILS_AT + steps)
    train(begun, optimizer_beside, rank, FAILS_AT, FAILS_AT + steps)
    apart = torch.stack([(a - b).norm() for a, b in zip(module.parameters(), beside.parameters(), strict=True)]).norm()
    return {"start": start, "end": held_out(module), "beside": held_out(beside), "apart": float(apart.detach())}


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["quantized:bits=4", "onebit"])
def test_the_loss_is_that_of_a_run_that_began_with_three(choice: str, tmp_path: Path) -> None:
    for found in run(shrink, 4, str(tmp_path), choice, 200, dies=(3,), fresh=True)[:3]:
        learned = found["start"] - found["end"]
        assert learned > 0.2 * found["start"]
        assert found["end"] == pytest.approx(found["beside"], abs=0.02 * learned)
        assert found["apart"] > 0  # they are two runs


# ------------------------------------------------------------------------------ survivors at different steps


@dataclass(frozen=True)
class Uneven(Aggregator):
    """Averages, and loses a rank in bucket `loses_in`, after which some ranks see an error and others none.

    victim: is killed. behind: sees the error.
    """

    victim: int
    behind: int
    inner: Aggregator

    loses_in = -1  # of this process, hence no field

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, context: BufferContext) -> None:
        self.inner.all_reduce(buffer, team, scale, context)
        if context.number == Uneven.loses_in:
            Uneven.loses_in = -1
            team.all_reduce(torch.zeros(1))  # all have the bucket
            if dist.get_rank() == self.victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == self.behind:
                raise TransportError("Connection closed by peer")

    def calls(self, buffer: Buffer, team: Any) -> tuple[Action, ...]:
        return self.inner.calls(buffer, team)

    @property
    def residual_paths(self) -> tuple[str, ...]:
        return self.inner.residual_paths


def lose_at_the_end_of_a_step(rank: int, world_size: int, folder: str, behind: int) -> dict[str, Any]:
    heard, module = Heard(), seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    choice = Uneven(3, behind, Compressed(Quantize(4, 64)))
    state: commopt.CommState = commopt.attach(ddp, choice, timeout=30)
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    optimizer.param_groups[0]["lr"] = np.float64(0.01)  # as of a schedule that is computed with NumPy
    train(ddp, optimizer, rank, 0, FAILS_AT)
    Uneven.loses_in = len(state.state_dict()["buckets"]) - 1
    error = error_of_training(ddp, optimizer, rank, FAILS_AT)
    made = int(next(iter(optimizer.state.values()))["step"])
    init_anew(folder, rank, range(3))
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.rebuild(state, ddp, check_every=1, on_divergence="raise")
    steps = state.stats()["steps"]
    same = int(next(iter(optimizer.state.values()))["step"])
    train(ddp, optimizer, rank, steps, steps + 5)
    dist.barrier()
    return {
        "error": error,
        "made": made,
        "steps": steps,
        "same": same,
        "digest": digest_of(module),
        "heard": heard.texts,
    }


@pytest.mark.parametrize("behind", [0, 2])
def test_survivors_that_are_a_step_apart_go_on_where_the_first_is(behind: int, tmp_path: Path) -> None:
    found = run(lose_at_the_end_of_a_step, 4, str(tmp_path), behind, dies=(3,), fresh=True)[:3]
    assert [each["made"] for each in found] == [FAILS_AT + (rank != behind) for rank in range(3)]
    expected = FAILS_AT + (behind != 0)
    assert [each["steps"] for each in found] == [each["same"] for each in found] == [expected] * 3
    assert len({each["digest"] for each in found}) == 1
    counts = ", ".join(f"rank {rank} {FAILS_AT + (rank != behind)}" for rank in range(3))
    assert any(f"some had completed ({counts}, " in text for text in found[0]["heard"])


# ------------------------------------------------------------------------------ HSDP


def sharded(mesh: Any) -> nn.Module:
    module = seeded(Tower)
    assert isinstance(module, Tower)
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def mesh_of(replicas: int) -> Any:
    return init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True)
class Dying(Flat):
    """Sums that kill one rank once it is `armed`, between what FSDP sends and what commopt does."""

    victim: int = 2

    armed = False  # of this process, hence no field

    def all_reduce(self, buffer: Tensor, team: Any, scale: float, context: BufferContext) -> None:
        if Dying.armed and dist.get_rank() == self.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        super().all_reduce(buffer, team, scale, context)

    def sums_of(self, team: Any) -> None:
        return None


def lose_a_replica_in_turn(rank: int, world_size: int, folder: str) -> tuple[str, float]:
    """Rank 2 is lost to rank 0 alone: rank 1 still has rank 3, and waits for rank 0 within their replica."""
    model = sharded(mesh_of(2))
    commopt.attach(model, Dying())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, rank // 2, 0, 2)
    Dying.armed = True
    begun = time.monotonic()
    error = error_of_training(model, optimizer, rank // 2, 2)
    seconds = time.monotonic() - begun
    if rank == 3:
        time.sleep(4.0)  # with its connection to rank 1 open, until rank 0 knows
        os.kill(os.getpid(), signal.SIGKILL)
    Path(folder, str(rank)).touch()
    deadline = time.monotonic() + limit(30.0)  # this process stays, with FSDP's groups
    while len(list(Path(folder).iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return error, seconds


def test_shards_of_a_replica_do_not_wait_for_one_that_knows_already(tmp_path: Path) -> None:
    results = run(lose_a_replica_in_turn, 4, str(tmp_path), nodes=(2, 2), dies=(2, 3), fresh=True)
    for rank, (error, seconds) in enumerate(results[:2]):
        assert re.search(r"rank [23]\b", error), f"rank {rank}: {error}"
        assert seconds < limit(10.0), f"rank {rank} took {seconds:.1f} s"


def lose_a_replica(rank: int, world_size: int, folder: str, choice: Any, shifted: bool) -> Any:
    """Train three replicas of two shards, lose one, go on with the others."""
    heard, mesh = Heard(), mesh_of(3)
    model = sharded(mesh)
    state: commopt.CommState = commopt.attach(model, choice, check_every=2)
    optimizer = torch.optim.SGD(model.parameters(), 2.0, momentum=0.9)
    train(model, optimizer, rank // 2, 0, FAILS_AT)
    if rank == 3:
        die_in_backward(model)
    if rank == 2:  # the rest of its replica is no use, and ends as a launcher ends it
        error_of_training(model, optimizer, rank // 2, FAILS_AT)
        os.kill(os.getpid(), signal.SIGKILL)
    error, begun = error_of_training(model, optimizer, rank // 2, FAILS_AT), time.monotonic()
    before = kept(state)
    survivors = [0, 1, 4, 5]
    for dimension in ("replicate", "shard"):  # a peer may wait in a collective of FSDP's own
        mesh.get_group(dimension).abort()
    init_anew(folder, rank, [1, 0, 4, 5] if shifted else survivors)
    again = sharded(mesh_of(2))
    optimizer_again = torch.optim.SGD(again.parameters(), 2.0, momentum=0.9)
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        assert isinstance(old, DTensor)
        assert isinstance(new, DTensor)
        momentum = new.detach().clone()
        assert isinstance(momentum, DTensor)
        with torch.no_grad():
            new.to_local().copy_(old.to_local())
            momentum.to_local().copy_(optimizer.state[old]["momentum_buffer"].to_local())
        optimizer_again.state[new]["momentum_buffer"] = momentum
    try:
        state = commopt.rebuild(state, again)
    except commopt.ConfigurationError as failure:
        return str(failure)
    steps, after = state.stats()["steps"], kept(state)
    train(again, optimizer_again, rank // 2, steps, steps + 1)
    seconds = time.monotonic() - begun
    train(again, optimizer_again, rank // 2, steps + 1, steps + AFTER)
    state.average_parameters()
    digest = [each.double().sum().item() for each in local(again)]
    dist.barrier()
    residuals = {"before": before, "after": after}
    return {"error": error, "seconds": seconds, "steps": steps, "digest": digest, "heard": heard.texts, **residuals}


@pytest.mark.parametrize(
    "choice",
    [
        "quantized:bits=4",
        pytest.param("powersgd:start_step=0", marks=pytest.mark.slow),
        pytest.param("onebit_local:period=4", marks=pytest.mark.slow),
    ],
)
def test_hsdp_goes_on_without_a_replica(choice: str, tmp_path: Path) -> None:
    # Without the others a node goes on to the end of its round.
    steps = ROUND_ENDS_AT if "local" in choice else FAILS_AT
    results = run(lose_a_replica, 6, str(tmp_path), choice, False, nodes=(2, 2, 2), dies=(2, 3), fresh=True)
    found = [results[rank] for rank in (0, 1, 4, 5)]
    for each in found:
        assert each["seconds"] < WITHIN_S
        assert each["steps"] == steps
    assert found[0]["digest"] == found[2]["digest"] != found[1]["digest"] == found[3]["digest"]
    before, after = total([each["before"] for each in found]), total([each["after"] for each in found])
    assert before.keys() == after.keys() != set()
    for name, values in before.items():
        torch.testing.assert_close(after[name], values, rtol=1e-6, atol=1e-9)
    said = [text for text in found[0]["heard"] if f"4 of 6 ranks go on after step {steps}, without rank 2" in text]
    assert len(said) == 1


@pytest.mark.slow
def test_each_rank_of_hsdp_must_hold_the_shard_that_it_had(tmp_path: Path) -> None:
    results = run(lose_a_replica, 6, str(tmp_path), "quantized", True, nodes=(2, 2, 2), dies=(2, 3), fresh=True)
    for rank in (0, 1, 4, 5):
        assert "shard that it had" in results[rank]


def keep_all_ranks(rank: int, world_size: int, folder: str, groups: tuple[int, int]) -> list[tuple[float, float]]:
    """Leave a world, and go on in another of the same ranks, with an equal mesh behind another number of groups."""

    def train_and_clip(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> tuple[float, float]:
        """Return the norm of the gradients as torch finds it, and as the shards have it."""
        optimizer.zero_grad()
        loss_of(model, batch_of(rank // 2, step)).backward()
        square = sum((each.grad.to_local().square().sum() for each in model.parameters()), torch.zeros(1))  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        dist.all_reduce(square)
        assert isinstance(norm, DTensor)
        return float(norm.full_tensor()), float(square / 2) ** 0.5  # of two replicas

    def begin(more: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        for _ in range(more):
            dist.new_group(list(range(world_size)))
        model = sharded(mesh_of(2))
        return model, torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], 0.01)

    model, optimizer = begin(groups[0])
    state: commopt.CommState = commopt.attach(model, "quantized")
    norms = [train_and_clip(model, optimizer, step) for step in range(2)]
    init_anew(folder, rank, range(world_size))
    again, optimizer_again = begin(groups[1])
    for old, new in zip(model.parameters(), again.parameters(), strict=True):
        assert isinstance(old, DTensor)
        assert isinstance(new, DTensor)
        with torch.no_grad():
            new.to_local().copy_(old.to_local())
        if old in optimizer.state:
            momentum = optimizer.state[old]["momentum_buffer"].to_local()
            kept = DTensor.from_local(momentum, new.device_mesh, new.placements, shape=new.shape, stride=new.stride())
            optimizer_again.state[new]["momentum_buffer"] = kept
    commopt.rebuild(state, again)
    norms += [train_and_clip(again, optimizer_again, step) for step in range(2, 4)]
    dist.barrier()
    return norms


@pytest.mark.parametrize("groups", [(1, 0), (0, 1)], ids=str)
def test_what_is_computed_on_shards_is_of_the_mesh_of_now(groups: tuple[int, int], tmp_path: Path) -> None:
    for norms in run(keep_all_ranks, 4, str(tmp_path), groups, nodes=(2, 2), fresh=True, timeout_s=60):
        for found, expected in norms:
            assert found == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------ plans, moments, refusals


def follow_a_plan(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Lose a rank while a plan is followed that came from a measurement."""
    module = seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.attach(ddp, "flat", plan="adaptive")
    names = [name for name, _ in module.named_parameters()][::-1]
    plan = commopt.Plan(groups=(tuple(names[:5]), tuple(names[5:])), strategy=repr(commopt.Flat()))
    state._registration.controller.follow(plan)
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    train(ddp, optimizer, rank, 0, FAILS_AT)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    error_of_training(ddp, optimizer, rank, FAILS_AT)
    init_anew(folder, rank, (1, 2))
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.rebuild(state, ddp)
    followed = state.plan
    train(ddp, optimizer, rank, FAILS_AT, FAILS_AT + 3)
    dist.barrier()
    assert followed is not None
    return {"groups": followed.groups == plan.groups, "buckets": len(state.state_dict()["buckets"])}


def test_the_plan_is_followed_by_the_survivors(tmp_path: Path) -> None:
    found = run(follow_a_plan, 3, str(tmp_path), dies=(0,), fresh=True)[1:]
    assert [each["groups"] for each in found] == [True, True]
    assert BUCKETS_CAN_BE_GIVEN is False or [each["buckets"] for each in found] == [2, 2]


def lose_moments(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Lose the ranks that held one half of Adam's moments on both nodes, and go on with the other halves."""
    heard, module = Heard(), seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.attach(ddp, Hierarchical(Compressed(OneBit(64), adam=Adam())))
    optimizer = state.optimizer(module.parameters(), 0.003)
    train(ddp, optimizer, rank, 0, FAILS_AT)
    if rank in (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)
    error_of_training(ddp, optimizer, rank, FAILS_AT)
    init_anew(folder, rank, (0, 2))
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.rebuild(state, ddp)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    train(ddp, optimizer, rank, FAILS_AT, FAILS_AT + 3)
    moved = [(a - b).abs().max() for a, b in zip(module.parameters(), before, strict=True)]
    dist.barrier()
    return {"moved": float(torch.stack(moved).max().detach()), "heard": heard.texts, "digest": digest_of(module)}


def test_moments_that_nobody_has_begin_anew_and_take_no_leap(tmp_path: Path) -> None:
    found = run(lose_moments, 4, str(tmp_path), nodes=(2, 2), dies=(1, 3), fresh=True)
    assert found[0]["digest"] == found[2]["digest"]
    assert 0 < found[0]["moved"] < 3 * 3 * 0.003  # three steps, none much longer than the learning rate
    said = next(text for text in found[0]["heard"] if "go on after step" in text)
    assert "No survivor had exp_avg" in said
    assert "begin anew" in said


def go_on_frozen(rank: int, world_size: int, folder: str, choice: str) -> dict[str, Any]:
    """A layer is frozen behind DDP, which shows it all the same; the next DDP does not."""
    module = seeded(Tower)
    ddp = TorchDDP(module, find_unused_parameters=True, **SMALL_BUCKET)
    module.get_submodule("layers.0").requires_grad_(False)
    state = commopt.attach(ddp, choice)
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], 0.5)
    train(ddp, optimizer, rank, 0, 4)
    before = set(state.state_dict()["parameters"])
    init_anew(folder, rank, range(world_size))
    ddp = TorchDDP(module, find_unused_parameters=True, **SMALL_BUCKET)
    state = commopt.rebuild(state, ddp)
    train(ddp, optimizer, rank, 4, 6)
    state.load_state_dict(state.state_dict())
    dist.barrier()
    return {"shown": "layers.0.weight" in before, "steps": state.stats()["steps"], "digest": digest_of(module)}


@pytest.mark.parametrize("choice", ["powersgd:start_step=1", "quantized"])
def test_layers_that_were_frozen_behind_ddp_need_not_be_shown_again(choice: str, tmp_path: Path) -> None:
    found = run(go_on_frozen, 2, str(tmp_path), choice, fresh=True)
    assert found[0] == found[1]
    assert found[0]["shown"]
    assert found[0]["steps"] == 6


def refused(rank: int, world_size: int, folder: str) -> list[str]:
    module = seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.attach(ddp, "quantized")
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    train(ddp, optimizer, rank, 0, 2)
    said = []

    def ask(state: Any, model: nn.Module, **options: Any) -> None:
        with pytest.raises(commopt.CommoptError) as caught:
            commopt.rebuild(state, model, **options)
        said.append(str(caught.value))

    ask(None, ddp)
    ask(state, TorchDDP(module, **SMALL_BUCKET))
    init_anew(folder, rank, range(world_size))
    ask(state, TorchDDP(module, **SMALL_BUCKET), ranks_per_node=2)
    again = commopt.rebuild(state, TorchDDP(module, **SMALL_BUCKET))  # a call that was refused has changed nothing
    assert again.stats()["steps"] == 2
    dist.barrier()
    return said


def test_what_does_not_belong_together_is_refused_on_every_rank(tmp_path: Path) -> None:
    for nothing, same_group, shape in run(refused, 3, str(tmp_path), fresh=True):
        assert "begins at a checkpoint" in nothing
        assert "make one of the survivors" in same_group
        assert "ranks_per_node" in shape or "ranks per node" in shape, shape


def come_without_a_state(rank: int, world_size: int, folder: str) -> str:
    module = seeded(Tower)
    ddp = TorchDDP(module, **SMALL_BUCKET)
    state = commopt.attach(ddp, "quantized")
    train(ddp, torch.optim.SGD(module.parameters(), 0.5), rank, 0, 2)
    init_anew(folder, rank, range(world_size))
    with pytest.raises(commopt.ConfigurationError) as caught:
        commopt.rebuild(None if rank == 1 else state, TorchDDP(module, **SMALL_BUCKET))  # type: ignore[type-var]
    dist.barrier()
    return str(caught.value)


def test_a_rank_without_a_state_is_told_to_all(tmp_path: Path) -> None:
    for message in run(come_without_a_state, 3, str(tmp_path), fresh=True, timeout_s=60):
        assert "rebuild got a NoneType" in message
        assert "begins at a checkpoint" in message
