# SPDX-License-Identifier: Apache-2.0
"""The worker: counts the steps of a model's optimizer, sends what was learned, and takes what all have learned."""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.compress import RngKey
from commopt.errors import CommoptError, ConfigurationError, MismatchError, TransportError, UnsupportedTensorError
from commopt.groups.membership import poll
from commopt.hooks.parcels import Parcel, parcels_of
from commopt.hooks.steps import after_steps
from commopt.server.link import Link
from commopt.server.scheduler import WORKER, Participant
from commopt.server.settings import ADDRESS_VARIABLE, ParameterServer
from commopt.server.wire import Wire
from commopt.version import __version__

_log = logging.getLogger("commopt")

T = TypeVar("T")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Worker:
    """A model that learns beside others, as `commopt.attach(model, ParameterServer(...))` returns it.

    After every `period` steps of its optimizer it does `push()` and `pull()`. With DDP all ranks must call what they
    call alike; the first one talks to the server. An error of that is raised on all of them.

    staleness: how many rounds had closed since this worker pulled, when its last delta came. refused: deltas that were
    too late; they travel with the next one. round: that of the parameters it has.
    """

    def __init__(self, settings: ParameterServer, model: nn.Module) -> None:
        self.staleness, self.refused, self.round = 0, 0, 0
        self._settings = settings
        self._ranks = _Ranks(model.process_group if isinstance(model, TorchDDP) else None)
        self._module = model.module if isinstance(model, TorchDDP) else model
        self._steps, self._did, self._told = 0, 0.0, False
        self._steps_before = 0  # the last push or pull
        self._pushed = self._left_it = False
        self._agreed: list[Tensor] = []  # the parameters pulled last, on this model's device
        self._kept: list[Tensor] = []  # what the deltas before have left out
        self._moved: list[Tensor] = []  # of the delta that is on its way: as a whole, then what it left out
        self._left: list[Tensor] = []
        self._connection: _Connection | None = None
        parcels = self._parcels()
        self._wires = [Wire(parcel.layout, settings.compressor) for parcel in parcels]
        self._ranks.share(lambda: self._join(parcels))
        self.pull()
        after_steps.show(self, Worker._after_step)

    def _join(self, parcels: Sequence[Parcel]) -> None:
        self._connection = _Connection(self._settings, parcels)
        self._kept = [torch.zeros(parcel.layout.numel, device=parcel.device) for parcel in parcels]

    def did(self, amount: float) -> None:
        """Say that so much was done (tokens, samples) since the last call; deltas weigh by it. By default steps count.

        Of a DDP model the first rank's word counts. Raises ConfigurationError for what is not above 0.
        """
        if not isinstance(amount, (int, float)) or isinstance(amount, bool) or not 0 < amount < inf:
            raise ConfigurationError(f"did({amount!r}) must be a number above 0: samples or tokens since the last call")
        self._did, self._told = (self._did if self._told else 0.0) + amount, True

    @property
    def number(self) -> int:
        """That of this worker at the scheduler, which logs go by; -1 where another rank talks to it, or it has left."""
        return -1 if self._connection is None else self._connection.number

    @torch.no_grad()
    def push(self) -> None:
        """Send by how much this model has moved since the last `pull`, and what was left out of it before.

        Raises ConfigurationError when the last delta is still to be pulled, or nothing was done since,
        UnsupportedTensorError when a parameter is not finite, TransportError when the server is gone.
        """
        self._ranks.share(self._push)

    @torch.no_grad()
    def pull(self) -> None:
        """Take the server's parameters: after a `push` once its round has closed.

        Steps since the last push or pull are kept, on top of them. Raises TransportError when the server is gone.
        """
        self.round, self.staleness, self.refused = self._ranks.share(self._pull)
        for parcel in self._parcels():
            self._ranks.spread(parcel)

    def close(self) -> None:
        """Leave; the others go on. What was not pushed is lost to them.

        A process that ends leaves too. A model that is only deleted stays in the rounds, which wait for it.
        """
        connection, self._connection, self._left_it = self._connection, None, True
        if connection is not None:
            connection.close("has left")

    # ------------------------------------------------------------------------------------- what rounds are of

    def _parcels(self) -> list[Parcel]:
        """Return the parameters as they are now; frozen ones are the same everywhere."""
        named = {name: each for name, each in self._module.named_parameters() if each.requires_grad}
        for name, each in named.items():
            if each.dtype not in _DTYPES:
                raise UnsupportedTensorError(
                    f"parameter {name!r} is {each.dtype}, and the server keeps float32; use that, bfloat16 or float16"
                )
        if not named:
            raise ConfigurationError(
                f"{type(self._module).__name__} has no parameters to train, so nothing to exchange"
            )
        return parcels_of(named, {})

    def _push(self) -> None:
        server, decay = self._connected(), self._settings.decay
        if self._pushed or not self._did:
            why = "the last delta was not pulled yet" if self._pushed else "no step was made"
            raise ConfigurationError(f"push(): {why} since the last pull(); train, push() and pull() in turn")
        payloads, self._moved, self._left = [], [], []
        for place, parcel in enumerate(self._parcels()):
            values = parcel.values(copy=True)
            moved = torch.sub(self._agreed[place], values).add_(self._kept[place], alpha=decay)
            if not bool(moved.isfinite().all()):
                odd = (name for name, each in parcel.tensors.items() if not bool(each.isfinite().all()))
                name = next(odd, next(iter(parcel.tensors)))  # where only the difference overflows
                raise UnsupportedTensorError(
                    f"parameter {name!r} is not finite after step {self._steps}; nothing was sent"
                )
            if self._settings.compressor is None:
                values.sub_(self._kept[place], alpha=decay)
                payload, left = values.view(torch.uint8), torch.zeros_like(moved)
            else:
                key = RngKey(server.number, self.round, place)
                delta = torch.sub(self._agreed[place], values, out=values)
                payload, left = self._wires[place].encode(delta, self.round, self._kept[place], decay, key)
            payloads.append(payload)
            self._moved.append(moved)
            self._left.append(left)
        server.ask("push", base=self.round, weight=self._did)
        for payload in payloads:
            server.send(payload.cpu())
        self._did, self._told, self._pushed, self._steps_before = 0.0, False, True, self._steps

    def _pull(self) -> tuple[int, int, int]:
        """Do it; return round, staleness and refused."""
        server, parcels = self._connected(), self._parcels()
        answer = server.answer(server.ask("pull", whole=not self._agreed))
        before, self._agreed = self._agreed, []
        for place, (wire, parcel) in enumerate(zip(self._wires, parcels, strict=True)):
            nbytes = wire.rows(answer["round"] - 1).nbytes if answer["updates"] else 4 * wire.layout.numel
            payload = server.receive(nbytes).to(parcel.device)
            values = payload.view(torch.float32)
            if answer["updates"]:
                values = before[place] + wire.decode(payload, answer["round"] - 1)
            self._agreed.append(values)
            if self._steps_before == self._steps:
                parcel.put(values)
            else:
                stood = before[place]
                if self._pushed:
                    stood = stood - self._moved[place] + self._kept[place] * self._settings.decay
                parcel.put(values + (parcel.values(copy=False) - stood))
        refused = self._pushed and not answer["counted"]
        if refused:
            _log.warning(
                "what this worker has learned came %d rounds late, was not counted, and will be sent again; raise "
                "ParameterServer(staleness=%d), or the period, if this goes on",
                *(answer["late"], self._settings.staleness),
            )
        if self._pushed:
            self._kept = self._moved if refused else self._left
        self._moved, self._left, self._pushed, self._steps_before = [], [], False, self._steps
        return answer["round"], answer["late"], self.refused + refused

    def _connected(self) -> _Connection:
        if self._connection is None:
            raise ConfigurationError("this worker has left the parameter server; attach the model again")
        return self._connection

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of the optimizer that has this model's first parameter, and exchange when it is time."""
        first = next(each for each in self._module.parameters() if each.requires_grad)
        if not any(first is each for group in optimizer.param_groups for each in group["params"]):
            return
        self._steps += 1
        self._did += not self._told
        if self._steps % self._settings.period == 0 and not self._left_it:
            self.push()
            self.pull()


class _Ranks:
    """The processes of one worker: this one alone, or those of a DDP model, the first of which talks to the server."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = None if group is None or group.size() == 1 else group
        self.leads = group is None or group.rank() == 0

    def share(self, call: Callable[[], Any]) -> Any:
        """Let the first rank do it; return what came of it on all, and raise its error on all."""
        told: list[Any] = [None]
        if self.leads:
            try:
                told = [call()]
            except CommoptError as error:
                told = [error]
            except Exception as error:  # the others wait for this rank's word
                told = [TransportError(f"the first rank of this worker failed: {type(error).__name__}: {error}")]
        if self._group is not None:
            dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], CommoptError):
            raise told[0]
        return told[0]

    def spread(self, parcel: Parcel) -> None:
        """Give all ranks the first one's values."""
        if self._group is not None:
            values = parcel.values(copy=True)
            dist.broadcast(values, group=self._group, group_src=0)
            parcel.put(values)


class _Connection:
    """This process at the scheduler, and its link to the server."""

    def __init__(self, settings: ParameterServer, parcels: Sequence[Parcel]) -> None:
        address = settings.address or os.environ.get(ADDRESS_VARIABLE)
        if not address:
            raise ConfigurationError(
                f"ParameterServer() has no address and {ADDRESS_VARIABLE} is not set; pass the scheduler's host:port"
            )
        self._lost, self._server, self._asked = "", -1, 0
        self._me = me = Participant(address, WORKER, self._hear)
        self.number = me.number
        try:
            shapes = [
                [(name, list(each.shape), str(each.dtype)) for name, each in parcel.tensors.items()]
                for parcel in parcels
            ]
            facts = {"version": __version__, "settings": settings.as_text(), "parcels": shapes}
            answer = self.answer(self.ask("join", **facts), 2 * me.timeout_s)  # of which one for a server that has died
            if answer["problem"]:
                raise MismatchError(answer["problem"])
            self._server = answer["server"]
            self._link = Link(me, self._server, me.number, self._lose)
            if answer["sends"]:
                for parcel in parcels:
                    self.send(parcel.values(copy=False).cpu())
        except BaseException:
            me.leave("could not join")
            raise
        atexit.register(self.close)

    def ask(self, kind: str, **request: Any) -> int:
        """Send a request; return its number."""
        self._require_alive()

        def write() -> int:
            self._me.store.set(f"request/{self.number}/{self._asked}", json.dumps({"kind": kind, **request}))
            self._asked += 1
            return self._me.store.add("requests", 1)

        self._while_there(write)
        return self._asked - 1

    def answer(self, request: int, limit_s: float = inf) -> dict[str, Any]:
        """Wait for the answer to a request: as long as the server is there."""
        key = f"answer/{self.number}/{request}"
        until = time.monotonic() + limit_s
        found = self._while_there(lambda: poll(lambda: self._me.store.read(key), until, self._require_alive))
        if found is None:
            raise TransportError(
                f"no parameter server has answered for {limit_s:g} s; look at its log, or start one: "
                f"python -m commopt server --scheduler {self._me.host}:{self._me.port}"
            )
        self._me.store.delete_key(key)
        answer: dict[str, Any] = json.loads(found)
        return answer

    def send(self, payload: Tensor) -> None:
        """Send a tensor of the CPU."""
        self._while_there(lambda: self._link.send(payload))

    def receive(self, nbytes: int) -> Tensor:
        """Return so many bytes."""
        return self._while_there(lambda: self._link.receive(torch.empty(nbytes, dtype=torch.uint8, device="cpu")))

    def _while_there(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except TransportError as error:
            self._lose(str(error))  # unless something was said before
            raise self._loss() from error

    def close(self, why: str = "has ended") -> None:
        """Leave."""
        atexit.unregister(self.close)
        self._me.leave(why)
        self._link.close()

    def _hear(self, number: int, why: str) -> None:
        if number == -1:
            self._lose(why)
        elif number == self._server:
            self._lose(f"the server {why}")
        elif number == self.number:
            self._lose(f"this worker {why}, so the server goes on without it")

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why

    def _require_alive(self) -> None:
        if self._lost:
            raise self._loss()

    def _loss(self) -> TransportError:
        return TransportError(
            f"the parameter server is lost: {self._lost}; start what has ended again (the server goes on from its "
            f"checkpoint), then attach the model again"
        )
