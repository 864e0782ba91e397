# SPDX-License-Identifier: Apache-2.0
"""The DDP models of a script: each gets its hook in its first forward that a backward may follow."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.errors import CommoptError
from commopt.hooks import HookState, attach
from commopt.hooks.checks import enabled_scalers
from commopt.run.live import Live
from commopt.run.script import Choice

_log = logging.getLogger("commopt")


@dataclass
class Trained:
    """A model that got a hook. stats, explanation: HookState's when it ceased to exist, or at the end.

    explanation: "" for what was not tuned.
    """

    name: str
    rank: int
    stats: dict[str, Any] = field(default_factory=dict)
    explanation: str = ""

    def read(self, state: HookState) -> None:
        """Take the figures of its hook."""
        self.stats = state.stats()
        self.explanation = "" if state.tuned is None else state.explain()


class Models:
    """Attaches the choice to every DDP model, once, and keeps what became of it; `trained` in order of attachment."""

    def __init__(self, choice: Choice, live: Live | None = None) -> None:
        self.trained: list[Trained] = []
        self.scalers = Scalers(choice.strategy)
        self._choice = choice
        self._live = live
        self._known: WeakSet[TorchDDP] = WeakSet()
        self._left_alone = 0
        self._open: list[finalize[..., TorchDDP]] = []
        self._states: list[ref[HookState]] = []

    @property
    def seen(self) -> bool:
        """Whether any model was trained, with the hook or without."""
        return bool(self.trained or self._left_alone)

    def before_forward(self, ddp: TorchDDP) -> None:
        """Attach the hook if it is time for it; collective over the ranks of the model."""
        if ddp in self._known or not torch.is_grad_enabled():
            return
        self._known.add(ddp)
        name = type(ddp.module).__name__
        if reason := _reason_to_leave_alone(ddp):
            self._left_alone += 1
            _log.warning("commopt run: the DDP model of %s is left alone: %s", name, reason)
            return
        state = attach(ddp, self._choice.strategy, **self._choice.options)
        self.scalers.expect(state)
        self._states.append(ref(state))
        apart = state.aggregator is not None and state.aggregator.node_local
        if apart and state.membership.team.node_count > 1:
            _log.warning(
                "commopt run: %s lets nodes hold different parameters; these are averaged when the script ends, and "
                "what it evaluates or saves before is one node's model: call commopt.attach in the script, and "
                "comm.average_parameters() on every rank before that",
                self._choice.strategy,
            )
        record = Trained(name, dist.get_rank())
        if self._live is not None:
            self._live.watch(name, state, speaks=record.rank == 0)
        self.trained.append(record)
        # The state lives as long as the model, as if the script held both.
        at_its_end = finalize(ddp, record.read, state)
        at_its_end.atexit = False
        self._open.append(at_its_end)
        _log.info("commopt run: %s on the DDP model of %s", self._choice.strategy, name)

    def average(self) -> None:
        """Let the nodes hold one model where a LocalSGD lets them learn by themselves; collective.

        Called when the script destroys the process group, and when it has ended by itself.
        """
        for waiting in self._states:
            state = waiting()
            if state is None or not state.nodes_differ or not state.membership.alive:
                continue
            try:
                state.average_parameters()
            except CommoptError as error:
                _log.warning("commopt run: nodes end with different parameters, which could not be averaged: %s", error)

    def close(self) -> None:
        """Read the figures of models that still exist; no communication."""
        for at_its_end in self._open:
            at_its_end()
        self._open.clear()


def _reason_to_leave_alone(ddp: TorchDDP) -> str:
    if ddp._use_python_reducer:
        return "torch.compile's python reducer averages its gradients, which calls no hook for buckets"
    if ddp.logger is None:
        return "all its gradients are delayed (delay_all_reduce_named_params), so there are no buckets"
    if hook := ddp._get_ddp_logging_data().get("comm_hook"):
        return f"the script has registered the communication hook {hook} itself"
    return ""


class Scalers:
    """Gives each state the one enabled GradScaler there is; where there are several, says who must.

    Called whenever a loss is scaled: after the forward in which a hook was attached, and before its first bucket.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._waiting: list[ref[HookState]] = []
        self._only: ref[GradScaler] | None = None
        self._several = False

    def expect(self, state: HookState) -> None:
        """Give `state` a scaler when one is in use."""
        self._waiting.append(ref(state))

    def before_scale(self, scaler: GradScaler) -> None:
        """Take note that `scaler` is about to scale a loss."""
        if self._several or not scaler.is_enabled():
            return
        if self._only is None or self._only() is not scaler:
            gc.collect()  # scalers of an earlier model may wait for it
            others = [each for each in enabled_scalers() if each is not scaler]
            if others:
                self._several = True
                _log.warning(
                    "commopt run: %d enabled GradScalers are there, and which scales the loss of which model cannot be "
                    "seen; with error feedback the script must pass it: commopt.attach(ddp, %r, scaler=scaler), before "
                    "the first forward of each model",
                    1 + len(others),
                    self._strategy,
                )
                return
            self._only = ref(scaler)
        for waiting in self._waiting:
            if (state := waiting()) is not None:
                state.scaler = scaler
        self._waiting.clear()


_told: list[Models] = []  # the last one is told; a forked child has its parent's below


@contextmanager
def watching(models: Models) -> Iterator[None]:
    """Tell `models` of every forward of a DDP model, of every loss that is scaled, and of the process group's end."""
    _told.append(models)
    try:
        with nullcontext() if len(_told) > 1 else _patched():
            yield
    finally:
        _told.pop()


@contextmanager
def _patched() -> Iterator[None]:
    """Patch classes, not objects: nothing of it is in a model that is copied or saved."""
    call, scale, destroy = TorchDDP.__call__, GradScaler.scale, dist.destroy_process_group
    # A compiler that looks into a step must not look in here.
    before_forward = torch.compiler.disable(lambda ddp: _told[-1].before_forward(ddp))
    before_scale = torch.compiler.disable(lambda scaler: _told[-1].scalers.before_scale(scaler))

    @wraps(call)
    def watched_call(ddp: TorchDDP, *inputs: Any, **kwargs: Any) -> Any:
        before_forward(ddp)
        return call(ddp, *inputs, **kwargs)

    @wraps(scale)
    def watched_scale(scaler: GradScaler, outputs: Any) -> Any:
        before_scale(scaler)
        return scale(scaler, outputs)

    @wraps(destroy)
    def watched_destroy(group: Any = None) -> None:
        if group in (None, dist.group.WORLD):
            _told[-1].average()
        destroy(group)

    patched: tuple[tuple[Any, str, Any], ...] = (
        # Only the call itself is kept from a compiler, not the model in it.
        (TorchDDP, "__call__", torch.compiler.disable(watched_call, recursive=False)),
        (GradScaler, "scale", watched_scale),
        *((module, "destroy_process_group", watched_destroy) for module in (dist, c10d)),
    )
    for kind, name, function in patched:
        setattr(kind, name, function)
    try:
        yield
    finally:
        GradScaler.scale = scale  # type: ignore[method-assign]
        dist.destroy_process_group = c10d.destroy_process_group = destroy
        delattr(TorchDDP, "__call__")  # torch's own is nn.Module's
