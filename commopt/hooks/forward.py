"""Tell a HookState that a forward begins: the moment between two steps in which DDP can be given other buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from commopt.hooks.state import HookState


class BeforeForward:
    """A forward pre-hook of the DDP model; pickled with it."""

    def __init__(self, state: HookState) -> None:
        self._state = state

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Pass it on, if a backward may follow. Not while a compiler looks: the next hook call sees to the rest."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._state.before_forward()
