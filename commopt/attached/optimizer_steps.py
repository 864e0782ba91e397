# SPDX-License-Identifier: Apache-2.0
"""The optimizer steps of a training loop, counted alike on all ranks, and optimizers that no LocalSGD can stand."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer

from commopt.attached.checks import enabled_scalers, instances_of
from commopt.attached.steps import after_steps, before_steps, update_mark
from commopt.errors import ConfigurationError

_log = logging.getLogger("commopt")

# Classes whose step() sends parameters to other nodes, or what becomes of them, by name: their packages are not loaded.
_COMMUNICATE = frozenset(
    (
        "ZeroRedundancyOptimizer",
        "PostLocalSGDOptimizer",
        "DistributedOptimizer",
        "_LocalOptimizer",
        "OSS",
        "DistributedFusedAdam",
        "DistributedFusedLAMB",
        "LowLevelZeroOptimizer",
        "HybridParallelZeroOptimizer",
    )
)
_PACKAGES = frozenset(("torchft", "hivemind", "horovod", "deepspeed"))
# A loop that accumulates for longer than this is taken for one whose steps nobody sees.
_LONGEST_ACCUMULATION = 256
_REMEMBERED = 16
_DEEPEST = 8  # steps within steps


@dataclass(frozen=True, eq=False)
class _OptimizerStep:
    """A step as it begins. first: of this optimizer. backwards: averaged so far. sent: collectives so far, by group."""

    optimizer: Optimizer
    first: bool
    backwards: int
    sent: Mapping[dist.ProcessGroup, int]


class OptimizerSteps:
    """Counts the optimizer steps of a training loop, alike on all nodes, from a model's averaged backwards.

    A step is one or several averaged backwards and what follows them: the step of an optimizer; or, where this node
    alone drops it, `scaler.update()` or the next forward. Where no torch.optim.Optimizer has any of the parameters,
    each averaged backward is a step.

    count: of complete steps.
    backwards: averaged so far, on all nodes alike at any time.
    parameters: by name.
    scaler: returns the GradScaler that was given, or None.
    nodes: returns the node of each global rank that has the same part of the parameters.
    what: the aggregator, for messages.

    Raises, in the step of an optimizer that communicates between these nodes, ConfigurationError.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        scaler: Callable[[], Any],
        nodes: Callable[[], Mapping[int, int]],
        what: str,
    ) -> None:
        self.count = self.backwards = 0
        self._parameters = parameters
        self._scaler = scaler
        self._what = what
        self._ask_nodes = nodes
        self._nodes = dict[int, int]()
        self._groups: tuple[object, list[ref[dist.ProcessGroup]]] = (None, [])  # between nodes, of these names
        self._waiting = 0  # averaged backwards that no step has followed yet
        self._since_step = 0  # those since the last step of an optimizer
        self._usual: deque[int] = deque(maxlen=_REMEMBERED)  # how many averaged backwards the last steps had
        self._by_hand: bool | None = None
        self._clears: bool | None = None  # whether gradients are gone when the first forward of a step begins
        self._scalers: WeakSet[Any] | None = None
        self._marks: list[tuple[Any, object]] = []  # of scalers, as they were after the last averaged backward
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._examined: WeakSet[Optimizer] = WeakSet()
        # Those under way: one optimizer's step may call another's, or its own again.
        self._steps: list[_OptimizerStep] = []
        self._closed = self._told = False
        before_steps.show(self, torch.compiler.disable(OptimizerSteps._step_begins))
        after_steps.show(self, torch.compiler.disable(OptimizerSteps._step_ends))

    def close(self) -> None:
        """Look at no optimizer any more."""
        self._closed = True

    def resume(self, count: int) -> None:
        """Resume after `count` steps."""
        self.count = count
        self._waiting = self._since_step = 0

    @property
    def count_to_save(self) -> int:
        """Complete steps, for a state that is taken between two: with one that this node alone has just dropped.

        Its gradients are there until the next forward. A GradScaler tells by itself.
        """
        dropped = self._waiting >= max(self._usual, default=1) and not self._marks
        return self.count + dropped

    # ------------------------------------------------------------------------------------- counting

    def backward_ended(self, *, shadowed: bool) -> None:
        """Take note of an averaged backward. shadowed: this rank has run out of data and follows others, in join()."""
        self._waiting += 1
        self._since_step += 1
        self.backwards += 1
        if shadowed:
            if self._waiting >= max(self._usual, default=1):
                self._end()
            return
        self._marks = [(scaler, update_mark(scaler)) for scaler in self._known_scalers()]
        if not self._usual and self._is_by_hand():
            self._end()

    def update(self) -> None:
        """Find out, before a forward, whether a step has ended though no optimizer has stepped."""
        if self._is_in_step():  # of an optimizer that calls a closure
            return
        if self._waiting == 0:
            if self._clears is None and self._usual:
                self._clears = self._has_no_gradients()
        elif any(update_mark(scaler) is not mark for scaler, mark in self._marks) or self._has_no_gradients():
            self._end()
        elif self._may_be_dropped():
            since_step = self._since_step
            self._end()
            self._since_step = since_step

    def _is_in_step(self) -> bool:
        """Return whether an optimizer is making a step; one that raised has left its step behind."""
        if self._steps and not any(frame.f_locals.get("self") is self._steps[0].optimizer for frame in _stack()):
            self._steps = []
        return bool(self._steps)

    def _may_be_dropped(self) -> bool:
        """Guess whether a step was dropped, without a GradScaler, in a loop that leaves gradients where they are.

        It zeroes them in place, or clears them behind the forward. As many backwards as the longest of the last steps
        had are taken for a step. Where gradients are gone before a forward, nothing has to be guessed.
        """
        return bool(self._usual) and not self._clears and self._waiting >= max(self._usual)

    def _end(self) -> None:
        self._waiting = self._since_step = 0
        self.count += 1

    def _has_no_gradients(self) -> bool:
        return all(parameter.grad is None for parameter in self._parameters.values())

    def _is_by_hand(self) -> bool:
        if self._by_hand is None:
            self._by_hand = not any(map(self._holds_ours, instances_of(Optimizer)))
        if not self._by_hand and self._waiting >= _LONGEST_ACCUMULATION:
            _log.warning(
                "%d backwards were averaged and no optimizer has stepped on these parameters, so %s takes each of them "
                "for a step; use a torch.optim.Optimizer, or accumulate for less long",
                self._waiting,
                self._what,
            )
            self._by_hand = True
        return self._by_hand

    def _known_scalers(self) -> list[Any]:
        known = self._scaler()
        if known is not None:
            return [known]
        if self._scalers is None:
            self._scalers = WeakSet(enabled_scalers())
        return list(self._scalers)

    # ------------------------------------------------------------------------------------- every step of an optimizer

    def _step_begins(self, optimizer: Optimizer) -> None:
        if self._closed or not self._holds_ours(optimizer):
            return
        self._nodes = self._nodes or dict(self._ask_nodes())
        if len(set(self._nodes.values())) < 2:
            return
        if torch._C._current_graph_task_id() != -1:
            raise ConfigurationError(
                f"{type(optimizer).__name__} steps in backward, and {self._what} counts the steps between backwards, "
                f"after which nodes average their parameters; call optimizer.step() after backward"
            )
        groups, first = self._groups_between_nodes(), optimizer not in self._examined
        if first:
            for thing, name in _known_to_communicate(optimizer):
                group = getattr(thing, "process_group", None)
                if not isinstance(group, dist.ProcessGroup) or group in groups:
                    self._refuse(name)
        sent = {group: _sent_in(group) for group in groups}
        self._steps = [*self._steps[-_DEEPEST:], _OptimizerStep(optimizer, first, self.backwards, sent)]

    def _step_ends(self, optimizer: Optimizer) -> None:
        if self._closed or not self._holds_ours(optimizer):
            return
        step = self._steps.pop() if self._steps else None  # others are of steps that raised
        if step is not None and step.optimizer is optimizer and self._has_communicated(step):
            self._look_closer(step)
        self._examined.add(optimizer)
        if self._since_step:
            self._usual.append(self._since_step)  # all of them: what was taken for a dropped step may have been none
        self._since_step, self._by_hand = 0, False
        if self._waiting:
            self._end()

    def _has_communicated(self, step: _OptimizerStep) -> bool:
        """Return whether a step has: one with a closure may have had forwards and backwards of DDP in it."""
        return step.backwards == self.backwards and any(_sent_in(group) != sent for group, sent in step.sent.items())

    def _look_closer(self, step: _OptimizerStep) -> None:
        if step.first:
            self._refuse(type(step.optimizer).__name__)
        if not self._told:  # and no more: it may have been another thread, as one that writes a checkpoint
            self._told = True
            _log.warning(
                "ranks of several nodes communicated while %s made a step: if it sent parameters, %s averages what is "
                "equal already, and nodes do not learn by themselves",
                type(step.optimizer).__name__,
                self._what,
            )

    def _refuse(self, name: str) -> None:
        raise ConfigurationError(
            f"{name} communicates between nodes in its step, and with {self._what} each node makes its own steps, with "
            f"what it has learned by itself; use a plain optimizer such as torch.optim.AdamW, give {name} a process "
            f"group of the ranks of one node, or average gradients in every step (commopt.hierarchical)"
        )

    def _holds_ours(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._ours:
            ours = set(map(id, self._parameters.values()))
            groups = getattr(optimizer, "param_groups", ())
            self._ours[optimizer] = any(id(each) in ours for group in groups for each in group["params"])
        return self._ours[optimizer]

    def _groups_between_nodes(self) -> list[dist.ProcessGroup]:
        """Return the process groups of others over which this rank can reach other nodes."""
        names, node_of = c10d._world.pg_names, self._nodes
        if self._groups[0] != (known := tuple(names.values())):
            found = list[ref[dist.ProcessGroup]]()
            for group, name in list(names.items()):
                ranks = () if name.startswith("commopt/") else c10d._world.pg_group_ranks.get(group, ())
                if len({node_of[rank] for rank in ranks if rank in node_of}) > 1:
                    found.append(ref(group))
            self._groups = known, found
        alive = (each() for each in self._groups[1])
        return [group for group in alive if group is not None]


def _sent_in(group: dist.ProcessGroup) -> int:
    """Return how many collectives this rank has begun in a group, 0 where its backend does not tell."""
    try:
        number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # in no stub
    except (AttributeError, RuntimeError):
        return 0
    return number


def _stack() -> Iterator[FrameType]:
    """Yield who calls, from here on outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _known_to_communicate(optimizer: Optimizer) -> Iterator[tuple[object, str]]:
    """Yield what is known by its class to do so: an optimizer, owners of its hooks, wrappers that are calling it."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    things: list[object] = [optimizer, *(getattr(hook, "__self__", hook) for hook in hooks)]
    things += [frame.f_locals["self"] for frame in _stack() if "self" in frame.f_locals]
    for thing in things:
        for kind in type(thing).__mro__:
            if kind.__name__ in _COMMUNICATE or kind.__module__.partition(".")[0] in _PACKAGES:
                yield thing, kind.__name__
