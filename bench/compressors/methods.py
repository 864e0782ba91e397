# SPDX-License-Identifier: Apache-2.0
"""What can be timed: something that averages the buckets of a step; commopt's presets in a team that sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from bench.compute_only import LoneRank
from commopt import Aggregator, build_preset
from commopt.aggregate import Buffer, Call
from commopt.feedback import Layout
from commopt.simulate import ddp_buckets, gpu, model, of_model

Start: TypeAlias = Callable[[int], Callable[[], object]]
"""Begins to average a bucket, by its number; what it returns waits for the end of that, as DDP does after backward."""


@dataclass(frozen=True)
class Method:
    """enter: gets ready for the steps of a model, from nothing.

    payload_nbytes: bytes per step that it hands to collectives between nodes, the mean of two steps.
    lead_steps: how many steps it sends dense before it compresses.
    """

    name: str
    enter: Callable[[Gradients], Start]
    payload_nbytes: Callable[[Gradients], float]
    lead_steps: int = 0


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


RANKS_PER_NODE = (2, 2)


def preset(text: str) -> Method:
    """Return the method that "name" or "name:option=value" describes; raises ConfigurationError as build_preset."""
    aggregator = build_preset(text)

    def enter(gradients: Gradients) -> Start:
        rank = LoneRank(aggregator, gradients.layouts, RANKS_PER_NODE, device=gradients.device)

        def start(number: int) -> Callable[[], None]:
            rank.reduce(number, gradients.buffers[number])
            return _nothing_to_wait_for

        return start

    return Method(text, enter, lambda gradients: _payload_nbytes(aggregator, gradients))


def _nothing_to_wait_for() -> None:
    """The next step's work follows on the same stream."""


def _payload_nbytes(aggregator: Aggregator, gradients: Gradients) -> float:
    team = LoneRank(aggregator, gradients.layouts, RANKS_PER_NODE, device=gradients.device).team
    first = aggregator.start_step
    return sum(
        each.nbytes
        for layout in gradients.layouts
        for each in aggregator.calls(Buffer(layout, torch.float32, gradients.device, first), team)
        if isinstance(each, Call) and each.level != "intra"
    )
