"""The DDP models of a script: each gets its hook in its first forward that a backward may follow."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from commopt.hooks import HookState, attach
from commopt.run.choice import Choice
from commopt.run.scalers import Scalers

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


class Models:
    """Attaches the choice to every DDP model, once, and keeps what became of it; `trained` in order of attachment."""

    def __init__(self, choice: Choice) -> None:
        self.trained: list[Trained] = []
        self.scalers = Scalers(choice.strategy)
        self._choice = choice
        self._known: WeakSet[TorchDDP] = WeakSet()
        self._left_alone = 0
        self._open: list[finalize[..., TorchDDP]] = []

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
        record = Trained(name, dist.get_rank())
        self.trained.append(record)
        # The state lives as long as the model, as if the script held both.
        last_words = finalize(ddp, _conclude, record, state)
        last_words.atexit = False
        self._open.append(last_words)
        _log.info("commopt run: %s on the DDP model of %s", self._choice.strategy, name)

    def close(self) -> None:
        """Look at what models that still exist have done; no communication."""
        for last_words in self._open:
            last_words()
        self._open.clear()


def _conclude(record: Trained, state: HookState) -> None:
    record.stats = state.stats()
    record.explanation = "" if state.tuned is None else state.explain()


def _reason_to_leave_alone(ddp: TorchDDP) -> str:
    if ddp._use_python_reducer:
        return "torch.compile's python reducer averages its gradients, which calls no hook for buckets"
    if ddp.logger is None:
        return "all its gradients are delayed (delay_all_reduce_named_params), so there are no buckets"
    if hook := ddp._get_ddp_logging_data().get("comm_hook"):
        return f"the script has registered the communication hook {hook} itself"
    return ""
