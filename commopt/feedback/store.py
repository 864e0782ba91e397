# SPDX-License-Identifier: Apache-2.0
"""Where the residuals of a registration live: found by path, kind and layout, moved when buckets change."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor

from commopt.errors import ConfigurationError
from commopt.feedback.counts import StepCounts
from commopt.feedback.factors import FactorStore
from commopt.feedback.layout import Layout, gaps
from commopt.feedback.quality import SampledError
from commopt.feedback.residual import ANCHOR, EXP_AVG_SQ, Residual, ResidualKind, is_average
from commopt.feedback.scratch import Scratch
from commopt.feedback.transaction import Transaction
from commopt.groups import WireBytes

Key = tuple[str, str, Layout]

T = TypeVar("T")

_SEARCHES = 3  # for residuals of a buffer that no encoding asks for; after so many they stay where they are


@dataclass(eq=False)
class BufferMemory:
    """The residuals of one buffer.

    sender: the aggregator that sends the buffer.
    paths: where that keeps residuals.
    found: the residuals that its encodings asked for, by path, kind and layout.
    complete: whether all residuals of the buffer are in `found`, so that a step need not look anywhere else.
    searches: how often residuals were looked for that are in no encoding.
    ways: what the sender has worked out about the buffer once, by keys of its own.
    """

    sender: object = None
    paths: tuple[str, ...] = ()
    found: dict[Key, Residual] = field(default_factory=dict)
    complete: bool = False
    searches: int = 0
    ways: dict[Hashable, Any] = field(default_factory=dict)


class ResidualStore:
    """The residuals of one rank, and beside them the rest of its memory from step to step.

    The life of a residual:

        put(), from a checkpoint            residual(), first use: zero
                        |                   |
                        v                   v     transaction.stage()
                      +-----------------------+  -------------------->  next values
                      | IN USE by an encoding |                             |
                      | path, kind, layout    |  <--------------------------+  end_bucket(): committed, or dropped
                      +-----------------------+                             +-> after a flush: gone
                        |                   ^
              release() |                   | residual()
                        v                   |
                      +-----------------------+
                      | WAITING for an        |  -----> pop(), then add() at another path, or on another rank
                      | encoding; path only   |         of its node
                      +-----------------------+
                        ^
                        |
        add(), from a checkpoint of another world

    `migrate` releases residuals when a buffer is new, when another aggregator sends it, and when no encoding asks for
    them any more; `aggregate.shards.reshard` releases them to move them inside a node. They move at no other time.
    Waiting residuals of the same elements add up, so the sum over all ranks stays what it is.

    Used by one thread at a time: the lane's in backward, the caller's between steps. Any thread may ask for residuals:
    while `lock` is held nothing is committed or moved.
    """

    def __init__(self, per_step: bool = False, warm: bool = False, lock: RLock | None = None) -> None:
        """per_step: see Transaction. warm: whether there may be residuals before the first step; alike on all ranks."""
        self.lock = RLock() if lock is None else lock
        self.scratch = Scratch()
        self.transaction = Transaction(self._remove, self.scratch, self.lock, per_step)
        self.warm = warm
        self.offload = False  # whether values are kept in host memory, and fetched for each message
        self.buffers: dict[Layout, BufferMemory] = {}  # no two of them have a parameter in common
        self.divisions: dict[str, dict[Layout, str]] = {}  # by path: how buffers were divided over the ranks last
        self._in_use: dict[Key, Residual] = {}
        self._waiting: list[Residual] = []
        # The rest of the memory:
        self.factors = FactorStore()
        self.counts = StepCounts()
        self.error = SampledError()
        self.beside = WireBytes()  # payload that `Aggregator.calls` cannot foresee
        self.untouched: dict[tuple[str, Layout], Any] = {}  # by path: see aggregate.zeros
        # Of a checkpoint, until they are in use again: which elements of a region were touched, bool, in host memory.
        self.touched_before: dict[tuple[str, Layout], Tensor] = {}
        self.expected_square: Tensor | None = None  # of a node's gradient, by its moments: float64 [1], alike on ranks
        self.expected: dict[Layout, Tensor] = {}  # this rank's parts of the next one

    # ------------------------------------------------------------------------------------ in use

    def residual(
        self, path: str, kind: ResidualKind, layout: Layout, device: torch.device, dtype: torch.dtype, whole: Layout
    ) -> Residual:
        """Return the residual for `layout`, in use: with the values known for its elements, else zero.

        whole: the layout of all that is encoded; a server's `layout` is its part of that, and may have been another.
        """
        key = (path, kind, layout)
        with self.lock:
            if key not in self._in_use:
                # A worker's is asked for first, so that it takes over the residuals of servers.
                self.release(path, whole, None if kind == "worker" else kind)
                if kind == "worker":
                    values = self.pop(path, layout, device)
                else:
                    values = torch.zeros(layout.numel, dtype=torch.float32, device=device)
                self.put(Residual(path, kind, layout, values.to(dtype)))
            found = self._in_use[key]
            found.flushing = False
            if not self.offload:
                found.place(device, dtype, offload=False)  # a checkpoint brings values in host memory
            if kind == "worker" and any(each.path == path and each.layout.overlaps(layout) for each in self._waiting):
                found.values = (found.values + self.pop(path, layout, found.values.device)).to(dtype)
                found.used_on = None
            if self.offload:
                found.place(device, dtype, offload=True)
            return found

    def put(self, residual: Residual) -> None:
        """Put a residual in use."""
        with self.lock:
            self._in_use[residual.path, residual.kind, residual.layout] = residual

    def _remove(self, residual: Residual) -> None:
        del self._in_use[residual.path, residual.kind, residual.layout]

    def residuals(self) -> list[Residual]:
        """Return all residuals, in use and waiting; offloaded ones once they are there."""
        with self.lock:
            self.transaction.settle()
            return [*self._in_use.values(), *self._waiting]

    def has(self, path: str, layout: Layout) -> bool:
        """Return whether there is any residual for the elements of `layout`."""
        return any(each.path == path and each.layout.overlaps(layout) for each in self.residuals())

    # ----------------------------------------------------------------------------------- waiting

    def release(self, path: str, layout: Layout, kind: ResidualKind | None = None) -> None:
        """Let the residuals (of one kind) with elements of `layout` wait: a server's and a worker's add up there.

        Both are in units of the average, so the sum stays what it is, and nothing needs to be sent.
        """
        with self.lock:
            self.transaction.settle()
            for each in list(self._in_use.values()):
                if each.path == path and kind in (None, each.kind) and each.layout.overlaps(layout):
                    self._release(each)

    def _release(self, residual: Residual) -> None:
        if self.transaction.stays_until_commit(residual):
            raise ConfigurationError(
                f"one backward sends gradients of {residual.layout.title} in two messages that are not of the same "
                f"parameters, and with a GradScaler both would have to be dropped as one; let fully_shard put these "
                f"parameters into a group of their own, or train without a GradScaler, in bfloat16"
            )
        if self._in_use.get((residual.path, residual.kind, residual.layout)) is residual:  # else it waits already
            self._remove(residual)
            self.add(residual.path, residual.layout, residual.values.float())

    def add(self, path: str, layout: Layout, values: Tensor) -> None:
        """Let float32 `values` wait at `path`, in addition to what waits there already."""
        with self.lock:
            self._waiting.append(Residual(path, "worker", layout, values))

    def pop(self, path: str, layout: Layout, device: torch.device | None = None) -> Tensor:
        """Return the float32 sum of the waiting residuals of each element of `layout`; they wait no longer.

        device: None for where the first of them lies.
        """
        with self.lock:
            found = [each for each in self._waiting if each.path == path and each.layout.overlaps(layout)]
            if device is None:
                device = found[0].values.device if found else torch.device("cpu")
            total = torch.zeros(layout.numel, dtype=torch.float32, device=device)
            for each in found:
                self._waiting.remove(each)
                common = layout.common(each.layout)
                for here, there, numel in common:
                    total[here : here + numel] += each.values[there : there + numel].to(device)
                for span in gaps(sorted((there, there + numel) for _, there, numel in common), each.layout.numel):
                    # In the same memory: to copy it would take as much again while backward still needs memory.
                    self.add(path, each.layout.select([span]), each.values[slice(*span)])
        return total

    # ------------------------------------------------------------------------------------ moving

    def migrate(self, layout: Layout, sender: object, paths: tuple[str, ...], *, search: bool) -> BufferMemory:
        """Let `sender`, which keeps residuals at `paths`, send the residuals of a buffer's parameters from now on.

        A sender that keeps none flushes them from path "". Adam's moments go to a sender that keeps some, else they
        stay. Nothing is communicated. Residuals that have to change their rank move where `divides_anew` says so, which
        depends on who sent what, alike on every rank, and not on the residuals of this one.
        Asked again before every step until the memory is complete. search: look for residuals that the last step's
        encodings did not ask for.
        """
        with self.lock:
            memory = self.buffers.get(layout)
            if memory is None or memory.paths != paths:
                self._move_to(paths, layout)
            if memory is None or memory.sender is not sender:
                # All ranks come here alike, so here they forget it together, and ask each other again.
                self.untouched = {key: each for key, each in self.untouched.items() if not key[1].shares_names(layout)}
                if any(known.shares_names(layout) for known in self.buffers):  # it has been sent since the checkpoint
                    before = self.touched_before.items()
                    self.touched_before = {key: each for key, each in before if not key[1].shares_names(layout)}
                self.buffers = _others(self.buffers, layout)
                memory = self.buffers[layout] = BufferMemory(sender, paths)
            elif search:
                self._search(layout, memory)
            else:
                memory.found.clear()
            return memory

    def _move_to(self, paths: tuple[str, ...], layout: Layout) -> None:
        """Move the residuals of a buffer that are at other paths to `paths`."""
        senders = {known.paths for key, known in self.buffers.items() if key.shares_names(layout)}
        for path in self.divisions:
            if senders - {paths} or not any(f"{each}.".startswith(f"{path}.") for each in paths):
                self.divisions[path] = _others(self.divisions[path], layout)
        heir = next((path for path in reversed(paths) if not is_average(path)), "")
        for path in {each.path for each in self.residuals()} - {heir, *paths}:
            alike = (each for each in paths if each.rpartition(".")[2] == path.rpartition(".")[2])
            to = next(alike, None) if is_average(path) else heir
            if to is not None and self.has(path, layout):
                self.release(path, layout)
                self.add(to, layout, self.pop(path, layout))

    def _search(self, layout: Layout, memory: BufferMemory) -> None:
        """Release residuals that the last step did not ask for, so that the next one finds them, or be complete."""
        used, paths = set(memory.found.values()), memory.paths or ("",)
        unused = [
            each
            for each in self.residuals()
            if each.path in paths and each not in used and each.layout.overlaps(layout)
        ]
        if memory.searches < _SEARCHES:
            for each in unused:
                self._release(each)
        memory.searches += 1
        flushing = any(each.flushing for each in used)
        memory.complete = not flushing and (not unused or memory.searches > _SEARCHES)
        if not memory.complete:
            memory.found.clear()

    def divides_anew(self, path: str, layout: Layout, division: str) -> bool:
        """Note how a buffer is divided over the ranks; return whether its residuals may lie on other ranks of the node.

        Ranks that see the same buffers get the same answers.
        """
        with self.lock:
            known = self.divisions.get(path, {})
            if known.get(layout) == division:
                return False
            self.divisions[path] = {**_others(known, layout), layout: division}
            return self.warm or self.transaction.steps > 0

    # ------------------------------------------------------------------------------------- facts

    def memory(self) -> dict[str, int]:
        """Return the bytes that are kept on this rank, by kind.

        residuals, averages: with memory for the next ones of a step that a GradScaler may drop. averages are Adam's
            moments, and the parameters and the momentum that nodes agreed on.
        factors: of PowerSGD, or how far nodes agree about Adam's directions.
        masks: which elements no rank has touched.
        scratch: of the work on one bucket.
        offloaded: with LocalSGD(offload=True), the residuals and averages, in host memory.
        """
        found = {"residuals": 0, "averages": 0, **({"offloaded": 0} if self.offload else {})}
        for each in self.residuals():
            tensors = [tensor for tensor in (each.values, each.spare) if tensor is not None]
            kind = "averages" if is_average(each.path) else "residuals"
            found[kind if each.used_on is None else "offloaded"] += sum(tensor.nbytes for tensor in tensors)
        masks = sum(each.nbytes for each in list(self.untouched.values()))
        return {**found, "factors": self.factors.nbytes, "masks": masks, "scratch": self.scratch.nbytes}

    def stats(self) -> dict[str, Any]:
        """Return the L2 norm of all residuals, the sampled error, memory and dropped commits; waits for devices."""
        residuals = self.residuals()
        momentum = [r for r in residuals if is_average(r.path) and not r.path.endswith((EXP_AVG_SQ, ANCHOR))]
        tensors = [tensor for each in residuals for tensor in (each.values, each.spare) if tensor is not None]
        return {
            "residual_norm": _norm(each for each in residuals if not is_average(each.path)),
            **({"momentum_norm": _norm(momentum)} if momentum else {}),
            "compression_error": self.error.value(),
            "residual_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            "dropped_commits": int(self.transaction.dropped),
            "factor_bytes": self.factors.nbytes,
        }


def _others(known: Mapping[Layout, T], layout: Layout) -> dict[Layout, T]:
    """Return the entries of buffers that have no parameter in common with `layout`."""
    return {other: each for other, each in known.items() if not other.shares_names(layout)}


def _norm(residuals: Iterable[Residual]) -> float:
    return sqrt(sum(float(each.values.double().square().sum()) for each in residuals))
