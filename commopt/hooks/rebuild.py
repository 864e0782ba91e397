# SPDX-License-Identifier: Apache-2.0
"""`rebuild`: after a failure, survivors go on in a new process group with what they have in memory."""

from __future__ import annotations

import gc
import logging
from dataclasses import fields
from io import BytesIO
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from commopt.attached.checks import instances_of
from commopt.attached.comm_state import CommState
from commopt.attached.divergence import alike_in, copy_from
from commopt.attached.rebuild import Survivors, meet, take_over
from commopt.errors import ConfigurationError
from commopt.groups import Team
from commopt.groups.team import broadcast_bytes
from commopt.hooks.buckets import DDPRegistration, buffers_of, parameters_of
from commopt.hooks.ddp import attach
from commopt.lanes import LaneClient

State = TypeVar("State", bound=CommState)

_log = logging.getLogger("commopt")


def rebuild(state: State, model: nn.Module, **options: Any) -> State:
    """Go on after a failure with the ranks that are left; return the state of `model`. Collective over its ranks.

        dist.destroy_process_group()  # or abort, over NCCL
        dist.init_process_group("gloo", store=store, rank=new_rank, world_size=survivors)
        ddp = DistributedDataParallel(ddp.module)
        comm = commopt.rebuild(comm, ddp)

    Residuals stay with the ranks that have them; momentum, moments, factors, counts and the plan are those of the
    survivors. What the ranks that are gone had not sent yet is lost, and a warning of the first rank says of whom, of
    which parameters, and its norm when replicas were last compared. The optimizer lives on. A step that the failure
    has ended counts nowhere: `stats()["steps"]` says how many were complete. Where some survivors had completed it,
    all go on where the first rank of the new group is, as DDP's constructor does: with its parameters and the state of
    its optimizers.

    state: the one before the failure, on this rank; it is closed, and what it was attached to trains no more.
    model: the same module, wrapped in a new DistributedDataParallel over the survivors; or a new model of fully_shard
        over whole replicas, each rank with the shard that it had. With a LocalSGD pass init_sync=False to DDP, so that
        the model is the mean over the survivors, and not the first rank's.
    options: those of `attach` that are to be others than before, as ranks_per_node.

    Raises ConfigurationError and MismatchError on every rank when states and models do not belong together, as of a
    rank that was not there before: it begins at a checkpoint (`gathered_state_dict`), with all others.
    """
    if not isinstance(state, CommState):
        _refuse(
            model,
            f"rebuild got a {type(state).__name__} and not what commopt.attach returned; a rank without a state begins "
            f"at a checkpoint: commopt.attach(model, ...), then load_state_dict of gathered_state_dict() on every rank",
        )
    before = state._registration
    if before.joined is None or before.aggregator is None:
        _refuse(model, "this state has seen no step, so it has nothing to go on with; use commopt.attach")
    before.close()
    if isinstance(before, DDPRegistration):
        _let_go(before, model)
    kept = {each.name: getattr(before.options, each.name) for each in fields(before.options)}
    given = {**kept, "scaler": before.scaler, "tuned": None, **options}  # what tuning came to is resumed with
    made = attach(model, before.aggregator, **given)
    now = made._registration
    try:
        survivors = meet(before, now)
        if survivors.apart:
            _follow_first(made, survivors)
        take_over(before, now, survivors)
        made.average_parameters()  # of a LocalSGD, which then begins from the mean over the survivors
    except BaseException:
        now.close(groups=False)  # nobody gets this state
        raise
    return cast(State, made)  # of the same class: else the registrations would not fit


def _refuse(model: nn.Module, why: str) -> NoReturn:
    """Raise ConfigurationError on this rank, and on those that have a state where they meet it."""
    problem = ConfigurationError(why)
    LaneClient.join("rebuild", getattr(model, "process_group", None), None, None, problem)
    raise problem


def _let_go(before: DDPRegistration, model: object) -> None:
    """Take the old reducer's hooks off the parameters, where an exception or a variable still holds the old model."""
    gc.collect()
    old = before.model()
    if old is not None and old is not model:
        vars(old).pop("reducer", None)  # gone already, where an earlier call was refused
        vars(old).pop("logger", None)


def _follow_first(made: CommState, survivors: Survivors) -> None:
    """Go on where the first rank is; collective over all ranks, with a LocalSGD over those of a node.

    Raises ConfigurationError, on every rank, where that rank does not hold all of the model.
    """
    now, steps = made._registration, survivors.steps
    counts = ", ".join(f"rank {rank} {count}" for rank, count in sorted(steps.items()))
    if not isinstance(now, DDPRegistration):
        raise ConfigurationError(
            f"survivors have completed different numbers of steps ({counts}, by their ranks before), and no rank of a "
            f"sharded model can give the others its own; go on from a checkpoint"
        )
    client, team = now.client, alike_in(now.client.team, now.aggregator)
    if team is None or team.size == 1:
        return
    first = client.team.ranks[survivors.first]
    source = team.ranks.index(first) if first in team.ranks else 0
    tensors = [*parameters_of(now).values(), *buffers_of(now).values()]
    optimizers = _optimizers(now)

    def copy() -> None:
        if tensors:
            copy_from(tensors, team, source, deviates=team.rank != source)
        _copy_optimizers(optimizers, now.scaler, team, source)

    client.run(copy, f"parameters and optimizers of rank {team.ranks[source]}").wait()
    if client.team.rank == survivors.first:
        _log.warning(
            "the failure ended a step that some had completed (%s, by their ranks before): all have the parameters and "
            "the state of optimizers of this rank now, and go on after step %d; set schedulers and data to that",
            counts,
            survivors.step,
        )


def _optimizers(now: DDPRegistration) -> dict[str, Optimizer]:
    """Return the optimizers of the parameters, by the names of these."""
    names = {id(parameter): name for name, parameter in now.parameters.items()}
    found = {}
    for optimizer in instances_of(Optimizer):
        held = [names[id(each)] for group in optimizer.param_groups for each in group["params"] if id(each) in names]
        if held:
            found[" ".join(held)] = optimizer
    return found


def _copy_optimizers(optimizers: dict[str, Optimizer], scaler: Any, team: Team, source: int) -> None:
    """Give all ranks of `team` the state of optimizers, and of the GradScaler, of one of them."""
    payload: bytes | None = None
    if team.rank == source:
        buffer = BytesIO()
        states = {names: _with_plain_numbers(optimizer.state_dict()) for names, optimizer in optimizers.items()}
        torch.save({"optimizers": states, "scaler": None if scaler is None else scaler.state_dict()}, buffer)
        payload = buffer.getvalue()
    received = broadcast_bytes(team, payload, source)
    if team.rank != source:
        found = torch.load(BytesIO(received), map_location="cpu", weights_only=True)
        for names, state in found["optimizers"].items():
            if names in optimizers:
                optimizers[names].load_state_dict(state)
        if scaler is not None and found["scaler"] is not None:
            scaler.load_state_dict(found["scaler"])


def _with_plain_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer with numbers of Python for those of NumPy, which are not read as weights."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):  # as betas
            return tuple(map(plain, value))
        return value.item() if isinstance(value, np.generic) else value

    groups = [{name: plain(value) for name, value in group.items()} for group in state["param_groups"]]
    return {**state, "param_groups": groups}
