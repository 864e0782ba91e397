"""Tell a HookState that a forward begins, when DDP can be given other buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.hooks.state import HookState


class BeforeForward:
    """A forward pre-hook of the DDP model; pickled with it."""

    def __init__(self, state: HookState) -> None:
        self._state = state

    def __call__(self, ddp: TorchDDP, inputs: Any) -> None:
        """Pass it on, if a backward may follow. Not while a compiler looks: the next hook call sees to the rest."""
        if _is_seen():
            self._state.before_forward(sends=ddp.require_backward_grad_sync)


def watch_forwards(ddp: TorchDDP, state: HookState) -> None:
    """Let `state` hear of all forwards of `ddp`."""
    ddp.register_forward_pre_hook(BeforeForward(state))


def _is_seen() -> bool:
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()
