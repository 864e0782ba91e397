# SPDX-License-Identifier: Apache-2.0
"""All residuals of one registration: found by what they are for, moved when buckets change, committed or dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from threading import RLock
from typing import Any, Literal, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from commopt.errors import ConfigurationError
from commopt.feedback.counts import StepCounts
from commopt.feedback.factors import FactorStore
from commopt.feedback.layout import Layout, gaps
from commopt.feedback.quality import SampledError
from commopt.groups import WireBytes
from commopt.kernels.residual import round_by_chance

Kind = Literal["worker", "server"]
Key = tuple[str, str, Layout]

T = TypeVar("T")

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
"""Where Adam's moments are kept, below a level's residuals: as torch calls them."""
ANCHOR, MOMENTUM_BUFFER = "anchor", "momentum_buffer"
"""Where the parameters that nodes agreed on last are kept, and their outer momentum, as torch.optim.SGD calls it."""
_AVERAGES = (EXP_AVG, EXP_AVG_SQ, ANCHOR, MOMENTUM_BUFFER)

_SWEEPS = 3  # of what nobody asks for; it stays where it is then


@dataclass(eq=False)
class Residual:
    """One residual: of what this rank sent ("worker"), or of the sum it encoded for all ("server").

    `path` tells the level of the aggregator ("", "inter", "intra"). Values are unscaled and in units of the average:
    their sum over all ranks is what the model has not been told yet. Those of Adam's moments are averages, each of its
    own node; so is what nodes agreed on, of which all have the same.
    """

    path: str
    kind: Kind
    layout: Layout
    values: Tensor  # [layout.numel], float32 or bfloat16
    spare: Tensor | None = None  # float32 [layout.numel]: the next values, while a whole step may yet be dropped
    once: bool = False  # sent exactly, hence gone once it is sent


@dataclass(eq=False)
class Memory:
    """What was found for one buffer, by path, kind and layout, and by what it is sent.

    settled: everything kept for the buffer is in `found`, so that a step looks nowhere else.
    """

    by: object = None
    paths: tuple[str, ...] = ()
    found: dict[Key, Residual] = field(default_factory=dict)
    settled: bool = False
    sweeps: int = 0


def is_average(path: str) -> bool:
    """Return whether averages are kept at `path`, moments or parameters: nobody is owed them, a sum means nothing."""
    return path.rpartition(".")[2] in _AVERAGES


class Scratch:
    """Uninitialized memory by tag that lives from bucket to bucket; what a tag held is lost when it is taken again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}

    def take(self, tag: str, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous tensor in the memory of `tag`, which grows to the largest ever asked for."""
        shape = (shape,) if isinstance(shape, int) else shape
        nbytes = prod(shape) * dtype.itemsize
        buffer = self._buffers.get((tag, device))
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[tag, device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer[:nbytes].view(dtype).view(shape)


@dataclass(eq=False)
class ResidualStore:
    """Residuals of one rank; used by one thread at a time: the lane's in backward, the caller's between steps.

    Any thread may ask what there is: while `lock` is held nothing is committed or moved. Residuals move in `migrate`
    alone: when a buffer is new, when something else sends it, and in the first steps after a load.

    per_step: commit all buckets of a step or none, as a GradScaler drops whole steps; else each bucket by itself.
    """

    per_step: bool = False
    scratch: Scratch = field(default_factory=Scratch)
    error: SampledError = field(default_factory=SampledError)
    factors: FactorStore = field(default_factory=FactorStore)
    beside: WireBytes = field(default_factory=WireBytes)  # payload that `Aggregator.calls` cannot foresee
    untouched: dict[tuple[str, Layout], Any] = field(default_factory=dict)  # by level: see aggregate.zeros
    counts: StepCounts = field(default_factory=StepCounts)
    steps: int = 0
    warm: bool = False  # whether any residual can be other than zero; alike on every rank
    dropped: Tensor | int = 0  # commits that a non-finite value prevented
    finite: Tensor | None = None  # whether none was in the last step: bool, 0-d; None where nothing was to be committed
    lock: RLock = field(default_factory=RLock, repr=False)
    buffers: dict[Layout, Memory] = field(default_factory=dict)  # of which no two have a parameter in common
    placed: dict[str, dict[Layout, str]] = field(default_factory=dict)  # by path: how buffers were divided last
    flags: list[Tensor] = field(default_factory=list)  # of the step: whether results are finite, bool, 0-d each
    expected_square: Tensor | None = None  # of a node's gradient, by its moments: float64 [1], alike on every rank
    expected: dict[Layout, Tensor] = field(default_factory=dict)  # this rank's parts of the next one
    _slots: dict[Key, Residual] = field(default_factory=dict)
    _loose: list[Residual] = field(default_factory=list)  # what no buffer has asked for yet, or does not any more
    _staged: dict[Residual, tuple[Tensor, int]] = field(default_factory=dict)  # each with the rank that rounds it
    _staged_factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _judged: int = 0  # flags of the buffers before the one under way
    _unjudged: list[Tensor] = field(default_factory=list)  # results that nobody has given a verdict on

    # -------------------------------------------------------------------------------------- moving

    def migrate(self, layout: Layout, by: object, paths: tuple[str, ...], *, settle: bool) -> Memory:
        """Let `by`, which keeps residuals at `paths`, send from now on what is kept for the parameters of a buffer.

        What keeps none sends it as a leftover of path "". Adam's moments go to where there are some, else they stay for
        whatever has some again. Nothing is communicated; what has to change its rank is told by `place`, which depends
        on what was sent by whom, alike on every rank, and not on what this one holds.
        Asked again before every step until `settle`d: then nothing kept for the buffer is left that `by` did not use.
        """
        with self.lock:
            memory = self.buffers.get(layout)
            if memory is None or memory.paths != paths:
                self._redirect_to(paths, layout)
            if memory is None or memory.by is not by:
                self.buffers = _others(self.buffers, layout)
                # Here, where all ranks come alike: what they hold of a buffer differs, and they ask each other again.
                self.untouched = {key: each for key, each in self.untouched.items() if not key[1].shares_names(layout)}
                memory = self.buffers[layout] = Memory(by, paths)
            elif settle:
                self._sweep(layout, memory)
            else:
                memory.found.clear()
            return memory

    def _redirect_to(self, paths: tuple[str, ...], layout: Layout) -> None:
        senders = {known.paths for key, known in self.buffers.items() if key.shares_names(layout)}
        for path in self.placed:
            if senders - {paths} or path not in paths:
                self.placed[path] = _others(self.placed[path], layout)
        heir = next((path for path in reversed(paths) if not is_average(path)), "")
        for path in {slot.path for slot in self.slots()} - {heir, *paths}:
            alike = (each for each in paths if each.rpartition(".")[2] == path.rpartition(".")[2])
            to = next(alike, None) if is_average(path) else heir
            if to is not None and self.holds(path, layout):
                self.dissolve(path, layout)
                self.deposit(to, layout, self.collect(path, layout))

    def _sweep(self, layout: Layout, memory: Memory) -> None:
        """Take apart what the last step did not ask for, so that the next one finds it; else the buffer is settled."""
        used, scope = set(memory.found.values()), memory.paths or ("",)
        unused = [
            slot for slot in self.slots() if slot.path in scope and slot not in used and slot.layout.overlaps(layout)
        ]
        if memory.sweeps < _SWEEPS:
            for slot in unused:
                self._take_apart(slot)
        memory.sweeps += 1
        leaving = any(slot.once for slot in used)
        memory.settled = not leaving and (not unused or memory.sweeps > _SWEEPS)
        if not memory.settled:
            memory.found.clear()

    def place(self, path: str, layout: Layout, division: str) -> bool:
        """Note how a buffer is divided over the ranks; return whether its residuals may lie on other ranks of the node.

        Ranks that see the same buffers get the same answers.
        """
        with self.lock:
            placed = self.placed.get(path, {})
            if placed.get(layout) == division:
                return False
            self.placed[path] = {**_others(placed, layout), layout: division}
            return self.warm

    def dissolve(self, path: str, layout: Layout, kind: Kind | None = None) -> None:
        """Take apart the residuals (of one kind) with elements of `layout`; a server's joins what the rank sends.

        Both are in units of the average, so the sum stays what it is, and nothing needs to be sent.
        """
        with self.lock:
            for slot in list(self._slots.values()):
                if slot.path == path and kind in (None, slot.kind) and slot.layout.overlaps(layout):
                    self._take_apart(slot)

    def _take_apart(self, slot: Residual) -> None:
        key = (slot.path, slot.kind, slot.layout)
        if self.per_step and slot in self._staged:
            raise ConfigurationError(
                f"one backward sends gradients of {slot.layout.title} in two messages that are not of the same "
                f"parameters, and with a GradScaler both would have to be dropped as one; let fully_shard put these "
                f"parameters into a group of their own, or train without a GradScaler, in bfloat16"
            )
        if self._slots.get(key) is slot:  # else it is apart already
            del self._slots[key]
            self.deposit(slot.path, slot.layout, slot.values.float())

    def deposit(self, path: str, layout: Layout, values: Tensor) -> None:
        """Keep float32 `values` until elements of `layout` are asked for, beside what is kept for them already."""
        with self.lock:
            self._loose.append(Residual(path, "worker", layout, values))

    def collect(self, path: str, layout: Layout, device: torch.device | None = None) -> Tensor:
        """Return the float32 sum of what is kept for each element of `layout`, and keep it no longer.

        device: None for where the first of it lies.
        """
        with self.lock:
            found = [each for each in self._loose if each.path == path and each.layout.overlaps(layout)]
            if device is None:
                device = found[0].values.device if found else torch.device("cpu")
            total = torch.zeros(layout.numel, dtype=torch.float32, device=device)
            for each in found:
                self._loose.remove(each)
                common = layout.common(each.layout)
                for here, there, numel in common:
                    total[here : here + numel] += each.values[there : there + numel].to(device)
                rest = tuple(gaps(sorted((there, there + numel) for _, there, numel in common), each.layout.numel))
                if rest:
                    self.deposit(path, each.layout.select(rest), torch.cat([each.values[a:b] for a, b in rest]))
        return total

    # ------------------------------------------------------------------------------------- finding

    def slot(
        self, path: str, kind: Kind, layout: Layout, device: torch.device, dtype: torch.dtype, whole: Layout
    ) -> Residual:
        """Return the residual for `layout`: what is known about its pieces, else zero.

        whole: what is encoded; a server's `layout` is its part of that, where it may have had another part before.
        """
        key = (path, kind, layout)
        with self.lock:
            if key not in self._slots:
                # A worker's is asked for first, so that what a server kept is sent next.
                self.dissolve(path, whole, None if kind == "worker" else kind)
                values = torch.zeros(layout.numel, dtype=torch.float32, device=device)
                self.install(Residual(path, kind, layout, values.to(dtype)))
            slot = self._slots[key]
            slot.once = False  # whatever became of it as a leftover
            slot.values = slot.values.to(device, dtype)  # what a checkpoint brought is in host memory
            if kind == "worker" and any(each.path == path and each.layout.overlaps(layout) for each in self._loose):
                slot.values = (slot.values + self.collect(path, layout, device)).to(dtype)
            return slot

    def install(self, slot: Residual) -> None:
        """Put a residual in its place."""
        with self.lock:
            self._slots[slot.path, slot.kind, slot.layout] = slot

    def rest(self, path: str, layout: Layout, known: object) -> None:
        """Keep what is known of the elements of `layout` that nobody has touched, until something else sends them."""
        self.untouched[path, layout] = known

    def slots(self) -> list[Residual]:
        """Return all residuals, also those that no buffer has asked for yet."""
        with self.lock:
            return [*self._slots.values(), *self._loose]

    def holds(self, path: str, layout: Layout) -> bool:
        """Return whether anything is kept for the elements of `layout`."""
        return any(slot.path == path and slot.layout.overlaps(layout) for slot in self.slots())

    # ---------------------------------------------------------------------------------- committing

    def stage(self, slot: Residual, rank: int = 0) -> tuple[Tensor, Tensor]:
        """Return the slot's values, and where to write the next, which count once they are committed; both float32.

        A step that sends a buffer twice, and commits at its end, finds there what it has left out the first time.
        rank: this one's, global, so that ranks round by random bits of their own: errors that are alike would add up
        where others cancel.
        """
        before = self._staged.get(slot)
        old = slot.values.float() if before is None else before[0]
        if self.per_step:
            if slot.spare is None or before is not None:
                slot.spare = torch.empty(slot.layout.numel, dtype=torch.float32, device=slot.values.device)
            staged = slot.spare
        else:
            tag = f"{len(self._staged)} staged"
            staged = self.scratch.take(tag, slot.layout.numel, torch.float32, slot.values.device)
        self._staged[slot] = (staged, rank)
        return old, staged

    def stage_factors(self, factors: Tensor) -> Tensor:
        """Return where to write the next values of `factors`, which are small and count once they are committed."""
        tag = f"{len(self._staged_factors)} staged factors"
        staged = self.scratch.take(tag, tuple(factors.shape), factors.dtype, factors.device)
        self._staged_factors.append((factors, staged))
        return staged

    def begin_step(self) -> None:
        """Drop what is staged: committed, or left by a backward that raised."""
        self._staged.clear()
        self._staged_factors.clear()
        self.flags.clear()
        self._unjudged = []
        self._judged = 0

    def end_bucket(self, result: Sequence[Tensor] = (), *, last: bool) -> None:
        """Commit what is staged if all of it is finite: now, or with a GradScaler at the last bucket of the step.

        result: where the buffer's values are, to be looked at if nobody has reported on them and anything is staged.
        """
        if len(self.flags) == self._judged:
            self._unjudged.extend(result)
        self._judged = len(self.flags)
        if last or not self.per_step:
            if self._staged or self._staged_factors:
                with self.lock:
                    self._commit()
            self.begin_step()
        if last:
            self.steps += 1
            self.warm = True

    def judge(self) -> list[Tensor]:
        """Return the verdicts on all results so far: those nobody has reported on are looked at, as they may change."""
        self.flags.extend(values.isfinite().all() for values in self._unjudged)
        self._unjudged = []
        self._judged = len(self.flags)
        return self.flags

    def _commit(self) -> None:
        finite = torch.stack(self.judge()).all()
        self.finite = finite if self.finite is None else self.finite & finite
        # No host sync on a GPU, but for what is sent once and then gone: a few steps after a change.
        known = finite.device.type == "cpu" or any(slot.once for slot in self._staged)
        kept = {} if known and not finite else self._staged
        for number, (slot, (staged, rank)) in enumerate(kept.items()):
            if known and slot.once:
                del self._slots[slot.path, slot.kind, slot.layout]
            elif known and slot.spare is staged and slot.values.dtype == torch.float32:
                slot.values, slot.spare = staged, slot.values
            else:
                if slot.values.dtype != torch.float32:
                    seed = crc32(f"{slot.path} {slot.kind} {number} of {rank} {self.steps}".encode())
                    staged = round_stochastically(staged, seed)
                if known:
                    slot.values.copy_(staged)
                else:
                    torch.where(finite, staged, slot.values, out=slot.values)
        for factors, staged in self._staged_factors:
            torch.where(finite, staged, factors, out=factors)
        if isinstance(self.dropped, int):
            self.dropped = self.dropped + (~finite).long()
        else:
            self.dropped += ~finite  # where it is: a CUDA graph goes on counting there

    # ----------------------------------------------------------------------------------------- facts

    def stats(self) -> dict[str, Any]:
        """Return the L2 norm of all residuals, the sampled error, bytes kept and dropped commits; waits for devices."""
        slots = self.slots()
        momentum = [s for s in slots if is_average(s.path) and not s.path.endswith((EXP_AVG_SQ, ANCHOR))]
        kept = [tensor for slot in slots for tensor in (slot.values, slot.spare) if tensor is not None]
        return {
            "residual_norm": _norm(slot for slot in slots if not is_average(slot.path)),
            **({"momentum_norm": _norm(momentum)} if momentum else {}),
            "compression_error": self.error.value(),
            "residual_bytes": sum(tensor.numel() * tensor.element_size() for tensor in kept),
            "dropped_commits": int(self.dropped),
            "factor_bytes": self.factors.nbytes,
        }


def _others(known: Mapping[Layout, T], layout: Layout) -> dict[Layout, T]:
    """Return the entries of buffers that have no parameter in common with `layout`."""
    return {other: each for other, each in known.items() if not other.shares_names(layout)}


def _norm(slots: Iterable[Residual]) -> float:
    return sqrt(sum(float(slot.values.double().square().sum()) for slot in slots))


def round_stochastically(values: Tensor, seed: int) -> Tensor:
    """Return float32 `values` as bfloat16, up or down with probabilities that make the mean exact.

    A 16-bit residual then loses nothing over many steps. Equal seeds round alike on equal devices.
    """
    generator = torch.Generator(values.device)
    generator.manual_seed(seed)
    chances = torch.randint(2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    round_by_chance(values, chances, rounded)
    return rounded
