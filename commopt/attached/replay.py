# SPDX-License-Identifier: Apache-2.0
"""Buckets whose kernels are replayed as CUDA graphs, from the third time on that the same bucket comes.

A replay does to the device what `Reduction.average` would, and to the host's objects what it did when it was captured.
What may change between steps is compared first: where residuals, factors, masks and the staged values are. Whatever
differs takes the plain way, kernel by kernel, and is captured anew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from commopt.aggregate.zero_matrices import LOOK_EVERY_STEPS
from commopt.attached.reduction import Reduction
from commopt.errors import ConfigurationError
from commopt.feedback import SAMPLE_EVERY_STEPS, Layout, ResidualStore, Staged
from commopt.groups import WireBytes
from commopt.groups.segments import Segments

VARIABLE = "COMMOPT_REPLAY"

_PLAIN_TIMES = 2
_MOST_CAPTURES = 64  # of one bucket: what changes so often is not worth it

_log = logging.getLogger("commopt")


def replay_wanted() -> bool:
    """Return whether buckets may be replayed. Raises ConfigurationError for a value of COMMOPT_REPLAY but 0 and 1."""
    value = os.environ.get(VARIABLE, "") or "1"
    if value not in ("0", "1"):
        raise ConfigurationError(f"{VARIABLE}={value} must be 1 (or unset), or 0 to launch every kernel by itself")
    return value == "1"


@dataclass(eq=False)
class _Program:
    """What a bucket does, captured.

    begins, ends: what is staged before and after it.
    beside: payload that `Aggregator.calls` cannot foresee, of one step; None for none.
    places: objects whose attributes the graphs work with, and these: tensors, and versions of what holds some.
    masks: of untouched elements, and their tensors.
    kept: whatever else the graphs work with, kept alive.
    """

    segments: Segments
    begins: Staged
    ends: Staged
    beside: WireBytes | None
    places: list[tuple[object, str, object]]
    masks: list[tuple[Any, tuple[Tensor, ...]]]
    kept: list[object]


@dataclass(eq=False)
class _Seen:
    """One bucket: where it is, how often it went the plain way, its program, and whether it shall have none."""

    layout: Layout
    place: int | None
    times: int = 0
    captures: int = 0
    program: _Program | None = None
    never: bool = False
    alive: list[object] = field(default_factory=list)  # what the key names by its id


class Replays:
    """The buckets of one registration.

    store: of their residuals.
    moves: whether buckets come at other addresses in every step, as FSDP's; they are copied to and from one place.
    count: how many buckets were replayed.
    """

    def __init__(self, store: ResidualStore, count: int = 0, *, moves: bool = False) -> None:
        self.store = store
        self.moves = moves
        self.count = count
        self._failed = False  # one warning is enough
        self._buckets: dict[Hashable, _Seen] = {}
        self._phase: tuple[object, int, int] = None, 0, 0  # of an aggregator at a step

    def replay(self, task: Reduction) -> bool:
        """Average the bucket of `task` by its graphs, on the current stream; return False where there are none yet.

        The third time they are captured, and replayed at once. Nothing was done where False is returned.
        """
        if task.exact_sample is not None or task.recorded is not None or task.base is not None:
            return False
        if torch.cuda.is_current_stream_capturing():  # the user captures whole steps
            return False
        key = self._key(task)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._forget_others(task)
            bucket = self._buckets[key] = _Seen(task.layout, self._place(task), alive=[task.aggregator, task.team])
        memory = self.store.buffers.get(task.layout)
        if memory is None or memory.sender is not task.aggregator or not memory.complete:
            return False  # not all residuals of the bucket are where the last steps had them
        if bucket.never:
            return False
        program = bucket.program
        if program is None or not self._fits(program, task):
            bucket.program = program = self._captured(task, bucket)
            if program is None:
                return False
        elif program.masks and task.step.number % LOOK_EVERY_STEPS == 0:
            return False  # on all ranks alike: they may exchange which elements are untouched
        else:
            self._repeat_on_host(program, task)
        if self.moves:
            self._launch_elsewhere(program, task)
        else:
            program.segments.replay()
        self.count += 1
        return True

    def _key(self, task: Reduction) -> Hashable:
        step, buffer, source = task.step, task.buffer, task.source
        number, scaler = step.number, step.scaler
        scale = None if scaler is None else getattr(scaler, "_scale", None)
        aggregator, of_step, phase = self._phase
        if aggregator is not task.aggregator or of_step != number:
            phase = task.aggregator.phase(number)
            self._phase = task.aggregator, number, phase
        place = None if self.moves else buffer.data_ptr()
        return (
            (task.layout, task.number, task.last, task.scale, task.unit, task.spans),
            (place, buffer.numel(), buffer.dtype, None if source is None else source.numel()),
            (id(task.aggregator), id(task.team), phase, number % SAMPLE_EVERY_STEPS == 0),
            (None if scale is None else scale.data_ptr(), self.store.transaction.per_step),
        )

    def _place(self, task: Reduction) -> int | None:
        return None if self.moves else task.buffer.data_ptr()

    def _forget_others(self, task: Reduction) -> None:
        """Forget the buckets that this one comes in place of, whose memory their graphs would keep."""
        now = task.layout, self._place(task)
        self._buckets = {
            key: each
            for key, each in self._buckets.items()
            if (each.layout, each.place) == now or not each.layout.shares_names(task.layout)
        }

    def _fits(self, program: _Program, task: Reduction) -> bool:
        """Return whether everything that the graphs work with is where it was."""
        transaction = self.store.transaction
        if transaction.per_step:
            now, then = transaction.snapshot(), program.begins
            if now.residuals.keys() != then.residuals.keys() or not _same(now.tensors(), then.tensors()):
                return False
        for each, name, value in program.places:  # not by a function: every bucket comes here
            if getattr(each, name) is not value:
                return False
        return not program.masks or all(_same(mask.tensors(), tensors) for mask, tensors in program.masks)

    # ------------------------------------------------------------------------------------- capture

    def _captured(self, task: Reduction, bucket: _Seen) -> _Program | None:
        """Capture the bucket if it is time; what the host keeps is then as after `Reduction.average`."""
        store, transaction = self.store, self.store.transaction
        try:
            task.aggregator.check_capture(task.step.number, task.team)
        except ConfigurationError:
            bucket.never = task.step.number > task.aggregator.start_step
            return None
        masks = [mask for (_, layout), mask in store.untouched.items() if layout.shares_names(task.layout)]
        masks = [mask for mask in masks if not mask.empty]
        if masks and (task.step.number % LOOK_EVERY_STEPS == 0 or any(mask.asks_host for mask in masks)):
            return None
        bucket.times += 1
        if bucket.times <= _PLAIN_TIMES:
            return None
        bucket.captures += 1
        bucket.never = bucket.captures > _MOST_CAPTURES
        begins, steps, beside, sums = transaction.snapshot(), transaction.steps, store.beside, self._sums(task)
        segments, there = Segments(), self._at_one_place(task)
        memory = store.scratch.version
        try:
            with segments.captured():
                there.average()
        except Exception as error:
            self._undo(begins, steps, beside)
            bucket.never = True
            _log.log(
                logging.INFO if self._failed else logging.WARNING,
                "%s cannot be replayed as a CUDA graph, and its kernels are launched one by one: %s: %s",
                task,
                type(error).__name__,
                error,
            )
            self._failed = True
            return None
        if not _are_there(sums):  # one has begun just now: later steps add to it
            self._undo(begins, steps, beside)
            for each, name, value in sums:
                setattr(each, name, value)
            return None
        if store.scratch.version is not memory:  # freed with the bucket's end, so these graphs work with what is gone
            self._undo(begins, steps, beside)
            return None
        sent = None if store.beside == beside else store.beside - beside
        places = self._places(task)
        kept: list[object] = [there.buffer, there.source, *store.scratch.tensors(), [each for each, *_ in places]]
        masked = [(mask, tuple(mask.tensors())) for mask in masks]
        return _Program(segments, begins, transaction.snapshot(), sent, places, masked, kept)

    def _undo(self, begins: Staged, steps: int, beside: WireBytes) -> None:
        """Let the host's objects be as before a capture."""
        self.store.transaction.restore(begins)
        self.store.transaction.steps = steps
        self.store.beside = beside

    def _places(self, task: Reduction) -> list[tuple[object, str, object]]:
        store, transaction = self.store, self.store.transaction
        residuals = {*store.buffers[task.layout].found.values(), *transaction.snapshot().residuals}
        places = [
            (store.factors, "version", store.factors.version),
            (store.scratch, "version", store.scratch.version),
            *self._sums(task),
        ]
        for residual in residuals:
            places += [(residual, "values", residual.values), (residual, "spare", residual.spare)]
        return places

    def _sums(self, task: Reduction) -> list[tuple[object, str, object]]:
        """Return the sums over steps, which the bucket adds to where they are."""
        transaction, error = self.store.transaction, self.store.error
        sums: list[tuple[object, str, object]] = [(transaction, "dropped", transaction.dropped)]
        if task.step.number % SAMPLE_EVERY_STEPS == 0:
            sums.append((error, "squares", error.squares))
        return sums

    def _at_one_place(self, task: Reduction) -> Reduction:
        """Return the same task, its tensors where those of every step are copied to."""
        if not self.moves:
            return task
        scratch, buffer, source = self.store.scratch, task.buffer, task.source
        there = scratch.take("replayed", tuple(buffer.shape), buffer.dtype, buffer.device)
        if source is not None:
            source = scratch.take("replayed source", tuple(source.shape), source.dtype, source.device)
        return replace(task, buffer=there, source=source)

    # ------------------------------------------------------------------------------------- replay

    def _repeat_on_host(self, program: _Program, task: Reduction) -> None:
        """Do to the host's objects what the bucket did to them when it was captured."""
        store, transaction = self.store, self.store.transaction
        commits = transaction.commits + program.ends.commits[len(program.begins.commits) :]
        if transaction.per_step:
            transaction.restore(program.ends)
        transaction.commits = commits
        if task.last:
            transaction.steps += 1
        if program.beside is not None:
            store.beside += program.beside

    def _launch_elsewhere(self, program: _Program, task: Reduction) -> None:
        """Replay a bucket where it was captured, and copy the result back."""
        there, source = program.kept[:2]
        assert isinstance(there, Tensor)
        if task.source is not None and isinstance(source, Tensor):
            source.copy_(task.source)
        else:
            there.copy_(task.buffer)
        program.segments.replay()
        task.buffer.copy_(there)


def _are_there(places: Sequence[tuple[object, str, object]]) -> bool:
    return all(getattr(each, name) is value for each, name, value in places)


def _same(these: Any, those: Any) -> bool:
    these, those = list(these), list(those)
    return len(these) == len(those) and all(map(partial(_is), these, those))


def _is(one: object, other: object) -> bool:
    return one is other
