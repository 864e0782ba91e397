"""Notice training loops in which error feedback cannot do what it promises, and say so once."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch import Tensor, nn

_log = logging.getLogger("commopt")


def warn_of_unknown_scaler() -> None:
    """Warn when a GradScaler is in use somewhere that no HookState was told of."""
    for thing in gc.get_objects():
        # By type: isinstance would ask weak proxies, which raise when what they stand for is gone.
        if issubclass(type(thing), torch.amp.GradScaler) and thing.is_enabled() and thing._scale is not None:
            _log.warning(
                "a GradScaler is in use and HookState(scaler=None) does not know it: residuals would stay at the old "
                "scale when it changes, and be kept from steps it drops; pass scaler=scaler, or assign state.scaler"
            )
            return


class ReducedGradients:
    """Warns, once, when a backward adds to gradients that were averaged already.

    DDP would average old and new gradients together; lossless averages stand that, residuals count them twice. A
    forward pre-hook notes how often a gradient was written to, the last bucket sees whether nothing but one addition
    came after. A copy of the hook, in a copied or saved model, does nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self._armed = False
        self._noted: tuple[nn.Parameter, Tensor, int] | None = None
        self._handle = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Note the state of one gradient at the first forward after a reduced step."""
        if torch.compiler.is_compiling() or not self._armed or not torch.is_grad_enabled():
            return
        self._armed = False
        parameter = next((p for p in module.parameters() if p.grad is not None), None)
        if parameter is not None and parameter.grad is not None:
            self._noted = (parameter, parameter.grad, parameter.grad._version)

    def step_is_reduced(self) -> None:
        """Look, when the last bucket of a step comes by."""
        self._armed, noted, self._noted = True, self._noted, None
        if noted is None:
            return
        parameter, gradient, version = noted
        # zero_grad() would have put another tensor there, or written to this one a second time.
        if parameter.grad is gradient and gradient._version == version + 1:
            _log.warning(
                "this backward adds to gradients that were averaged already: accumulate under ddp.no_sync() and call "
                "optimizer.zero_grad() after each step, or error feedback counts them twice"
            )
            self._handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {"_armed": False, "_noted": None}
