"""Put a hook on a DDP model: `attach` for torch's class, a subclass of it for the one-argument form."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator
from commopt.errors import ConfigurationError
from commopt.hooks.forward import watch_forwards
from commopt.hooks.periodic import warn_of_broadcasts
from commopt.hooks.preset import STATE_OPTIONS, Preset, hook
from commopt.hooks.presets import build_preset
from commopt.hooks.state import HookState

Choice = Aggregator | Preset | str

PLAN_VARIABLE = "COMMOPT_PLAN"


def attach(ddp: TorchDDP, choice: Choice, **options: Any) -> HookState:
    """Average the gradients of `ddp` with an aggregator, a preset or a preset's name; return the hook's state.

    A name may carry options of its own: "hierarchical_quantized:bits=4". Other options are HookState's (process_group,
    ranks_per_node, scaler, timeout, plan, links, record, nccl) and those of the preset. COMMOPT_PLAN stands for `plan`
    where it is left out. Collective over DDP's process group. Raises ConfigurationError when `ddp` is no DDP model,
    has a hook already, or an option or a name is unknown, UnsupportedTensorError when a parameter's gradient could not
    be averaged.
    """
    _require_free(ddp)
    for_state = {name: value for name, value in options.items() if name in STATE_OPTIONS}
    for_preset = {name: value for name, value in options.items() if name not in STATE_OPTIONS}
    aggregator = _aggregator_from(choice, for_preset)
    defaults: dict[str, Any] = {"process_group": ddp.process_group}
    defaults["plan"] = os.environ.get(PLAN_VARIABLE) or None
    state = HookState(aggregator, **defaults | for_state, module=ddp.module)
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

        Raises ConfigurationError for a second registration, or for a preset with a state that is no HookState.
        """
        if hook is None and isinstance(state, (Aggregator, Preset, str)):
            attach(self, state)
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


def _connect(ddp: TorchDDP, state: HookState) -> None:
    """Let the state know its model, and its forwards."""
    state.serve(ddp)
    watch_forwards(ddp, state)


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


def _aggregator_from(choice: Choice, options: dict[str, Any]) -> Aggregator:
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
