# SPDX-License-Identifier: Apache-2.0
"""Put a hook on a DDP model: `attach` for torch's class, a subclass of it for the one-argument form."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator
from commopt.attached.local_sgd import warn_of_broadcasts
from commopt.attached.options import OPTIONS, AttachOptions, shows_options
from commopt.errors import ConfigurationError
from commopt.hooks.buckets import DDPRegistration
from commopt.hooks.presets import Preset, build_preset, hook
from commopt.hooks.state import HookState
from commopt.lanes import LaneClient

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from commopt.attached.comm_state import CommState
    from commopt.cost import Links
    from commopt.schedule import Plan, Tuned
    from commopt.server import ParameterServer, Worker

PLAN_VARIABLE = "COMMOPT_PLAN"


@overload
def attach(model: TorchDDP, choice: Aggregator | Preset | str, **options: Any) -> HookState: ...


@overload
def attach(
    model: nn.Module,
    choice: Aggregator | Preset | str,
    *,
    process_group: Any = ...,
    ranks_per_node: int | None = ...,
    site: str | None = ...,
    scaler: Any = ...,
    timeout: float | timedelta | None = ...,
    plan: Plan | str | Path | None = ...,
    links: Links | str | Path | None = ...,
    record: bool = ...,
    tuned: Tuned | str | Path | None = ...,
    weights: Any = ...,
    check_every: int = ...,
    on_divergence: Literal["warn", "raise", "resync"] = ...,
    **preset_options: Any,
) -> CommState: ...


@overload
def attach(model: nn.Module, choice: ParameterServer) -> Worker: ...


@shows_options("ddp", "replicated", "sharded", rest="preset_options")
def attach(model: nn.Module, choice: Aggregator | Preset | str | ParameterServer, **options: Any) -> CommState | Worker:
    """Average the gradients of a model with an aggregator, a preset or a preset's name; return the hook's state.

    Collective over the model's ranks. Call it for a model of fully_shard or replicate before the first backward; its
    gradients are reduced in float16, bfloat16, float32 or float64. Raises ConfigurationError when `model` is none of
    these, has a hook already, or an option or a name is unknown, UnsupportedTensorError when a parameter's gradient
    could not be averaged.

    model: a DistributedDataParallel one, or one of FSDP2's fully_shard or replicate, between whose replicas the average
        is then taken (docs/fsdp2.md). What torch.compile and Fabric wrap is found inside. Gradients are real and
        floating, of any shape.
    choice: a name may carry options of its own: "hierarchical_quantized:bits=4". With a ParameterServer, which takes no
        options here, the model may be a plain module too, and a Worker is returned.
    preset_options: those of a preset, as in attach(ddp, "hierarchical_quantized", bits=4).
    """
    given = AttachOptions(**{name: options.pop(name) for name in OPTIONS if name in options})
    ddp = _inside(model)
    if not isinstance(choice, (Aggregator, Preset, str)) and hasattr(choice, "attach"):  # nobody else loads its class
        if options or given != AttachOptions() or _is_sharded(ddp):
            what = "is for a plain module or a DDP model, and attach takes no options with it"
            refused = ConfigurationError(f"{choice!r} {what}; pass them to ParameterServer(...)")
            if isinstance(ddp, TorchDDP):  # a mistake of one rank is raised on all of them
                LaneClient.join("Worker", ddp.process_group, None, None, refused)
            raise refused
        return choice.attach(ddp)
    if (sharded := next((each for each in (ddp, model) if _is_sharded(each)), None)) is not None:
        from commopt.sharded import attach_sharded

        return attach_sharded(sharded, lambda: _aggregator_from(choice, options), given)
    _require_ddp(ddp)
    try:  # a mistake of one rank is raised on all of them
        _require_free(ddp)
        aggregator = _aggregator_from(choice, options)
    except ConfigurationError as problem:
        LaneClient.join(DDPRegistration.kind, ddp.process_group, None, None, problem)
        raise
    if given.process_group is None:
        given = replace(given, process_group=ddp.process_group)
    if given.plan is None:
        given = replace(given, plan=os.environ.get(PLAN_VARIABLE) or None)
    state = HookState(aggregator, module=ddp.module, **vars(given))
    try:
        _require_same_ranks(ddp, state)
        warn_of_broadcasts(aggregator, ddp)
        ddp._comm_hooks.clear()
        TorchDDP.register_comm_hook(ddp, state, hook)
        _connect(ddp, state)
    except BaseException:
        state._registration.close(groups=False)  # no model got this state
        raise
    return state


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel whose register_comm_hook also takes a preset alone."""

    def register_comm_hook(self, state: object, hook: Any = None) -> None:
        """Register a preset, an aggregator or a preset's name alone, or (state, hook) as torch's method does.

        A preset without a state, (None, commopt.hierarchical), is attached.
        Raises ConfigurationError for a second registration, or for a preset with a state that is no HookState.
        """
        if hook is None and isinstance(state, (Aggregator, Preset, str)):
            attach(self, state)
            return
        if state is None and isinstance(hook, Preset):
            attach(self, hook)
            return
        _require_free(self)
        if hook is None:
            raise ConfigurationError(
                f"register_comm_hook({state!r}) names no hook; pass a preset alone, "
                f"ddp.register_comm_hook(commopt.hierarchical), or a state and a hook"
            )
        if isinstance(hook, Preset) and not isinstance(state, HookState):
            raise ConfigurationError(
                f"register_comm_hook({state!r}, {hook!r}) has no HookState; call ddp.register_comm_hook({hook!r}) or "
                f"ddp.register_comm_hook(commopt.HookState(), {hook!r})"
            )
        if isinstance(state, HookState):
            _require_same_ranks(self, state)
        super().register_comm_hook(state, hook)
        if isinstance(state, HookState):
            _connect(self, state)

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Unpickle with the hook in place: torch keeps it in the pickle and then forgets to register it."""
        super().__setstate__(saved)  # type: ignore[no-untyped-call]
        pickled, self._comm_hooks = self._comm_hooks, []
        for registered, state in pickled:
            if isinstance(state, HookState):
                state.set_module(self.module)
            super().register_comm_hook(state, registered)
            if isinstance(state, HookState):
                state._registration.set_model(self)  # the forward hooks came with the pickle


class ForwardPreHook:
    """Tells the state that a forward of the DDP model begins; pickled with the model."""

    def __init__(self, state: HookState) -> None:
        self._state = state

    def __call__(self, ddp: TorchDDP, inputs: Any) -> None:
        """Tell it if a backward may follow, and no compiler traces: the next call of the hook makes up for that."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._state._registration.before_forward(sends=ddp.require_backward_grad_sync)


def _connect(ddp: TorchDDP, state: HookState) -> None:
    """Connect a state to its model, and to the forwards of that."""
    state._registration.set_model(ddp)
    ddp.register_forward_pre_hook(ForwardPreHook(state))


# What wrappers call the model they hold: torch.compile, and Lightning's Fabric.
_HOLD = ("_orig_mod", "_forward_module")


def _inside(model: Any) -> Any:
    """Return the model that wrappers hold."""
    held = [model._modules[name] for name in _HOLD if name in getattr(model, "_modules", ())]
    return _inside(held[0]) if held else model


def _is_sharded(model: object) -> bool:
    """Return whether any part of a model is FSDP2's; without loading FSDP, which then nobody has used."""
    if not isinstance(model, nn.Module) or "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _require_ddp(ddp: object) -> None:
    if not isinstance(ddp, TorchDDP):
        what = f"attach got a {type(ddp).__name__}, not a DistributedDataParallel model"
        raise ConfigurationError(f"{what}{_advice(ddp)}")


def _require_free(ddp: TorchDDP) -> None:
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ConfigurationError(
            "DistributedDataParallel(skip_all_reduce_unused_params=True) calls the hook for some buckets only, and the "
            "first and the last one tell commopt where a step begins and ends; leave it out"
        )
    # Not `ddp._comm_hooks`: torch.load fills it in again, though the model it returns has no hook.
    if name := ddp._get_ddp_logging_data().get("comm_hook"):
        raise ConfigurationError(
            f"this DDP model has a communication hook already ({name}), and DDP takes only one; wrap the module in a "
            f"new DistributedDataParallel to change it"
        )


def _advice(model: object) -> str:
    """Return advice for a model that attach does not take."""
    kinds = {kind.__name__ for kind in type(model).__mro__}
    if "FullyShardedDataParallel" in kinds:
        return " or one of FSDP2; FSDP1 is not supported: use torch.distributed.fsdp.fully_shard on a mesh of replicas"
    if "DataParallel" in kinds:
        return "; DataParallel has no processes to communicate between: use DistributedDataParallel"
    if not dist.is_initialized():  # as a framework trains with one device
        return ", and this process trains alone: start one for each device, with torchrun or as the framework does"
    if hasattr(model, "register_comm_hook"):  # torch.distributed._composable.replicate
        return "; register the hook with model.register_comm_hook(commopt.HookState(module=model), commopt.quantized)"
    return (
        "; wrap it first: commopt.attach(commopt.DistributedDataParallel(model), ...), or shard it: "
        "torch.distributed.fsdp.fully_shard(model, mesh=...)"
    )


def _require_same_ranks(ddp: TorchDDP, state: HookState) -> None:
    """Refuse a state over other ranks than DDP's: it would mix the gradients of different shards.

    Collective for a state that has not joined the others yet.
    """
    if state._registration.joined is None:
        state._registration.join(ddp.process_group)
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if sorted(state.membership.ranks) != sorted(ranks):
        raise ConfigurationError(
            f"the HookState spans ranks {sorted(state.membership.ranks)} and the DDP model ranks {sorted(ranks)}; make "
            f"it with HookState(process_group=ddp.process_group)"
        )


def _aggregator_from(choice: object, options: dict[str, Any]) -> Aggregator:
    if isinstance(choice, str):
        return build_preset(choice, **options)
    if isinstance(choice, Preset):
        return choice.build(**options)
    if not isinstance(choice, Aggregator):
        raise ConfigurationError(
            f"{choice!r} is neither an aggregator, a preset nor a preset's name; pass for example commopt.hierarchical"
        )
    if options:
        raise ConfigurationError(
            f"{choice} is complete already and takes no options, got {', '.join(options)}; attach takes "
            f"{', '.join(sorted(OPTIONS))}"
        )
    return choice
