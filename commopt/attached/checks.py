# SPDX-License-Identifier: Apache-2.0
"""Checks of models, gradients and optimizers: errors for gradients that cannot be averaged, warnings for loops."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from commopt.attached.steps import before_steps
from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.version import NEWEST_TESTED_TORCH

_T = TypeVar("_T")

REDUCIBLE = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64))

_log = logging.getLogger("commopt")


def require_supported_parameters(module: nn.Module) -> None:
    """Raise UnsupportedTensorError when a parameter of `module` will have a complex or a sparse gradient."""
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise _sparse(f"parameter '{name}.weight'" if name else "parameter 'weight'")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            _require_dtype(parameter, f"parameter '{name}'")


def refuse_bucket(bucket: dist.GradBucket, buffer: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Raise UnsupportedTensorError for a bucket whose `buffer` is sparse or of a dtype that cannot be averaged."""
    names = {parameter: name for name, parameter in parameters.items()}
    label = ", ".join(f"'{names[p]}'" if p in names else f"of shape {tuple(p.shape)}" for p in bucket.parameters())
    if buffer.layout != torch.strided:
        raise _sparse(f"parameter {label}")
    _require_dtype(buffer, f"parameter {label}")


def _require_dtype(tensor: Tensor, name: str) -> None:
    if tensor.is_complex():
        raise UnsupportedTensorError(
            f"{name} is {tensor.dtype}, and complex gradients are not supported; keep it as a real parameter with a "
            f"trailing dimension of 2 and use torch.view_as_complex in forward"
        )
    if tensor.dtype not in REDUCIBLE:
        known = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE))
        raise UnsupportedTensorError(f"{name} is {tensor.dtype}; gradients can be {known}")


def _sparse(name: str) -> UnsupportedTensorError:
    return UnsupportedTensorError(
        f"{name} has a sparse gradient, which no aggregator can average; use sparse=False, or leave it out of DDP "
        f"with DDP._set_params_and_buffers_to_ignore_for_model and average it yourself"
    )


def enabled_scalers() -> list[torch.amp.GradScaler]:
    """Return every enabled GradScaler of this process."""
    return [scaler for scaler in instances_of(torch.amp.GradScaler) if scaler.is_enabled()]


def instances_of(base: type[_T]) -> list[_T]:
    """Return every object of a class, and of those derived from it, that there is in this process."""
    kinds: list[type] = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # Not gc.get_objects(): it holds every object for a moment, and a tuple that another thread is building must be
    # held by nobody else (CPython raises SystemError there).
    return [thing for thing in gc.get_referrers(*kinds) if type(thing) in kinds]


def warn_of_unknown_scaler() -> None:
    """Warn when a GradScaler is in use that no HookState was given."""
    if any(scaler._scale is not None for scaler in enabled_scalers()):
        _log.warning(
            "a GradScaler is in use and HookState(scaler=None) does not know it: residuals would stay at the old "
            "scale when it changes, and be kept from steps it drops; pass scaler=scaler, or assign state.scaler"
        )


@cache
def warn_of_untested_torch(version: str) -> None:
    """Warn, once for each, when a torch is newer than all that the tests ran with."""
    release = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if release > [int(number) for number in NEWEST_TESTED_TORCH.split(".")]:
        _log.warning(
            "torch %s is newer than %s, the newest that commopt was tested with; if something is odd, try that one: "
            "pip install 'torch==%s.*'",
            version,
            NEWEST_TESTED_TORCH,
            NEWEST_TESTED_TORCH,
        )


# Which of its options tell that an optimizer divides by a norm of its own, or averages gradients.
_ADAPTS = {"betas", "rho", "alpha", "etas", "lr_decay", "beta2_decay"}


def require_plain_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigurationError when an optimizer makes directions of its own, of what are directions of Adam's."""
    kind = type(optimizer).__name__
    for group in optimizer.param_groups:
        for name in sorted(_ADAPTS & group.keys()):
            raise ConfigurationError(
                f"{kind} has {name}={group[name]!r} for parameters whose .grad is Adam's direction already, so it "
                f"would be applied twice; use comm.optimizer(model.parameters(), lr=..., weight_decay=...), and set "
                f"betas and eps in commopt.Adam()"
            )
        if group.get("momentum"):
            raise ConfigurationError(
                f"{kind} has momentum={group['momentum']!r} for parameters whose .grad is Adam's direction, which has "
                f"its momentum already; if a scheduler such as OneCycleLR or CyclicLR set it, pass "
                f"cycle_momentum=False to the scheduler; else use comm.optimizer(model.parameters(), lr=..., "
                f"weight_decay=...), which has none"
            )


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return "adamw" for an optimizer that divides by a norm of its own, "sgd" for others."""
    return "adamw" if any(_ADAPTS & group.keys() for group in optimizer.param_groups) else "sgd"


def when_first_stepped(owner: Any, see: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    """Let each torch optimizer of `owner.parameters` be seen, `see(owner, optimizer)`, when it first steps."""
    seen: WeakSet[torch.optim.Optimizer] = WeakSet()

    def look(alive: Any, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in seen:
            seen.add(optimizer)
            see(alive, optimizer)

    before_each_step(owner, look)


def before_each_step(owner: Any, see: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    """Call `see(owner, optimizer)` before each step of each torch optimizer of `owner.parameters`."""
    ours: WeakKeyDictionary[torch.optim.Optimizer, bool] = WeakKeyDictionary()

    def look(alive: Any, optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in ours:
            known = set(map(id, alive.parameters.values()))
            ours[optimizer] = any(id(each) in known for group in optimizer.param_groups for each in group["params"])
        if ours[optimizer]:
            see(alive, optimizer)

    before_steps.show(owner, look)
