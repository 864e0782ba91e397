# SPDX-License-Identifier: Apache-2.0
"""The worker: counts the steps of a model's optimizer, sends what was learned, and takes what all have learned."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.hooks import RemovableHandle

from commopt.attached.steps import after_steps
from commopt.compress import RngKey
from commopt.errors import ConfigurationError, UnsupportedTensorError
from commopt.feedback.parameter_buckets import ParameterBucket, parameter_buckets
from commopt.server.connection import Connection
from commopt.server.ranks import Ranks
from commopt.server.settings import ParameterServer
from commopt.server.wire import Wire

_log = logging.getLogger("commopt")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_DONE = 1e15
_SAMPLE = 8  # elements of each parameter
_CHANGES = 3  # by which nobody but a loop without an optimizer changes parameters between backwards

_attached: WeakKeyDictionary[nn.Module, Worker] = WeakKeyDictionary()  # a model keeps its worker


class Worker:
    """A model that learns beside others, as `commopt.attach(model, ParameterServer(...))` returns it.

    After every `period` steps of its optimizer it does `push()` and `pull()`. With DDP all ranks must call what they
    call alike; the first one talks to the server. An error of that is raised on all of them.

    staleness: how many rounds had closed since this worker pulled, when its last delta came. refused: deltas that were
    too late; they travel with the next one. round: that of the parameters it has.
    """

    def __init__(self, settings: ParameterServer, model: nn.Module) -> None:
        ddp = model if isinstance(model, TorchDDP) else None
        module: nn.Module = model if ddp is None else ddp.module
        if module in _attached:
            raise ConfigurationError(
                f"this {type(module).__name__} is a worker already; close() what attach() returned before"
            )
        self.staleness = 0
        self.refused = 0
        self.round = 0
        self._settings = settings
        self._module = ref(module)
        self._steps = 0
        self._did = 0.0
        self._told = False
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()  # since the last step that was counted
        self._carried = self._weighed = 0.0  # what was done for deltas that were refused, and for the last one
        self._steps_before = 0  # the last push or pull
        self._pushed = self._asked = self._left_it = False
        self._agreed: list[Tensor] = []  # the parameters pulled last, on this model's device
        self._kept: list[Tensor] = []  # what the deltas before have left out
        self._moved: list[Tensor] = []  # of the delta that is on its way: as a whole, then what it left out
        self._left: list[Tensor] = []
        self._connection: Connection | None = None
        self._names = {name: _kind_of(each) for name, each in _trained(module).items()}
        parcels = self._parcels()
        self._wires = [Wire(parcel.layout, settings.compressor) for parcel in parcels]
        self._ranks = Ranks(None if ddp is None else ddp.process_group, parcels[0].device)
        self._ranks.share(lambda: self._join(parcels))
        try:
            self._take_parameters(attaching=True)
        except BaseException:
            self.close()
            raise
        _attached[module] = self
        if self._connection is not None:
            finalize(module, setattr, self._connection, "abandoned", True).atexit = False
        self._by_hand = _ByHand(self, module)
        # Traced with a compiled step, it would be compiled anew whenever a counter in it changes.
        after_steps.show(self, torch.compiler.disable(Worker._after_step))

    def _join(self, parcels: Sequence[ParameterBucket]) -> None:
        self._connection = Connection(self._settings, parcels)
        self._kept = [torch.zeros(parcel.layout.numel, device=parcel.device) for parcel in parcels]

    def did(self, amount: float) -> None:
        """Say that so much was done (tokens, samples) since the last call; deltas weigh by it. By default steps count.

        Of a DDP model the first rank's word counts. Raises ConfigurationError for what is not above 0, or above 1e15.
        """
        if not isinstance(amount, (int, float)) or isinstance(amount, bool) or not 0 < amount <= _MOST_DONE:
            raise ConfigurationError(
                f"did({amount!r}) must be a number above 0, and {_MOST_DONE:g} at most: samples or tokens since the "
                f"last call"
            )
        self._did, self._told = (self._did if self._told else 0.0) + amount, True

    @property
    def number(self) -> int:
        """That of this worker at the server, which logs go by; -1 where another rank talks to it, or it has left."""
        return -1 if self._connection is None else self._connection.number

    @torch.no_grad()
    def push(self) -> None:
        """Send by how much this model has moved since the last `pull`, and what was left out of it before.

        Raises ConfigurationError when the last delta is still to be pulled, or nothing was done since, or the model
        has other parameters to train than at attach, UnsupportedTensorError when a parameter is not finite,
        TransportError when the server is gone.
        """
        self._require_same_parameters()
        self._by_hand.end()
        self._ranks.share(self._push)

    def pull(self) -> None:
        """Take the server's parameters: after a `push` once its round has closed.

        Steps since the last push or pull are kept, on top of them. It waits as long as the round does; every 30 s it
        logs for whom. Raises TransportError when the server is gone.
        """
        self._by_hand.end()
        self._take_parameters()

    @torch.no_grad()
    def _take_parameters(self, *, attaching: bool = False) -> None:
        self._require_same_parameters()
        self.round, self.staleness, self.refused = self._ranks.share(lambda: self._pull(attaching))
        for parcel in self._parcels():
            self._ranks.spread(parcel)

    def close(self) -> None:
        """Leave; the others go on. What was not pushed is lost to them.

        A process that ends leaves too, and so does a model that is deleted.
        """
        connection, self._connection, self._left_it = self._connection, None, True
        module = self._module()
        if module is not None and _attached.get(module) is self:
            del _attached[module]
        if connection is not None:
            connection.close("has left")

    # ------------------------------------------------------------------------------------- what rounds are of

    def _parcels(self) -> list[ParameterBucket]:
        """Return the parameters that were to be trained at attach, as they are now; the others are alike everywhere."""
        module = self._required_module()
        named = dict(module.named_parameters())
        if not self._names:
            raise ConfigurationError(f"{type(module).__name__} has no parameters to train, so nothing to exchange")
        return parameter_buckets({name: named[name] for name in self._names}, {})

    def _required_module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ConfigurationError("the model of this worker was deleted, so it has left; attach another one")
        return module

    def _require_same_parameters(self) -> None:
        """Raise ConfigurationError where the model has parameters to train that are not exchanged, or lacks some.

        One that was frozen since is: it stays where the others, who freeze it too, have it.
        """
        module = self._required_module()
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            if parameter.requires_grad and name not in self._names:
                raise ConfigurationError(
                    f"parameter {name!r} is to be trained, and was not at attach(), so it would not be exchanged; "
                    f"close() this worker and attach again, on all workers, or unfreeze before attach()"
                )
        for name, kind in self._names.items():
            found = _kind_of(named[name]) if name in named else "not there"
            if found != kind:
                raise ConfigurationError(
                    f"parameter {name!r} was {kind} at attach(), and is {found}; close() this worker and attach again"
                )

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
        self._weighed = min(self._carried + self._did, _MOST_DONE)
        with _whole(server):
            server.ask("push", base=self.round, weight=self._weighed)
            for payload in payloads:
                server.send(payload.cpu())
        self._did = 0.0
        self._told = False
        self._pushed = True
        self._steps_before = self._steps

    def _pull(self, attaching: bool) -> tuple[int, int, int]:
        """Do it; return round, staleness and refused."""
        server, parcels = self._connected(), self._parcels()
        if not self._asked:  # else an earlier pull was interrupted
            server.ask("pull", whole=not self._agreed)
            self._asked = True
        answer = server.answer(attaching=attaching)
        self._asked = False
        with _whole(server):
            return self._put(server, parcels, answer)

    def _put(
        self, server: Connection, parcels: Sequence[ParameterBucket], answer: Mapping[str, Any]
    ) -> tuple[int, int, int]:
        """Receive the parameters that an answer announces."""
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
                answer["late"],
                self._settings.staleness,
            )
        if self._pushed:
            self._kept = self._moved if refused else self._left
            self._carried = self._weighed if refused else 0.0
        self._moved = []
        self._left = []
        self._pushed = False
        self._steps_before = self._steps
        return answer["round"], answer["late"], self.refused + refused

    def _connected(self) -> Connection:
        if self._connection is None:
            raise ConfigurationError("this worker has left the parameter server; attach the model again")
        return self._connection

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, and exchange when it is time.

        A model may have several optimizers: a step is over when one of them begins its next.
        """
        module = self._module()
        if self._left_it or module is None:
            return
        own = {id(each) for each in module.parameters()}
        if not any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            return
        begins = not self._stepped or optimizer in self._stepped
        if begins:
            self._stepped.clear()
        self._stepped.add(optimizer)
        if not begins:
            return
        self._by_hand.end()
        self._steps += 1
        if self._connection is not None:
            self._connection.steps = self._steps
        self._did += not self._told
        if self._steps % self._settings.period == 0:
            self.push()
            self.pull()


class _ByHand:
    """Notices a loop that changes parameters without an optimizer of torch.optim, whose steps nobody would count.

    It looks at some elements whenever a gradient is there, until the first step, push or pull.
    """

    def __init__(self, worker: Worker, module: nn.Module) -> None:
        self._changes = 0
        self._first = 0
        self._seen: list[float] = []
        found = ref(worker)

        def look(parameter: Tensor) -> None:
            alive = found()
            if alive is not None:
                alive._by_hand._look(module_ref(), parameter)

        module_ref = ref(module)
        self._hooks: list[RemovableHandle] = [
            each.register_post_accumulate_grad_hook(look) for each in _trained(module).values() if each.is_leaf
        ]

    def end(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, module: nn.Module | None, parameter: Tensor) -> None:
        self._first = self._first or id(parameter)
        if module is None or id(parameter) != self._first:  # once in a backward
            return
        parts = [each.detach().reshape(-1)[:_SAMPLE].float().cpu() for each in _trained(module).values()]
        seen = torch.cat(parts).tolist()
        self._changes += bool(self._seen) and seen != self._seen
        self._seen = seen
        if self._changes >= _CHANGES:
            raise ConfigurationError(
                f"the parameters of this worker have changed {_CHANGES} times, and no optimizer of torch.optim has "
                f"made a step since attach(), so it would never exchange anything; without one call did(1), push() and "
                f"pull() of what attach() returned every so many steps, or close() it"
            )


@contextmanager
def _whole(server: Connection) -> Iterator[None]:
    """Leave the server if what is inside is interrupted: what was sent or received in part cannot be gone on from."""
    try:
        yield
    except BaseException:
        server.close("was interrupted in the middle of an exchange")
        raise


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters to train, by name. Raises UnsupportedTensorError for a dtype that is not exchanged."""
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    for name, each in named.items():
        if each.dtype not in _DTYPES:
            raise UnsupportedTensorError(
                f"parameter {name!r} is {each.dtype}, and the server keeps float32; use that, bfloat16 or float16"
            )
    return named


def _kind_of(parameter: Tensor) -> str:
    return f"{parameter.dtype} {list(parameter.shape)} on {parameter.device}"
