# SPDX-License-Identifier: Apache-2.0
"""What the server holds: the parameters, the outer momentum, and what a round makes of them. Nothing here waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate import Outer
from commopt.errors import ConfigurationError
from commopt.feedback import Layout
from commopt.feedback.checkpoint import field, refuse, required, whole
from commopt.server.settings import ParameterServer
from commopt.server.wire import Wire

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class Delta:
    """What a worker has sent: payloads of each parcel, the round that it trained from, and how much it did."""

    base: int
    weight: float
    payloads: Sequence[Tensor]


class Shared:
    """Parameters (theta) by parcel, float32 on the CPU. `exact` is theta; `public` what the workers of this round have.

    With a compressor these differ: theta - public is what has not been sent yet. Without one workers send where they
    stand rather than how far they came, so that a mean of parameters has no other rounding than itself.
    Tensors are replaced, never changed: who sends some may go on meanwhile.
    """

    def __init__(self, settings: ParameterServer, layouts: Sequence[Layout], values: Sequence[Tensor]) -> None:
        self.settings = settings
        self.wires = [Wire(layout, settings.compressor) for layout in layouts]
        self.round, self.done = 0, 0.0
        self.exact = list(values)
        self.public = list(values)
        self.update: list[Tensor] | None = None  # from the public parameters of the round before to these
        self._momentum = [torch.zeros_like(each) for each in values] if settings.outer.momentum else []
        self._earlier: dict[int, list[Tensor]] = {}  # of rounds that a delta may still be of; without a compressor

    def close(self, deltas: Sequence[Delta]) -> None:
        """End a round: apply the mean of some deltas, none of them older than `staleness`, in their order."""
        settings, total = self.settings, sum(delta.weight for delta in deltas)
        before, self.exact = self.exact, []
        for place, theta in enumerate(before):
            mean: Tensor | None = None
            for delta in deltas:
                part = self._part(delta, place, theta, delta.weight / total)
                mean = part if mean is None else mean.add_(part)
            assert mean is not None  # a round has a delta
            if not self._averages_parameters:
                moments = (self._momentum[place],) * 2 if self._momentum else ()
                delta_mean, mean = mean, torch.empty_like(theta)
                settings.outer.step(theta, delta_mean, mean, *moments)
            self.exact.append(mean)
        if settings.compressor is None:
            self._earlier[self.round] = before
            self.public = self.exact
        else:
            self._publish()
        self.round, self.done = self.round + 1, self.done + total
        for old in [number for number in self._earlier if self.round - number > settings.staleness]:
            del self._earlier[old]

    @property
    def _averages_parameters(self) -> bool:
        return self.settings.compressor is None and self.settings.outer == Outer()

    def _part(self, delta: Delta, place: int, theta: Tensor, share: float) -> Tensor:
        """Return a worker's share of the mean delta, or of the mean of parameters."""
        values = self.wires[place].decode(delta.payloads[place], delta.base)
        if self.settings.compressor is not None:
            return values.mul_(share)
        if delta.base != self.round:  # what it learned, on top of what the others have learned meanwhile
            values.sub_(self._earlier[delta.base][place]).add_(theta)
        if self._averages_parameters:
            return values.mul_(share)
        return values.mul_(-share).add_(theta, alpha=share)

    def _publish(self) -> None:
        """Encode how the parameters have changed for the workers; what that leaves out stays between the two."""
        self.update = []
        public = []
        for wire, theta, known in zip(self.wires, self.exact, self.public, strict=True):
            change = theta - known
            payload, _ = wire.encode(change, self.round, torch.zeros_like(change))
            self.update.append(payload)
            public.append(known + wire.decode(payload, self.round))
        self.public = public

    # ------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Return round, what was done in all, parameters and momentum by name, in their shapes: copies."""
        return {
            "round": self.round,
            "done": self.done,
            "parameters": _named(self.wires, self.exact),
            "momentum": _named(self.wires, self._momentum) if self._momentum else {},
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Raises ConfigurationError, and changes nothing, for what does not fit."""
        parameters = _laid_out(self.wires, field(saved, "parameters", dict), "parameters")
        momentum = field(saved, "momentum", dict)
        moments = _laid_out(self.wires, momentum, "momentum") if self._momentum and momentum else self._momentum
        self.round, self.done = whole(field(saved, "round", int), "round"), field(saved, "done", float)
        self.exact, self._momentum = parameters, moments
        self.public = list(parameters)


def _named(wires: Sequence[Wire], values: Sequence[Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for wire, buffer in zip(wires, values, strict=True):
        parts = buffer.split([piece.numel for piece in wire.layout.pieces])
        found |= {
            piece.name: part.view(piece.shape).clone() for piece, part in zip(wire.layout.pieces, parts, strict=True)
        }
    return found


def _laid_out(wires: Sequence[Wire], named: Mapping[str, Any], where: str) -> list[Tensor]:
    names = [piece.name for wire in wires for piece in wire.layout.pieces]
    if sorted(named) != sorted(names):
        odd = min({*named} ^ {*names})
        raise ConfigurationError(
            f"the checkpoint's {where} {'lack' if odd in names else 'have'} {odd!r}, and the workers' model does "
            f"{'not' if odd not in names else 'have it'}; load the checkpoint of this model, or start without one"
        )
    found = []
    for wire in wires:
        parts = []
        for piece in wire.layout.pieces:
            values = required(named[piece.name], Tensor, f"{where}[{piece.name!r}]")
            if tuple(values.shape) != piece.shape or not values.isfinite().all():
                refuse(f"{where}[{piece.name!r}]", values, f"finite, of shape {list(piece.shape)}")
            parts.append(values.detach().reshape(-1).to("cpu", torch.float32))
        found.append(torch.cat(parts))
    return found
