"""The gradients of a model, in the buckets that DDP makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commopt.feedback import Layout
from commopt.simulate import ddp_buckets, gpu, model, of_model


def layouts_of(name: str) -> tuple[Layout, ...]:
    """Return what lies in each bucket of one of commopt.simulate's models, in the order of backward.

    Raises ConfigurationError when there is no such model.
    """
    workload = of_model(model(name), gpu("h200"), batch=1)  # for the order alone
    shapes = {piece.name: piece.shape for piece in workload.layout.pieces}
    return tuple(
        Layout.of_parameters((name, shapes[name]) for unit in bucket for name in unit.names)
        for bucket in ddp_buckets(workload.units)
    )


class Gradients:
    """Buckets of float32 on a device.

    values: what each backward leaves, normal numbers. buffers: where it leaves them, to be averaged in place.
    """

    def __init__(self, model: str, layouts: Sequence[Layout], device: torch.device) -> None:
        self.model, self.layouts, self.device = model, layouts, device
        generator = torch.Generator(device).manual_seed(0)
        self.values = [torch.randn(layout.numel, generator=generator, device=device) for layout in layouts]
        self.buffers = [values.clone() for values in self.values]

    def renew(self) -> None:
        """Put the values back, as a backward does for the next step."""
        for buffer, values in zip(self.buffers, self.values, strict=True):
            buffer.copy_(values)
