# SPDX-License-Identifier: Apache-2.0
"""The server's parameters and outer momentum, and their update by a round. Nothing here waits or locks."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate import Outer
from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.feedback import Layout
from commopt.feedback.checkpoint import field, refuse, require_format, required, whole
from commopt.server.settings import ParameterServer
from commopt.server.wire import Wire

Named = Mapping[str, Tensor]

FORMAT = 1


@dataclass(frozen=True)
class Delta:
    """A worker's delta.

    base: the round it was trained from.
    weight: the work done for it.
    payloads: payload of each bucket.
    """

    base: int
    weight: float
    payloads: Sequence[Tensor]


class SharedParameters:
    """The parameters (theta) by bucket, float32 on the CPU, and the outer momentum.

    Without a compressor workers send their parameters rather than the difference, so that a mean of parameters is
    rounded once only. Tensors are replaced and never changed, so a thread may send one while a round closes.

    exact: theta.
    public: the parameters that the workers of this round have. With a compressor theta - public is still unsent.
    update: payloads that lead from the public parameters of the round before to these; None without a compressor.
    round: number of rounds closed.
    done: sum of the weights of all deltas applied.
    """

    def __init__(self, settings: ParameterServer, layouts: Sequence[Layout], values: Sequence[Tensor]) -> None:
        self.settings = settings
        self.wires = [Wire(layout, settings.compressor) for layout in layouts]
        self.round = 0
        self.done = 0.0
        self.exact = list(values)
        self.public = list(values)
        self.update: list[Tensor] | None = None
        self._momentum = [torch.zeros_like(each) for each in values] if settings.outer.momentum else []
        self._earlier: dict[int, list[Tensor]] = {}  # rounds that workers still train from; without a compressor

    # ------------------------------------------------------------------------------------- rounds

    def parameters_of_round(self, base: int) -> Sequence[Tensor]:
        """Return the parameters of a round that `has_round` confirms; with a compressor the present ones, as unused."""
        return self.exact if self.settings.compressor is not None or base == self.round else self._earlier[base]

    def delta_norm(self, delta: Delta, start: Sequence[Tensor]) -> float:
        """Return the L2 norm of a delta. Changes nothing, so it needs no lock.

        Raises UnsupportedTensorError for a delta that cannot be decoded, or is not finite.

        start: result of `parameters_of_round` for the delta's base.
        """
        square = 0.0
        for place, (wire, payload) in enumerate(zip(self.wires, delta.payloads, strict=True)):
            try:
                values = wire.decode(payload, delta.base)
            except Exception as error:  # a decoder may raise anything for bytes that no encoder wrote
                raise UnsupportedTensorError(f"the delta cannot be decoded: {type(error).__name__}: {error}") from None
            if self.settings.compressor is None:
                values.sub_(start[place])
            square += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            if not math.isfinite(square):
                name = _nonfinite_piece(wire.layout, values)
                raise UnsupportedTensorError(f"the delta of parameter {name!r} is not finite")
        return math.sqrt(square)

    def norm(self) -> float:
        """Return the L2 norm of the parameters."""
        return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in self.exact))

    def has_round(self, base: int) -> bool:
        """Return whether a delta from this round can be decoded."""
        return self.settings.compressor is not None or base == self.round or base in self._earlier

    def close(self, deltas: Sequence[Delta], bases: Collection[int]) -> None:
        """Close a round: apply the weighted mean of `deltas`, added in their order.

        Raises UnsupportedTensorError, and changes nothing, when the parameters would not be finite.

        bases: rounds from which deltas may still come.
        """
        settings, total = self.settings, math.fsum(delta.weight for delta in deltas)
        exact: list[Tensor] = []
        momentum: list[Tensor] = []
        for place, theta in enumerate(self.exact):
            mean: Tensor | None = None
            for delta in deltas:
                part = self._weighted_delta(delta, place, theta, delta.weight / total)
                mean = part if mean is None else mean.add_(part)
            assert mean is not None  # a round has a delta
            if not self._averages_parameters:
                delta_mean, mean = mean, torch.empty_like(theta)
                if self._momentum:
                    momentum.append(torch.empty_like(theta))
                    settings.outer.step(theta, delta_mean, mean, self._momentum[place], momentum[place])
                else:
                    settings.outer.step(theta, delta_mean, mean)
            exact.append(mean)
        public, update = (exact, None) if settings.compressor is None else self._encode_update(exact)
        for each in (*exact, *momentum, *public):
            if not _is_finite(each):
                raise UnsupportedTensorError(f"the parameters would not be finite after round {self.round}")
        # From here on nothing can fail.
        if settings.compressor is None:
            self._earlier[self.round] = self.exact
        self.exact = exact
        self._momentum = momentum
        self.public = public
        self.update = update
        self.round, self.done = self.round + 1, self.done + total
        for old in [each for each in self._earlier if each not in bases or self.round - each > settings.staleness]:
            del self._earlier[old]

    def memory(self) -> dict[str, int]:
        """Return the bytes of the tensors held, by kind."""
        sent = 0 if self.update is None else _nbytes(self.update) + _nbytes(self.public)
        earlier = sum(map(_nbytes, self._earlier.values()))
        return {
            "parameters": _nbytes(self.exact),
            "momentum": _nbytes(self._momentum),
            "sent": sent,
            "earlier_rounds": earlier,
        }

    @property
    def _averages_parameters(self) -> bool:
        return self.settings.compressor is None and self.settings.outer == Outer()

    def _weighted_delta(self, delta: Delta, place: int, theta: Tensor, share: float) -> Tensor:
        """Return a worker's term of the mean of deltas, or of parameters."""
        values = self.wires[place].decode(delta.payloads[place], delta.base)
        if self.settings.compressor is not None:
            return values.mul_(share)
        if delta.base != self.round:  # its change, added to the parameters that have changed since
            values.sub_(self._earlier[delta.base][place]).add_(theta)
        if self._averages_parameters:
            return values.mul_(share)
        # Not `alpha=`, as in Deltas: the delta of what nobody has changed is to be exactly zero.
        return values.mul_(-share).add_(theta * share)

    def _encode_update(self, exact: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the workers' next parameters and the payloads of the update; theta - public keeps the residual."""
        update, public = [], []
        for wire, theta, known in zip(self.wires, exact, self.public, strict=True):
            change = theta - known
            payload, _ = wire.encode(change, self.round, torch.zeros_like(change))
            update.append(payload)
            public.append(known + wire.decode(payload, self.round))
        return public, update

    # ------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Return format, round, work done, and copies of parameters and momentum by name, in their shapes."""
        return {
            "format": FORMAT,
            "round": self.round,
            "done": self.done,
            "parameters": _to_tensors(self.wires, self.exact),
            "momentum": _to_tensors(self.wires, self._momentum) if self._momentum else {},
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Resume from the result of `state`. Raises ConfigurationError, and changes nothing, if it does not fit."""
        round_number, done = require_saved(saved)
        parameters = _to_buffers(self.wires, field(saved, "parameters", dict), "parameters")
        momentum = field(saved, "momentum", dict)
        moments = _to_buffers(self.wires, momentum, "momentum") if self._momentum and momentum else self._momentum
        self.round = round_number
        self.done = done
        self.exact = parameters
        self._momentum = moments
        self.public = list(parameters)


def require_saved(saved: Mapping[str, Any]) -> tuple[int, float]:
    """Return "round" and "done" of a result of `state`, for any model.

    Raises ConfigurationError for content that fits no model.
    """
    if not isinstance(saved, Mapping):
        refuse("all of it", saved, "a dict")
    require_format(saved.get("format", 1), FORMAT)  # at first it had no number
    parameters, momentum = field(saved, "parameters", dict), field(saved, "momentum", dict)
    if momentum and momentum.keys() != parameters.keys():
        refuse("momentum's keys", list(momentum), f"those of parameters, {reprlib.repr(list(parameters))}")
    for where, named in (("parameters", parameters), ("momentum", momentum)):
        for name, values in named.items():
            what = f"{where}[{name!r}]"
            if not required(values, Tensor, what).is_floating_point() or not _is_finite(values):
                refuse(what, values, "floating, and finite")
            if values.shape != parameters[name].shape:
                refuse(what, values, f"of the parameter's shape, {list(parameters[name].shape)}")
    if not parameters:
        refuse("parameters", parameters, "of one parameter at least")
    done = field(saved, "done", float)
    if not 0 <= done < math.inf:
        refuse("done", done, "a finite number from 0 on")
    return whole(field(saved, "round", int), "round"), done


def _is_finite(values: Tensor) -> bool:
    """Return whether all elements are finite, without another tensor of this length."""
    return not values.numel() or all(bool(each.isfinite()) for each in torch.aminmax(values))


def _nonfinite_piece(layout: Layout, values: Tensor) -> str:
    parts = values.split([piece.numel for piece in layout.pieces])
    odd = (piece.name for piece, part in zip(layout.pieces, parts, strict=True) if not _is_finite(part))
    return next(odd, layout.pieces[0].name)  # if only the square overflows


def _nbytes(values: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in values)


def _to_tensors(wires: Sequence[Wire], values: Sequence[Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for wire, buffer in zip(wires, values, strict=True):
        parts = buffer.split([piece.numel for piece in wire.layout.pieces])
        found |= {
            piece.name: part.view(piece.shape).clone() for piece, part in zip(wire.layout.pieces, parts, strict=True)
        }
    return found


def _to_buffers(wires: Sequence[Wire], named: Mapping[str, Any], where: str) -> list[Tensor]:
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
            if tuple(values.shape) != piece.shape:
                refuse(f"{where}[{piece.name!r}]", values, f"of shape {list(piece.shape)}")
            parts.append(values.detach().reshape(-1).to("cpu", torch.float32))
        found.append(torch.cat(parts))
    return found
