"""Put a hook on a DDP model: `attach` for torch's class, a subclass of it for the one-argument form."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator
from commopt.errors import ConfigurationError
from commopt.groups import NcclByLevel
from commopt.hooks.local_sgd import warn_of_broadcasts
from commopt.hooks.presets import STATE_OPTIONS, Preset, build_preset, hook
from commopt.hooks.state import HookState
from commopt.schedule import Plan, Tuned

if TYPE_CHECKING:
    from commopt.cost import Links

PLAN_VARIABLE = "COMMOPT_PLAN"


def attach(
    ddp: TorchDDP,
    choice: Aggregator | Preset | str,
    *,
    process_group: Any = None,
    ranks_per_node: int | None = None,
    scaler: Any = None,
    timeout: float | timedelta | None = None,
    plan: Plan | str | Path | None = None,
    links: Links | str | Path | None = None,
    needed_first: bool = False,
    record: bool = False,
    tuned: Tuned | str | Path | None = None,
    nccl: NcclByLevel | None = None,
    **preset_options: Any,
) -> HookState:
    """Average the gradients of `ddp` with an aggregator, a preset or a preset's name; return the hook's state.

    A name may carry options of its own: "hierarchical_quantized:bits=4"; `preset_options` are those of a preset, as in
    attach(ddp, "hierarchical_quantized", bits=4). The other options are HookState's; process_group is DDP's by default,
    plan what COMMOPT_PLAN says. Collective over DDP's process group. Raises ConfigurationError when `ddp` is no DDP
    model, has a hook already, or an option or a name is unknown, UnsupportedTensorError when a parameter's gradient
    could not be averaged.
    """
    _require_free(ddp)
    aggregator = _aggregator_from(choice, preset_options)
    state = HookState(
        aggregator,
        ddp.process_group if process_group is None else process_group,
        ranks_per_node=ranks_per_node,
        module=ddp.module,
        scaler=scaler,
        timeout=timeout,
        plan=plan if plan is not None else os.environ.get(PLAN_VARIABLE) or None,
        links=links,
        needed_first=needed_first,
        record=record,
        tuned=tuned,
        nccl=nccl,
    )
    try:
        _require_same_ranks(ddp, state)
        warn_of_broadcasts(aggregator, ddp)
        ddp._comm_hooks.clear()
        TorchDDP.register_comm_hook(ddp, state, hook)
        _connect(ddp, state)
    except BaseException:
        state.withdraw()
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
                state.know(self.module)
            super().register_comm_hook(state, registered)
            if isinstance(state, HookState):
                state.serve(self)  # the forward hooks came with the pickle


class BeforeForward:
    """A forward pre-hook of the DDP model, which tells the state; pickled with it."""

    def __init__(self, state: HookState) -> None:
        self._state = state

    def __call__(self, ddp: TorchDDP, inputs: Any) -> None:
        """Pass it on, if a backward may follow. Not while a compiler looks: the next hook call sees to the rest."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._state.before_forward(sends=ddp.require_backward_grad_sync)


def _connect(ddp: TorchDDP, state: HookState) -> None:
    """Let the state know its model, and its forwards."""
    state.serve(ddp)
    ddp.register_forward_pre_hook(BeforeForward(state))


def _require_free(ddp: object) -> None:
    if not isinstance(ddp, TorchDDP):
        raise ConfigurationError(
            f"attach got a {type(ddp).__name__}, not a DistributedDataParallel model; wrap it first: "
            f"commopt.attach(commopt.DistributedDataParallel(model), ...)"
        )
    # Not `ddp._comm_hooks`: torch.load fills it in again, though the model it returns has no hook.
    if name := ddp._get_ddp_logging_data().get("comm_hook"):
        raise ConfigurationError(
            f"this DDP model has a communication hook already ({name}), and DDP takes only one; wrap the module in a "
            f"new DistributedDataParallel to change it"
        )


def _require_same_ranks(ddp: TorchDDP, state: HookState) -> None:
    """Refuse a state over other ranks than DDP's: it would mix the gradients of different shards.

    Collective for a state that has not joined the others yet.
    """
    state.join(ddp.process_group)
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if sorted(state.membership.ranks) != sorted(ranks):
        raise ConfigurationError(
            f"the HookState spans ranks {sorted(state.membership.ranks)} and the DDP model ranks {sorted(ranks)}; make "
            f"it with HookState(process_group=ddp.process_group)"
        )


def _aggregator_from(choice: Aggregator | Preset | str, options: dict[str, Any]) -> Aggregator:
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
            f"{', '.join(sorted(STATE_OPTIONS))}"
        )
    return choice
