# SPDX-License-Identifier: Apache-2.0
"""The worker: counts the steps of a model's optimizer, pushes its deltas and pulls the server's parameters."""

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
from commopt.errors import CommoptError, ConfigurationError, UnsupportedTensorError
from commopt.feedback.parameter_buckets import ParameterBucket, parameter_buckets
from commopt.server.connection import ServerConnection
from commopt.server.ranks import WorkerRanks
from commopt.server.settings import ParameterServer
from commopt.server.wire import Wire

_log = logging.getLogger("commopt")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_DONE = 1e15
_SAMPLED_NUMEL = 8  # elements of each parameter
_MOST_CHANGES = 3  # of parameters between backwards, without a step of an optimizer

_attached: WeakKeyDictionary[nn.Module, Worker] = WeakKeyDictionary()  # a model keeps its worker


def worker_of(module: nn.Module) -> Worker | None:
    """Return the worker that `attach` made of a plain module, or of the module in a DDP model; None for none."""
    return _attached.get(module)


class Worker:
    """A worker of a parameter server, as `commopt.attach(model, ParameterServer(...))` returns it.

    It calls `push()` and `pull()` after every `period` steps of the model's optimizer. With DDP all ranks must make
    the same calls. The first rank talks to the server, and its errors are raised on all ranks.

    staleness: number of rounds that had closed between this worker's last pull and its last delta.
    refused: number of deltas that were too late. They are sent again with the next delta.
    round: round of the parameters it has.
    done: sum of the weights of its deltas that counted: its part of `Server.done`.
    """

    def __init__(self, settings: ParameterServer, model: nn.Module) -> None:
        ddp = model if isinstance(model, TorchDDP) else None
        module: nn.Module = model if ddp is None else ddp.module
        group = None if ddp is None else ddp.process_group
        self.staleness = 0
        self.refused = 0
        self.round = 0
        self.done = 0.0
        self._settings = settings
        self._module = ref(module)
        self._steps = 0
        self._amount = 0.0
        self._amount_given = False
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()  # since the last step that was counted
        self._refused_weight = 0.0  # of deltas that were refused
        self._sent_weight = 0.0  # of the last delta
        self._steps_before = 0  # the last push or pull
        self._pushed = self._pull_requested = self._closed = False
        self._pulled: list[Tensor] = []  # the parameters pulled last, on this model's device
        self._residuals: list[Tensor] = []  # of the deltas before
        self._deltas: list[Tensor] = []  # sent, and not yet confirmed by a pull
        self._new_residuals: list[Tensor] = []  # of these deltas
        self._connection: ServerConnection | None = None
        try:
            _require_free(module)
            self._names = {name: _description_of(each) for name, each in _trainable(module).items()}
            buckets = self._buckets()
        except CommoptError as problem:  # perhaps of this rank alone: the others learn of it
            WorkerRanks(group, problem=problem)
            raise
        self._wires = [Wire(bucket.layout, settings.compressor) for bucket in buckets]
        self._ranks = WorkerRanks(group, buckets[0].device, settings.as_text())
        try:
            self._ranks.run_on_first(lambda: self._join(buckets))
            self._take_parameters(attaching=True)
        except BaseException:
            self.close()
            raise
        _attached[module] = self
        if self._connection is not None:
            finalize(module, setattr, self._connection, "abandoned", True).atexit = False
        self._manual_loop_check = _ManualLoopCheck(self, module)
        # Not traced with a compiled step: each change of its counters would cause a recompilation.
        after_steps.show(self, torch.compiler.disable(Worker._after_step))

    def _join(self, buckets: Sequence[ParameterBucket]) -> None:
        self._connection = ServerConnection(self._settings, buckets)
        self._residuals = [torch.zeros(bucket.layout.numel, device=bucket.device) for bucket in buckets]

    def weight(self, n: float) -> None:
        """Let the work since the last call count for `n` in the next delta: samples or tokens, as CommState.weight.

        Calls add up until a push. Without one steps are counted. With DDP the first rank's call counts. Raises
        ConfigurationError unless `n` is a number from 0 to 1e15; a push needs a sum above 0.
        """
        if not isinstance(n, (int, float)) or isinstance(n, bool) or not 0 <= n <= _MOST_DONE:
            raise ConfigurationError(
                f"weight({n!r}) must be a number from 0 to {_MOST_DONE:g}: samples or tokens since the last call"
            )
        self._amount, self._amount_given = (self._amount if self._amount_given else 0.0) + n, True

    @property
    def number(self) -> int:
        """This worker's number in the logs of server and scheduler; -1 after it has left, and on all ranks but one."""
        return -1 if self._connection is None else self._connection.number

    @torch.no_grad()
    def push(self) -> None:
        """Send the change of this model's parameters since the last `pull`, plus the residual of earlier deltas.

        Raises ConfigurationError when no pull followed the last push, when no step was made since the last pull, or
        when the model has other trainable parameters than at attach. Raises UnsupportedTensorError when a parameter is
        not finite, TransportError when the server is gone.
        """
        self._require_same_parameters()
        self._manual_loop_check.end()
        self._ranks.run_on_first(self._push)

    def pull(self) -> None:
        """Load the server's parameters. After a `push`, wait until its round has closed.

        Steps made since the last push or pull are added to them. Every 30 s it logs which workers the round waits for.
        Raises TransportError when the server is gone.
        """
        self._manual_loop_check.end()
        self._take_parameters()

    @torch.no_grad()
    def _take_parameters(self, *, attaching: bool = False) -> None:
        self._require_same_parameters()
        told = self._ranks.run_on_first(lambda: self._pull(attaching))
        self.round, self.staleness, self.refused, self.done = told
        for bucket in self._buckets():
            self._ranks.broadcast(bucket)

    def close(self) -> None:
        """Leave the parameter server. The others continue. Steps not pushed are lost to them.

        A worker also leaves when its process ends or its model is deleted.
        """
        connection, self._connection, self._closed = self._connection, None, True
        module = self._module()
        if module is not None and _attached.get(module) is self:
            del _attached[module]
        self._ranks.close()
        if connection is not None:
            connection.close("has left")

    # ------------------------------------------------------------------------------------- exchanged parameters

    def _buckets(self) -> list[ParameterBucket]:
        """Return the parameters that were trainable at attach, with their present values. No others are exchanged."""
        module = self._required_module()
        named = dict(module.named_parameters())
        if not self._names:
            raise ConfigurationError(
                f"{type(module).__name__} has no parameters to train, so there is nothing to exchange"
            )
        return parameter_buckets({name: named[name] for name in self._names}, {})

    def _required_module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ConfigurationError("the model of this worker was deleted, so it has left; attach another one")
        return module

    def _require_same_parameters(self) -> None:
        """Raise ConfigurationError if trainable parameters are not exchanged, or exchanged ones are missing.

        A parameter frozen since is still exchanged: all workers freeze it, and it keeps its value.
        """
        module = self._required_module()
        named = dict(module.named_parameters())
        for name, parameter in named.items():
            if parameter.requires_grad and name not in self._names:
                raise ConfigurationError(
                    f"parameter {name!r} is trainable, and was not at attach(), so it would not be exchanged; "
                    f"close() this worker and attach again, on all workers, or unfreeze before attach()"
                )
        for name, kind in self._names.items():
            found = _description_of(named[name]) if name in named else "missing"
            if found != kind:
                raise ConfigurationError(
                    f"parameter {name!r} was {kind} at attach(), and is {found}; close() this worker and attach again"
                )

    def _push(self) -> None:
        server, decay = self._connected(), self._settings.decay
        if self._pushed or not self._amount:
            why = "no step was made since the last pull(), or weight(0) in each"
            why = "no pull() followed the last push()" if self._pushed else why
            raise ConfigurationError(f"push(): {why}; train, push() and pull() in turn")
        payloads, self._deltas, self._new_residuals = [], [], []
        for place, bucket in enumerate(self._buckets()):
            values = bucket.values(copy=True)
            full_delta = torch.sub(self._pulled[place], values).add_(self._residuals[place], alpha=decay)
            if not bool(full_delta.isfinite().all()):
                odd = (name for name, each in bucket.tensors.items() if not bool(each.isfinite().all()))
                name = next(odd, next(iter(bucket.tensors)))  # if only the difference overflows
                raise UnsupportedTensorError(
                    f"parameter {name!r} is not finite after step {self._steps}; nothing was sent"
                )
            if self._settings.compressor is None:
                values.sub_(self._residuals[place], alpha=decay)
                payload, residual = self._wires[place].pack(values), torch.zeros_like(full_delta)
            else:
                rng_key = RngKey(server.number, self.round, place)
                delta = torch.sub(self._pulled[place], values, out=values)
                payload, residual = self._wires[place].encode(delta, self.round, self._residuals[place], decay, rng_key)
            payloads.append(payload)
            self._deltas.append(full_delta)
            self._new_residuals.append(residual)
        self._sent_weight = min(self._refused_weight + self._amount, _MOST_DONE)
        with _leave_if_interrupted(server):
            server.ask("push", base=self.round, weight=self._sent_weight)
            for payload in payloads:
                server.send(payload.cpu())
        self._amount = 0.0
        self._amount_given = False
        self._pushed = True
        self._steps_before = self._steps

    def _pull(self, attaching: bool) -> tuple[int, int, int, float]:
        """Load the server's parameters; return round, staleness, number of refused deltas, and work that counted."""
        server, buckets = self._connected(), self._buckets()
        if not self._pull_requested:  # False also after an interrupted pull
            server.ask("pull", whole=not self._pulled)
            self._pull_requested = True
        answer = server.receive_answer(attaching=attaching)
        self._pull_requested = False
        with _leave_if_interrupted(server):
            return self._receive_parameters(server, buckets, answer)

    def _receive_parameters(
        self, server: ServerConnection, buckets: Sequence[ParameterBucket], answer: Mapping[str, Any]
    ) -> tuple[int, int, int, float]:
        """Receive the parameters announced by an answer."""
        before, self._pulled = self._pulled, []
        for place, (wire, bucket) in enumerate(zip(self._wires, buckets, strict=True)):
            nbytes = wire.rows(answer["round"] - 1).nbytes if answer["updates"] else 4 * wire.layout.numel
            payload = server.receive(nbytes).to(bucket.device)
            values = payload.view(torch.float32)
            if answer["updates"]:
                values = before[place] + wire.decode(payload, answer["round"] - 1)
            self._pulled.append(values)
            if self._steps_before == self._steps:
                bucket.put(values)
            else:
                stood = before[place]
                if self._pushed:
                    stood = stood - self._deltas[place] + self._residuals[place] * self._settings.decay
                bucket.put(values + (bucket.values(copy=False) - stood))
        refused = self._pushed and not answer["counted"]
        done = self.done + (self._sent_weight if self._pushed and not refused else 0.0)
        if refused:
            _log.warning(
                "this worker's delta came %d rounds late, was not counted, and will be sent again; raise "
                "ParameterServer(staleness=%d), or the period, if this continues",
                answer["late"],
                self._settings.staleness,
            )
        if self._pushed:
            self._residuals = self._deltas if refused else self._new_residuals
            self._refused_weight = self._sent_weight if refused else 0.0
        self._deltas = []
        self._new_residuals = []
        self._pushed = False
        self._steps_before = self._steps
        return answer["round"], answer["late"], self.refused + refused, done

    def _connected(self) -> ServerConnection:
        if self._connection is None:
            raise ConfigurationError("this worker has left the parameter server; attach the model again")
        return self._connection

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, and exchange after every `period` steps.

        A model may have several optimizers. A new step begins when one of them steps again.
        """
        module = self._module()
        if self._closed or module is None:
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
        self._manual_loop_check.end()
        self._steps += 1
        if self._connection is not None:
            self._connection.steps = self._steps
        self._amount += not self._amount_given
        if self._steps % self._settings.period == 0:
            self.push()
            self.pull()


class _ManualLoopCheck:
    """Detects a training loop without an optimizer of torch.optim, whose steps would not be counted.

    It compares some elements of the parameters in each backward, until the first step, push or pull.
    """

    def __init__(self, worker: Worker, module: nn.Module) -> None:
        self._changes = 0
        self._first = 0
        self._seen: list[float] = []
        found = ref(worker)

        def look(parameter: Tensor) -> None:
            alive = found()
            if alive is not None:
                alive._manual_loop_check._look(module_ref(), parameter)

        module_ref = ref(module)
        self._hooks: list[RemovableHandle] = [
            each.register_post_accumulate_grad_hook(look) for each in _trainable(module).values() if each.is_leaf
        ]

    def end(self) -> None:
        """Stop comparing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _look(self, module: nn.Module | None, parameter: Tensor) -> None:
        self._first = self._first or id(parameter)
        if module is None or id(parameter) != self._first:  # once in a backward
            return
        parts = [each.detach().reshape(-1)[:_SAMPLED_NUMEL].float().cpu() for each in _trainable(module).values()]
        seen = torch.cat(parts).tolist()
        self._changes += bool(self._seen) and seen != self._seen
        self._seen = seen
        if self._changes >= _MOST_CHANGES:
            raise ConfigurationError(
                f"the parameters of this worker have changed {_MOST_CHANGES} times, but no optimizer of torch.optim "
                f"has made a step since attach(), so nothing would be exchanged; without such an optimizer call "
                f"weight(1), push() and pull() of the Worker regularly, or close() it"
            )


@contextmanager
def _leave_if_interrupted(server: ServerConnection) -> Iterator[None]:
    """Leave the server if the block is interrupted: an exchange cannot continue from partly sent or received data."""
    try:
        yield
    except BaseException:
        server.close("was interrupted in the middle of an exchange")
        raise


def _require_free(module: nn.Module) -> None:
    if module in _attached:
        raise ConfigurationError(
            f"this {type(module).__name__} is a worker already; close() the Worker that attach() returned before"
        )


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name. Raises UnsupportedTensorError for a dtype that is not exchanged."""
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    for name, each in named.items():
        if each.dtype not in _DTYPES:
            raise UnsupportedTensorError(
                f"parameter {name!r} is {each.dtype}, and the server keeps float32; use that, bfloat16 or float16"
            )
    return named


def _description_of(parameter: Tensor) -> str:
    return f"{parameter.dtype} {list(parameter.shape)} on {parameter.device}"
