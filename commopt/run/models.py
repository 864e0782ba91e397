# SPDX-License-Identifier: Apache-2.0
"""The DDP and FSDP2 models of a script: each gets its hook in its first forward that a backward may follow."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.attached.checks import enabled_scalers
from commopt.attached.optimizers import adam_in, optimizers_of, put_behind
from commopt.errors import CommoptError
from commopt.hooks import CommState
from commopt.run.live import Live
from commopt.run.recorded import Recorded, StepRecording
from commopt.run.script import Choice, ended_well
from commopt.schedule import Tuned
from commopt.sharded.seams import replaced_in, reshard_between_steps

_log = logging.getLogger("commopt")


@dataclass
class Trained:
    """A model that got a hook. stats, explanation, tuned: those of its state when it ceased to exist, or at the end.

    explanation: "" for a strategy that is not tuned, which has no `tuned` either.
    recording: of its steps; None where nobody wants a verdict.
    page: of --html; None where nobody wants one.
    """

    name: str
    rank: int
    stats: dict[str, Any] = field(default_factory=dict)
    explanation: str = ""
    tuned: Tuned | None = None
    recording: StepRecording | None = None
    page: Path | None = None

    @property
    def recorded(self) -> Recorded | None:
        """What all ranks have recorded of it; None where that is nothing."""
        return None if self.recording is None else self.recording.recorded

    def read(self, state: CommState) -> None:
        """Take the figures of its hook."""
        self.stats = state.stats()
        self.tuned = getattr(state, "tuned", None)  # FSDP2's have none
        self.explanation = "" if self.tuned is None else state.explain()
        self._try(lambda recording: recording.note(state))

    def gather(self) -> None:
        """Bring together what all ranks have recorded; collective. Without an error: the training has ended well."""
        self._try(StepRecording.gather)

    def _try(self, what: Callable[[StepRecording], None]) -> None:
        """Do something for the verdict. Where that fails there is none, and the first rank says why."""
        if self.recording is None:
            return
        try:
            what(self.recording)
        except Exception as error:
            self.recording = None
            if self.rank == 0:
                _log.warning("commopt run: no verdict on %s: %s", self.name, " ".join(str(error).split()))


class Models:
    """Attaches the choice to every model, once, and keeps the outcomes: `trained`, in order of attachment.

    records: whether steps are recorded for a verdict at the end.
    """

    def __init__(self, choice: Choice, live: Live | None = None, *, records: bool = False) -> None:
        self.trained: list[Trained] = []
        self.scalers = Scalers(choice.strategy)
        self._choice = choice
        self._live = live
        self._records = records
        self._known: WeakSet[nn.Module] = WeakSet()
        self._left_alone = 0
        self._open: list[finalize[..., nn.Module]] = []
        self._states: list[ref[CommState]] = []

    @property
    def seen(self) -> bool:
        """Whether any model was trained, with the hook or without."""
        return bool(self.trained or self._left_alone)

    def before_forward(self, model: nn.Module) -> None:
        """Attach the hook if it is time for it; collective over the ranks of the model.

        Raises ConfigurationError for a model that cannot have it, FSDP1's too, and with `adam=` for an optimizer that
        it cannot stand for: before the first backward.
        """
        if model in self._known or not torch.is_grad_enabled():
            return
        ddp = isinstance(model, TorchDDP)
        self._known.update([model] if ddp else model.modules())  # FSDP2's parts are called as their model is
        name = type(model.module if ddp else model).__name__
        if reason := _reason_to_leave_alone(model):
            self._left_alone += 1
            _log.warning("commopt run: the %s model of %s is left alone: %s", "DDP" if ddp else "FSDP2", name, reason)
            return
        if isinstance(model, FSDPModule):
            reshard_between_steps(model)  # an evaluation may have left whole parameters, which no optimizer has
        optimizers = optimizers_of(model.parameters()) if self._choice.adam else []
        state = self._choice.attach(model, adam_in(optimizers))
        for optimizer in optimizers:
            put_behind(state, optimizer)
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
            record.page = self._live.watch(name, state, speaks=record.rank == 0)
        if self._records:
            record.recording = StepRecording(state, name, self._choice.strategy)
        self.trained.append(record)
        # The state lives as long as the model, as if the script held both.
        at_its_end = finalize(model, record.read, state)
        at_its_end.atexit = False
        self._open.append(at_its_end)
        _log.info("commopt run: %s on the model %s", self._choice.strategy, name)

    def end(self, error: BaseException | None = None) -> None:
        """Average what nodes have learned by themselves, and bring together what was recorded; collective.

        Called when the script destroys the process group, and when it has ended by itself.

        error: that passes through this rank. Then nothing is sent: others may not come, and would be waited for.
        """
        if ended_well(error):
            self.average()
            for record in self.trained:
                record.gather()
        elif self._apart():
            why = type(error).__name__
            _log.warning("commopt run: nodes end with different parameters: no average is taken after a %s", why)

    def _apart(self) -> list[CommState]:
        """Return the states that can still average what nodes have learned by themselves."""
        states = (waiting() for waiting in self._states)
        return [each for each in states if each is not None and each.nodes_differ and each.membership.alive]

    def average(self) -> None:
        """Let the nodes hold one model where a LocalSGD lets them learn by themselves; collective."""
        for state in self._apart():
            try:
                state.average_parameters()
            except CommoptError as error:
                _log.warning("commopt run: nodes end with different parameters, which could not be averaged: %s", error)

    def close(self) -> None:
        """Read the figures of models that still exist; no communication."""
        for at_its_end in self._open:
            at_its_end()
        self._open.clear()


def _reason_to_leave_alone(ddp: nn.Module) -> str:
    if not isinstance(ddp, TorchDDP):
        found = replaced_in(ddp) if isinstance(ddp, FSDPModule) else ""
        return f"the script has set {found} in it, or attached to it itself" if found else ""
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
        self._waiting: list[ref[CommState]] = []
        self._only: ref[GradScaler] | None = None
        self._several = False

    def expect(self, state: CommState) -> None:
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


_WATCHED: tuple[Any, ...] = (TorchDDP, FSDPModule, FullyShardedDataParallel)
_watching: list[Models] = []  # the last one counts; a forked child inherits its parent's below


@contextmanager
def watching(models: Models) -> Iterator[None]:
    """Tell `models` of every forward of a DDP or FSDP model, of every scaled loss, and of the process group's end."""
    _watching.append(models)
    try:
        with nullcontext() if len(_watching) > 1 else _patched():
            yield
    finally:
        _watching.pop()


@contextmanager
def _patched() -> Iterator[None]:
    """Patch classes, not objects: nothing of it is in a model that is copied or saved."""
    scale, destroy = GradScaler.scale, dist.destroy_process_group
    # A compiler that looks into a step must not look in here.
    before_forward = torch.compiler.disable(lambda model: _watching[-1].before_forward(model))
    before_scale = torch.compiler.disable(lambda scaler: _watching[-1].scalers.before_scale(scaler))

    def watched(kind: type[Any]) -> Any:
        @wraps(nn.Module.__call__)
        def watched_call(model: Any, *inputs: Any, **kwargs: Any) -> Any:
            before_forward(model)
            return super(kind, model).__call__(*inputs, **kwargs)

        # Only the call itself is kept from a compiler, not the model in it.
        return torch.compiler.disable(watched_call, recursive=False)

    @wraps(scale)
    def watched_scale(scaler: GradScaler, outputs: Any) -> Any:
        before_scale(scaler)
        return scale(scaler, outputs)

    @wraps(destroy)
    def watched_destroy(group: Any = None) -> None:
        if group in (None, dist.group.WORLD):
            _watching[-1].end(sys.exc_info()[1])
        destroy(group)

    for kind in _WATCHED:  # none of which has a __call__ of its own
        kind.__call__ = watched(kind)
    GradScaler.scale = watched_scale  # type: ignore[method-assign, assignment]
    dist.destroy_process_group = c10d.destroy_process_group = watched_destroy
    try:
        yield
    finally:
        GradScaler.scale = scale  # type: ignore[method-assign]
        dist.destroy_process_group = c10d.destroy_process_group = destroy
        for kind in _WATCHED:
            del kind.__call__
