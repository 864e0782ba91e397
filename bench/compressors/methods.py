# SPDX-License-Identifier: Apache-2.0
"""What can be timed: something that averages the buckets of a step; commopt's presets in a team that sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias
from weakref import ref

import torch
from torch import Tensor

from bench.compressors.lone_hook import LoneHook
from commopt import Aggregator, build_preset
from commopt.aggregate import Buffer, Call
from commopt.feedback import Layout
from commopt.groups import TeamShape
from commopt.simulate import ddp_buckets, gpu, model, of_model

Start: TypeAlias = Callable[[int], Callable[[], object]]
"""Begins to average a bucket, by its number; what it returns waits for the end of that, as DDP does after backward."""


@dataclass(frozen=True)
class Method:
    """enter: gets ready for the steps of a model, from nothing.

    payload_nbytes: bytes per step that it hands to collectives between nodes, the mean of two steps.
    lead_steps: how many steps it sends dense before it compresses.
    replay: whether it may replay CUDA graphs; None for what never does.
    replayed: how many buckets of the steps entered last were replayed.
    """

    name: str
    enter: Callable[[Gradients], Start]
    payload_nbytes: Callable[[Gradients], float]
    lead_steps: int = 0
    replay: bool | None = None
    replayed: Callable[[], int] = lambda: 0

    @property
    def label(self) -> str:
        """The name, and what else tells it from others."""
        return f"{self.name}, no replay" if self.replay is False else self.name


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
        self.model = model
        self.layouts = layouts
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        self.values = [torch.randn(layout.numel, generator=generator, device=device) for layout in layouts]
        self.buffers = [values.clone() for values in self.values]

    def renew(self) -> None:
        """Put the values back, as a backward does for the next step."""
        for buffer, values in zip(self.buffers, self.values, strict=True):
            buffer.copy_(values)


class Bucket:
    """What hooks use of DDP's GradBucket, which Python cannot make."""

    def __init__(self, gradients: Gradients, number: int) -> None:
        self._buffer = gradients.buffers[number]
        self._number = number
        self._last = number + 1 == len(gradients.buffers)
        layout = gradients.layouts[number]
        parts = self._buffer.split([piece.numel for piece in layout.pieces])
        self._gradients = [part.view(piece.shape) for part, piece in zip(parts, layout.pieces, strict=True)]
        self._parameters = [torch.empty(piece.shape, device="meta") for piece in layout.pieces]  # nobody reads them

    def index(self) -> int:
        """Number of the bucket."""
        return self._number

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, in the shapes of the parameters."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """What the gradients are of."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last of a step."""
        return self._last


RANKS_PER_NODE = (2, 2)


def preset(text: str) -> Method:
    """Return the method that "name" or "name:option=value" describes; raises ConfigurationError as build_preset.

    It goes the way of training: DDP's hook, its message and the lane.
    """
    aggregator = build_preset(text)
    latest: list[ref[LoneHook]] = []  # weak: what it keeps is not to be there when another method is measured

    def enter(gradients: Gradients) -> Start:
        hook = LoneHook(aggregator, RANKS_PER_NODE, gradients.device)
        latest[:] = [ref(hook)]
        buckets = [Bucket(gradients, number) for number in range(len(gradients.buffers))]
        return lambda number: hook(buckets[number]).wait

    def replayed() -> int:
        hook = latest[0]() if latest else None
        return 0 if hook is None else hook.replayed

    return Method(
        text, enter, lambda gradients: _payload_nbytes(aggregator, gradients), aggregator.start_step, True, replayed
    )


def without_replay(method: Method) -> Method:
    """Return the same one, to be measured where every kernel is launched by itself."""
    return replace(method, replay=False)


def _payload_nbytes(aggregator: Aggregator, gradients: Gradients) -> float:
    backend = "nccl" if gradients.device.type == "cuda" else "gloo"
    team = TeamShape.of(RANKS_PER_NODE, 0, {gradients.device.type: backend})
    first = aggregator.start_step
    return sum(
        each.nbytes
        for layout in gradients.layouts
        for each in aggregator.calls(Buffer(layout, torch.float32, gradients.device, first), team)
        if isinstance(each, Call) and each.level != "intra"
    )
