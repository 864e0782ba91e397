"""Be told of what a script does with DDP models and GradScalers, while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.run.models import Models


@contextmanager
def watching(models: Models) -> Iterator[None]:
    """Tell `models` of every forward of a DDP model and of every loss that is scaled.

    Classes are patched, not objects: nothing of it is in a model that is copied or saved.
    """
    call, scale = TorchDDP.__call__, torch.amp.GradScaler.scale
    # A compiler that looks into a step must not look in here.
    before_forward = torch.compiler.disable(models.before_forward)
    notice = torch.compiler.disable(models.scalers.notice)

    @wraps(call)
    def watched_call(ddp: TorchDDP, *inputs: Any, **kwargs: Any) -> Any:
        before_forward(ddp)
        return call(ddp, *inputs, **kwargs)

    @wraps(scale)
    def watched_scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        notice(scaler)
        return scale(scaler, outputs)

    # Only the call itself is kept from a compiler, not the model in it.
    _put(TorchDDP, "__call__", torch.compiler.disable(watched_call, recursive=False))
    _put(torch.amp.GradScaler, "scale", watched_scale)
    try:
        yield
    finally:
        _put(torch.amp.GradScaler, "scale", scale)
        delattr(TorchDDP, "__call__")  # torch's own is nn.Module's


def _put(kind: type, name: str, function: Any) -> None:
    setattr(kind, name, function)
