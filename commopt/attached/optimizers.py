# SPDX-License-Identifier: Apache-2.0
"""Optimizers that a script made by itself: found by their parameters, and made the SGD that `adam=` wants behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from commopt.aggregate import Adam
from commopt.attached.checks import instances_of
from commopt.attached.comm_state import CommState
from commopt.errors import ConfigurationError

_OF_ADAM = ("betas", "eps", "amsgrad", "capturable", "fused", "decoupled_weight_decay")  # in groups; SGD has others
_OF_FUSED = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")  # what fused=True leaves in an object
_OTHERWISE = (
    "attach in the script, commopt.attach(model, ..., adam=...), with comm.optimizer() as its optimizer, or choose a "
    "strategy without adam="
)


def optimizers_of(parameters: Iterable[Tensor]) -> list[Optimizer]:
    """Return every optimizer of this process that has one of `parameters`, but for what wraps another around it."""
    ours = set(map(id, parameters))
    found = [each for each in instances_of(Optimizer) if _has(each, ours)]
    return [each for each in found if not any(each is not other and _wraps(each, other) for other in found)]


def _has(optimizer: Optimizer, ours: set[int]) -> bool:
    groups = getattr(optimizer, "param_groups", ())  # another thread may be making it
    return any(id(parameter) in ours for group in groups for parameter in group["params"])


def _wraps(optimizer: Optimizer, other: Optimizer) -> bool:
    """Whether `optimizer` passes everything on to `other`, as Accelerate's and Lightning's do."""
    holds = any(value is other for value in vars(optimizer).values())
    return holds and optimizer.param_groups is other.param_groups


def adam_in(optimizers: Sequence[Optimizer]) -> Adam | None:
    """Return the Adam that `optimizers` compute, None where they compute none (SGD without momentum).

    Raises ConfigurationError for those whose place `adam=` cannot take without a change of what they compute.
    """
    settings: dict[tuple[float, float, float], None] = {}
    for optimizer in optimizers:
        if type(optimizer) is SGD and not any(group["momentum"] for group in optimizer.param_groups):
            continue
        if problem := _obstacle(optimizer):
            raise ConfigurationError(f"adam= takes the place of the script's optimizer, and {problem}; {_OTHERWISE}")
        for group in optimizer.param_groups:
            b1, b2 = map(float, group.get("betas", optimizer.defaults["betas"]))
            settings[b1, b2, float(group.get("eps", optimizer.defaults["eps"]))] = None
    if len(settings) > 1:
        shown = " and ".join(f"betas=({b1}, {b2}), eps={eps}" for b1, b2, eps in settings)
        raise ConfigurationError(f"adam= has one pair of betas and one eps, and here are {shown}; {_OTHERWISE}")
    return next((Adam(betas=(b1, b2), eps=eps) for b1, b2, eps in settings), None)


def _obstacle(optimizer: Optimizer) -> str:
    """Return why `adam=` cannot take the place of an optimizer, "" where it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        return f"{name} is none that it can stand for (torch.optim.AdamW, and torch.optim.Adam without weight_decay)"
    for group in optimizer.param_groups:
        decoupled = type(optimizer) is torch.optim.AdamW or group.get("decoupled_weight_decay")
        if group["weight_decay"] and not decoupled:
            return f"Adam(weight_decay={group['weight_decay']}) adds the decay to gradients, which AdamW does not"
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                return f"{name} has {option}=True, which it cannot do"
    if optimizer.state:
        return f"this {name} has moments already, of a checkpoint perhaps, which would be lost"
    if "step" in vars(optimizer) and not hasattr(vars(optimizer)["step"], "_wrapped_by_lr_sched"):
        return f"something has replaced the method step of this {name}"
    for holder in instances_of(Optimizer):
        if holder is not optimizer and _wraps(holder, optimizer) and getattr(holder, "scaler", None) is not None:
            return (
                f"{type(holder).__name__} with a GradScaler calls the step that this {name} had; use bf16 without one"
            )
    for scheduler in instances_of(LRScheduler):
        if getattr(scheduler, "optimizer", None) is optimizer and getattr(scheduler, "cycle_momentum", False):
            return f"{type(scheduler).__name__} changes the betas of this {name}; pass it cycle_momentum=False"
    return ""


def put_behind(state: CommState, optimizer: Optimizer) -> None:
    """Make an optimizer that `adam_in` took what `state.optimizer` returns, in place.

    The object stays, so that the script's names for it, its schedulers and its groups with their learning rates and
    weight decays do too. Raises ConfigurationError as `state.optimizer` does.
    """
    if type(optimizer) is SGD:
        return
    groups = [{name: group[name] for name in group if name not in _OF_ADAM} for group in optimizer.param_groups]
    made = state.optimizer(groups, optimizer.defaults["lr"], optimizer.defaults["weight_decay"])
    for group, new in zip(optimizer.param_groups, made.param_groups, strict=True):
        group.clear()
        group.update(new)
    optimizer.defaults.clear()
    optimizer.defaults.update(made.defaults)
    for name in _OF_FUSED:
        vars(optimizer).pop(name, None)
    if "step" in vars(optimizer):  # of a scheduler, for the class that it was
        optimizer.step = _noted_step(optimizer)  # type: ignore[method-assign]
    optimizer.__class__ = SGD


def stand_for_adam(state: CommState, parameters: Iterable[Tensor]) -> None:
    """Put what averages by `adam=` in the place of the optimizers that have `parameters`; without `adam=` do nothing.

    Raises ConfigurationError as `adam_in` does, and where their betas or eps are other ones than those of `adam=`.
    """
    asked = None if state.aggregator is None else state.aggregator.adam
    if asked is None:
        return
    optimizers = optimizers_of(parameters)
    found = adam_in(optimizers)
    if found is not None and (found.betas, found.eps) != (asked.betas, asked.eps):
        raise ConfigurationError(
            f"the optimizer has betas={found.betas}, eps={found.eps:g}, and {asked} is asked for; pass "
            f"adam=commopt.Adam(betas={found.betas}, eps={found.eps:g}), or give the optimizer those of adam="
        )
    for optimizer in optimizers:
        put_behind(state, optimizer)


def _noted_step(optimizer: Optimizer) -> Any:
    """Return SGD's step with what torch's schedulers put around it: they warn when none came before theirs."""
    alive = ref(optimizer)

    @wraps(SGD.step)
    def step(*inputs: Any, **options: Any) -> Any:
        this: Any = alive()
        this._opt_called = True
        return SGD.step(this, *inputs, **options)

    vars(step)["_wrapped_by_lr_sched"] = True
    return step
