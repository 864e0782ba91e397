# SPDX-License-Identifier: Apache-2.0
"""The rounds of a LocalSGD: parameters leave before a forward, and come back before one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.aggregate import Aggregator, LocalSGD, context_for
from commopt.errors import ConfigurationError
from commopt.feedback import BufferContext, Piece, ResidualStore
from commopt.feedback.checkpoint import field, refuse
from commopt.groups import WireBytes
from commopt.hooks.parcels import Named, Parcel, fragments_of, parcels_of
from commopt.lanes import LaneClient, Work
from commopt.schedule import reducer

_log = logging.getLogger("commopt")


@dataclass(eq=False)
class _Flight:
    """A parcel on its way. values: once `work` has ended, what to put in its place, or with `adds` to add to it."""

    parcel: Parcel
    values: Tensor
    adds: bool
    work: Work | None = None

    def end(self) -> Tensor:
        """Return the values, once they are there."""
        if self.work is not None:
            self.work.wait()
        return self.values


Underway = dict[int, list[_Flight]]  # by fragment


class ParameterAverages:
    """The parameters of one model that a LocalSGD averages, and what that has sent.

    read: returns those whose gradients are averaged, or what this rank has of them, always under the same names.
    pieces: what those are that are not whole. store: keeps what nodes agreed on and residuals. client: this rank among
    those that have the same of them, None before it has joined them. steps: how many are complete; whoever counts them
    tells. A forward of `module` with gradients first sees to what is due; an evaluation under no_grad() does not: one
    rank may evaluate alone.
    """

    def __init__(
        self,
        average: LocalSGD,
        module: nn.Module | None,
        read: Callable[[], Named],
        store: ResidualStore,
        pieces: Mapping[str, Piece] | None = None,
    ) -> None:
        self.sent = WireBytes()
        self.times = 0
        self.steps = 0
        self.client: LaneClient | None = None
        self._average = average
        self._module = None if module is None else ref(module)
        self._read = read
        self._pieces = pieces or {}
        # Chosen once: what is frozen later has become different on the nodes all the same.
        self._fragments = fragments_of(read(), average.fragments)
        self._store = store
        self._anchored = not average.parameters.residual_paths
        self._underway: Underway = {}
        self._turn = -1  # the steps before the last one
        if not self._anchored:
            _require_float32_holds(average, read())
        if module is not None:  # before FSDP's own, which gathers the parameters
            hook = module.register_forward_pre_hook(_BeforeForward(self), prepend=True)
            finalize(self, hook.remove).atexit = False

    def take_turn(self) -> None:
        """Do what is due and not done; all ranks must ask before the next step.

        Returns when the parameters are there (on CUDA: for the current stream). Raises ConfigurationError when the
        model is not known, or a CUDA graph is captured that would repeat what is not due.
        """
        average, steps, client = self._average, self.steps, self.client
        if self._module is None:
            raise ConfigurationError(
                f"{average} averages parameters and does not know the model; use commopt.attach(ddp, ...), or "
                f"HookState(aggregator, module=ddp.module)"
            )
        if client is None or self._turn == steps:
            return
        begins = not self._anchored and steps >= average.start_step
        leave, land = average.due(steps), average.due(steps - average.delay)
        if not (begins or leave or land):
            return
        if reducer.is_capturing():
            average.check_capture(steps, client.team)
        self._turn = steps
        if client.team.node_count == 1:
            return
        if begins:
            self._drop_anchor(client)
        for fragment in leave:
            self._underway[fragment] = [
                self._send(client, parcel, by, average.round_after(steps)) for parcel, by in self._parcels(fragment)
            ]
        for fragment in land:
            self._land(fragment)

    def run(self, client: LaneClient) -> None:
        """Take the exact mean now, whatever is due and without changing it; collective. Returns as `take_turn` does."""
        if client.team.node_count == 1:
            return
        for fragment in list(self._underway):
            self._land(fragment)
        flights = [
            self._send(client, parcel, self._average.exact, 0, adds=False)
            for parcel in parcels_of({**self._read(), **self._buffers()}, self._pieces)
        ]
        for flight in flights:
            flight.parcel.put(flight.end())
        self.times += 1

    # ------------------------------------------------------------------------------------- rounds

    def _drop_anchor(self, client: LaneClient) -> None:
        """Keep the parameters, which are those of all nodes now, as agreed on."""
        average, alone, by = self._average, client.team.intra, self._average.parameters
        flights = []
        for fragment in range(average.fragments):
            for parcel in parcels_of(self._tensors(fragment), self._pieces):
                values = parcel.values(copy=True)
                if alone is not None and alone.rank > 0:  # the sum over a node is to be what one rank holds, exactly
                    values.zero_()
                flights.append(self._submit(client, _Flight(parcel, values, adds=False), by, 0, 1.0))
        for flight in flights:
            flight.end()
        self._anchored = True

    def _send(
        self, client: LaneClient, parcel: Parcel, by: Aggregator, number: int, adds: bool | None = None
    ) -> _Flight:
        average = self._average
        if adds is None:
            adds = average.delay > 0 or average.merge < 1
        flight = _Flight(parcel, parcel.values(copy=adds), adds)
        # Over all ranks though those of a node agree: in DDP's join() they may not, and inside a node it is cheap.
        return self._submit(client, flight, by, number, 1.0 / client.team.size)

    def _submit(self, client: LaneClient, flight: _Flight, by: Aggregator, number: int, scale: float) -> _Flight:
        """Let the lane do a flight, of round `number` of its parcel."""
        parcel, values, team, store = flight.parcel, flight.values, client.team, self._store
        before = values.clone() if flight.adds else None

        def exchange() -> None:
            context = BufferContext.unremembered(values.numel())
            if by.residual_paths:
                store.begin_step()
                context = context_for(by, parcel.layout, team, store, number, rank=team.ranks[team.rank])
            by.all_reduce(values, team, scale, context)
            if by.residual_paths:
                store.end_bucket([values], last=True)
            if before is not None:
                values.sub_(before)

        inputs = () if before is None else (before,)
        flight.work = client.submit("average of the parameters", exchange, values, inputs, values.numel())
        self.sent += by.wire_bytes(parcel.layout, parcel.dtype, team, parcel.device, number)
        return flight

    def _land(self, fragment: int) -> None:
        """Wait for a round, and let the model have what came of it."""
        flights = self._underway.pop(fragment, ())
        for flight in flights:
            values = flight.end()
            if flight.adds:
                flight.parcel.add(values, self._average.merge)
            else:
                flight.parcel.put(values)
        self.times += bool(flights)

    def _parcels(self, fragment: int) -> list[tuple[Parcel, Aggregator]]:
        """Return what travels in a round, and by what: buffers with the last fragment, always exactly."""
        average, tensors, pieces = self._average, self._tensors(fragment), self._pieces
        buffers = self._buffers() if fragment == average.fragments - 1 else {}
        if average.parameters is average.exact:
            return [(parcel, average.exact) for parcel in parcels_of({**tensors, **buffers}, pieces)]
        own = [(parcel, average.parameters) for parcel in parcels_of(tensors, pieces)]
        return [*own, *((parcel, average.exact) for parcel in parcels_of(buffers, pieces))]

    def _tensors(self, fragment: int) -> Named:
        everything = self._read()
        return {name: everything[name] for name in self._fragments[fragment]}

    def _buffers(self) -> dict[str, Tensor]:
        module = None if self._module is None else self._module()
        if module is None or not self._average.buffers:
            return {}
        # By the names that DDP goes by for buffers. Asked each time: a module may put other tensors in their place.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        return {name: b for name, b in module.named_buffers() if b.is_floating_point() and name not in ignored}

    # ------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside the store: whether that has what was agreed on, and what is under way.

        The latter by name, in host memory: what is to be added when the round is over.
        """
        underway: dict[str, Tensor] = {}
        for flight in (flight for flights in self._underway.values() for flight in flights):
            parts = flight.parcel.parts(flight.end())
            underway |= {name: part.detach().to("cpu", copy=True) for name, part in parts.items()}
        return {"anchored": self._anchored, "underway": underway}

    def read(self, saved: Mapping[str, Any]) -> tuple[bool, Underway]:
        """Return what `state` returned as what `begin_anew` takes; raises ConfigurationError for what is damaged."""
        anchored, values = field(saved, "anchored", bool, "rounds"), dict(field(saved, "underway", dict, "rounds"))
        underway: Underway = {}
        for fragment in range(self._average.fragments):
            for parcel, _ in self._parcels(fragment):
                if values.keys().isdisjoint(parcel.tensors):
                    continue
                parts = [_part(values.pop(name, None), name, tensor) for name, tensor in parcel.tensors.items()]
                joined = torch.cat([each.reshape(-1).to(parcel.device, parcel.dtype) for each in parts])
                underway.setdefault(fragment, []).append(_Flight(parcel, joined, adds=True))
        if values:
            refuse("a name in rounds['underway']", next(iter(values)), "one of the model's")
        return anchored or not self._average.parameters.residual_paths, underway

    def begin_anew(self, steps: int, store: ResidualStore, rounds: tuple[bool, Underway] | None) -> None:
        """Go on after `steps` steps: the parameters are a checkpoint's now. rounds: None for one of another world.

        There nodes agree on the parameters as they are then.
        """
        self.steps, self._turn, self._store = steps, -1, store
        self._anchored, self._underway = rounds or (not self._average.parameters.residual_paths, {})


def _part(values: object, name: str, tensor: Tensor) -> Tensor:
    if not isinstance(values, Tensor) or values.shape != tensor.shape or not values.isfinite().all():
        refuse(f"rounds['underway'][{name!r}]", values, f"a finite tensor of shape {list(tensor.shape)}")
    return values


def _require_float32_holds(average: LocalSGD, parameters: Named) -> None:
    for name, parameter in parameters.items():
        if parameter.dtype == torch.float64:
            raise ConfigurationError(
                f"{average} keeps what nodes agreed on in float32, and parameter {name!r} is torch.float64; use "
                f"float32 parameters, or a LocalSGD without outer and compressor, which is exact"
            )


def warn_of_broadcasts(aggregator: Aggregator, ddp: TorchDDP) -> None:
    """Say it when DDP will send buffers between the nodes in every forward."""
    if isinstance(aggregator, LocalSGD) and ddp.broadcast_buffers and any(True for _ in ddp.module.buffers()):
        _log.warning(
            "DDP broadcasts this model's buffers from rank 0 in every forward, between nodes too; use "
            "DistributedDataParallel(..., broadcast_buffers=False) and LocalSGD(buffers=True)"
        )


class _BeforeForward:
    """A forward pre-hook of the module DDP wraps; a copy of it, in a copied or saved model, does nothing.

    Unlike the DDP model's it is called under torch.compile, and in any form of registration.
    """

    def __init__(self, averages: ParameterAverages) -> None:
        found = ref(averages)

        def call_if_alive() -> None:
            alive = found()
            if alive is not None:
                alive.take_turn()

        # Traced, it would be compiled anew whenever a counter in it changes.
        self._call: Callable[[], None] | None = torch.compiler.disable(call_if_alive)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._call is not None and torch.is_grad_enabled():
            self._call()

    def __getstate__(self) -> dict[str, Any]:
        return {"_call": None}
