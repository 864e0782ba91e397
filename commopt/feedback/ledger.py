"""All residuals of one registration: found by what they are for, moved when buckets change, committed or dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from threading import RLock
from typing import Any, Literal
from zlib import crc32

import torch
from torch import Tensor

from commopt.feedback.factors import FactorStore
from commopt.feedback.layout import Layout, Piece
from commopt.feedback.rounding import round_stochastically
from commopt.feedback.sample import SampledError
from commopt.feedback.scratch import Scratch

Kind = Literal["worker", "owner"]

_MOMENTUM = "momentum"


@dataclass(eq=False)
class Slot:
    """One residual: of what this rank sent ("worker"), or of the sum it encoded for all ("owner").

    `path` tells the level of the aggregator ("", "inter", "intra"). Values are unscaled and in units of the average:
    their sum over all ranks is what the model has not been told yet, or its momentum at the path of that name.
    """

    path: str
    kind: Kind
    layout: Layout
    values: Tensor  # [layout.numel], float32 or bfloat16
    spare: Tensor | None = None  # float32 [layout.numel]: the next values, while a whole step may yet be dropped
    once: bool = False  # sent exactly, hence gone once it is sent


def momentum_path(path: str) -> str:
    """Return where a level keeps the momentum of what its ranks send."""
    return f"{path}.{_MOMENTUM}" if path else _MOMENTUM


def is_momentum(path: str) -> bool:
    """Return whether what is kept at `path` is momentum."""
    return path.rpartition(".")[2] == _MOMENTUM


@dataclass(eq=False)
class Ledger:
    """Residuals of one rank; used by one thread at a time: the lane's in backward, the caller's between steps.

    Chunks of a buffer may look up and stage theirs in two threads: what is committed does not depend on who comes
    first. And any thread may ask what there is. `lock` is for both: while it is held nothing is committed or moved.

    per_step: commit all buckets of a step or none, as a GradScaler drops whole steps; else each bucket by itself.
    """

    per_step: bool = False
    scratch: Scratch = field(default_factory=Scratch)
    error: SampledError = field(default_factory=SampledError)
    factors: FactorStore = field(default_factory=FactorStore)
    steps: int = 0
    warm: bool = False  # whether any residual can be other than zero; alike on every rank
    dropped: Tensor | int = 0  # commits that a non-finite value prevented
    lock: RLock = field(default_factory=RLock, repr=False)
    _slots: dict[tuple[str, Kind, Layout], Slot] = field(default_factory=dict)
    _loose: dict[str, dict[str, list[tuple[Piece, Tensor]]]] = field(default_factory=dict)  # by path and name
    _placed: dict[str, dict[Layout, str]] = field(default_factory=dict)  # by path: how buffers were divided last
    _senders: dict[Layout, tuple[str, ...]] = field(default_factory=dict)  # the paths of what sent a buffer last
    _additions: int = 0  # to slots and loose pieces
    _nothing: dict[tuple[str, Layout], int] = field(default_factory=dict)  # nothing was there after so many additions
    _staged: list[tuple[Slot, Tensor, str]] = field(default_factory=list)  # each with what its dice come from
    _staged_of: Counter[tuple[int, str]] = field(default_factory=Counter)  # by chunk and path
    _staged_factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _flags: list[Tensor] = field(default_factory=list)
    _judged: int = 0  # flags of the buffers before the one under way
    _unjudged: list[Tensor] = field(default_factory=list)  # results that nobody has given a verdict on

    # ------------------------------------------------------------------------------------- finding

    def slot(
        self, path: str, kind: Kind, layout: Layout, device: torch.device, dtype: torch.dtype, whole: Layout
    ) -> Slot:
        """Return the residual for `layout`: what is known about its pieces, else zero.

        whole: what is encoded; an owner's `layout` is its part of that, where it may have had another part before.
        """
        key = (path, kind, layout)
        with self.lock:
            if key not in self._slots:
                # A worker's is asked for first, so that what an owner kept is sent next.
                self.dissolve(path, whole, None if kind == "worker" else kind)
                values = torch.zeros(layout.numel, dtype=torch.float32, device=device)
                self.install(Slot(path, kind, layout, values.to(dtype)))
            slot = self._slots[key]
            slot.once = False  # whatever became of it as a leftover
            slot.values = slot.values.to(device, dtype)  # what a checkpoint brought is in host memory
            if kind == "worker" and self.has_loose(path, layout):
                slot.values = (slot.values + self.collect(path, layout, device)).to(dtype)
            return slot

    def leftover(self, path: str, layout: Layout, device: torch.device) -> Slot | None:
        """Return the residual of a buffer that is sent exactly and needs none, if there is one from before."""
        if not self.holds(path, layout):
            return None
        slot = self.slot(path, "worker", layout, device, torch.float32, layout)
        slot.once = True
        return slot

    def holds(self, path: str, layout: Layout) -> bool:
        """Return whether anything is kept for the elements of `layout`."""
        with self.lock:
            if self._nothing.get((path, layout)) == self._additions:  # asked in every step, and nothing has come since
                return False
            found = self.has_loose(path, layout) or any(
                slot.path == path and slot.layout.overlaps(layout) for slot in self._slots.values()
            )
            if not found:
                self._nothing[path, layout] = self._additions
            return found

    def has_loose(self, path: str, layout: Layout) -> bool:
        """Return whether anything kept for the elements of `layout` lies in no residual yet, or not any more."""
        by_name = self._loose.get(path, {})
        if by_name.keys().isdisjoint(layout.names):
            return False
        return any(layout.has_part_of(piece) for name in layout.names for piece, _ in by_name.get(name, ()))

    def slots(self) -> list[Slot]:
        """Return all residuals, also those that no buffer has asked for yet."""
        with self.lock:
            loose = [
                Slot(path, "worker", Layout((piece,)), values)
                for path, by_name in self._loose.items()
                for entries in by_name.values()
                for piece, values in entries
            ]
            return [*self._slots.values(), *loose]

    def install(self, slot: Slot) -> None:
        """Put a residual in its place."""
        with self.lock:
            self._slots[slot.path, slot.kind, slot.layout] = slot
            self._additions += 1

    def placed(self) -> dict[str, dict[Layout, str]]:
        """Return, by path, the buffers whose residuals lie where they are used, and how they were divided."""
        with self.lock:
            return {path: dict(known) for path, known in self._placed.items()}

    # -------------------------------------------------------------------------------------- moving

    def place(self, path: str, layout: Layout, division: str) -> bool:
        """Note how a buffer is divided over the ranks; return whether its residuals may lie on other ranks of the node.

        Ranks that see the same buffers get the same answers.
        """
        with self.lock:
            placed = self._placed.setdefault(path, {})
            if placed.get(layout) == division:
                return False
            self._displace(path, layout)
            self._placed[path][layout] = division
            return self.warm

    def _displace(self, path: str, layout: Layout) -> None:
        self._placed[path] = {
            other: how for other, how in self._placed[path].items() if other.names.isdisjoint(layout.names)
        }

    def hand_over(self, layout: Layout, paths: tuple[str, ...], device: torch.device) -> None:
        """Let what uses `paths` from now on send what is kept elsewhere for the parameters of `layout`.

        What uses none sends it as a leftover of path "". Momentum goes to where there is momentum, else it stays for
        whatever has some again. Asked for every buffer before it is sent: a look-up where nothing has changed. That
        residuals have to be placed anew follows from who sent them last, and not from what this rank holds of them.
        """
        if self._senders.get(layout) == paths:
            return
        others = {by for known, by in self._senders.items() if not known.names.isdisjoint(layout.names)} - {paths}
        with self.lock:
            for path in self._placed:
                if others or path not in paths:
                    self._displace(path, layout)
        heir = next((path for path in reversed(paths) if not is_momentum(path)), "")
        heir_of_momentum = next((path for path in paths if is_momentum(path)), None)
        for path in {slot.path for slot in self.slots()} - {heir, *paths}:
            to = heir_of_momentum if is_momentum(path) else heir
            if to is not None and self.holds(path, layout):
                self.redirect(path, to, layout, device)
        self._senders = {known: by for known, by in self._senders.items() if known.names.isdisjoint(layout.names)}
        self._senders[layout] = paths

    def dissolve(self, path: str, layout: Layout, kind: Kind | None = None) -> None:
        """Take apart the residuals (of one kind) with elements of `layout`; an owner's joins what the rank sends.

        Both are in units of the average, so the sum stays what it is, and nothing needs to be sent.
        """
        with self.lock:
            for key, slot in list(self._slots.items()):
                if slot.path == path and kind in (None, slot.kind) and slot.layout.overlaps(layout):
                    del self._slots[key]
                    self.deposit(path, slot.layout, slot.values.float())

    def redirect(self, path: str, to: str, layout: Layout, device: torch.device) -> None:
        """Let another level send what is kept for the parameters of `layout`."""
        with self.lock:
            self.dissolve(path, layout)
            self.deposit(to, layout, self.collect(path, layout, device))

    def deposit(self, path: str, layout: Layout, values: Tensor) -> None:
        """Keep float32 `values` until the pieces of `layout` are asked for, beside what is kept for them already."""
        with self.lock:
            self._additions += 1
            by_name = self._loose.setdefault(path, {})
            for offset, piece in zip(layout.offsets, layout.pieces, strict=True):
                by_name.setdefault(piece.name, []).append((piece, values[offset : offset + piece.numel]))

    def collect(self, path: str, layout: Layout, device: torch.device) -> Tensor:
        """Return the float32 sum of what is kept for each element of `layout`, and keep it no longer."""
        values = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        with self.lock:
            by_name = self._loose.get(path, {})
            for offset, wanted in zip(layout.offsets, layout.pieces, strict=True):
                rest: list[tuple[Piece, Tensor]] = []
                for kept, part in by_name.pop(wanted.name, []):
                    begin, end = max(kept.begin, wanted.begin), min(kept.end, wanted.end)
                    if begin < end:
                        target = values[offset + begin - wanted.begin : offset + end - wanted.begin]
                        target.add_(part[begin - kept.begin : end - kept.begin].to(device))
                    else:
                        begin = end = kept.end
                    for first, last in ((kept.begin, begin), (end, kept.end)):
                        if first < last:
                            cut = part[first - kept.begin : last - kept.begin].clone()  # not all that it was cut from
                            rest.append((Piece(kept.name, first, last, kept.shape), cut))
                if rest:
                    by_name[wanted.name] = rest
        return values

    # ---------------------------------------------------------------------------------- committing

    def stage(self, slot: Slot, chunk: int = 0, rank: int = 0) -> Tensor:
        """Return where to write the slot's next values, float32, which count only once they are committed.

        rank: this one's, global, so that ranks round what they sent by dice of their own: errors that are alike would
        add up where others cancel. Owners of one sum in several teams keep the same, so they round alike.
        """
        with self.lock:
            name = str(len(self._staged))
            if chunk:  # in the order of one level's work, which is one thread's
                name = f"{chunk} {slot.path} {self._staged_of[chunk, slot.path]}"
                self._staged_of[chunk, slot.path] += 1
            if self.per_step:
                if slot.spare is None:
                    slot.spare = torch.empty(slot.layout.numel, dtype=torch.float32, device=slot.values.device)
                staged = slot.spare
            else:
                staged = self.scratch.take(f"{name} staged", slot.layout.numel, torch.float32, slot.values.device)
            self._staged.append((slot, staged, f"{name} of {rank}" if slot.kind == "worker" else name))
            return staged

    def stage_factors(self, factors: Tensor) -> Tensor:
        """Return where to write the next values of `factors`, which are small and count once they are committed."""
        with self.lock:
            tag = f"{len(self._staged_factors)} staged factors"
            staged = self.scratch.take(tag, tuple(factors.shape), factors.dtype, factors.device)
            self._staged_factors.append((factors, staged))
            return staged

    def report(self, finite: Tensor) -> None:
        """Add to the verdict on what is staged: bool, 0-d."""
        self._flags.append(finite)

    def begin_step(self) -> None:
        """Drop what a backward that raised has left staged."""
        self._staged.clear()
        self._staged_of.clear()
        self._staged_factors.clear()
        self._flags.clear()
        self._unjudged.clear()
        self._judged = 0

    def end_bucket(self, result: Sequence[Tensor] = (), *, last: bool) -> None:
        """Commit what is staged if all of it is finite: now, or with a GradScaler at the last bucket of the step.

        result: where the buffer's values are, to be looked at if nobody has reported on them and anything is staged.
        """
        if len(self._flags) == self._judged:
            self._unjudged.extend(result)
        self._judged = len(self._flags)
        if last or not self.per_step:
            self._commit()
        if last:
            self.steps += 1
            self.warm = True

    def _commit(self) -> None:
        if not (self._staged or self._staged_factors):
            self.begin_step()
            return
        with self.lock:
            self._commit_staged()

    def _commit_staged(self) -> None:
        finite = torch.stack([*self._flags, *(values.isfinite().all() for values in self._unjudged)]).all()
        # No host sync, but for what is sent once and then gone: a few steps after a load or a change of buckets.
        if finite.device.type == "cpu" or any(slot.once for slot, _, _ in self._staged):
            if finite:
                for slot, staged, name in self._staged:
                    self._replace(slot, staged, name)
        else:
            for slot, staged, name in self._staged:
                torch.where(finite, self._rounded(slot, staged, name), slot.values, out=slot.values)
        for factors, staged in self._staged_factors:
            torch.where(finite, staged, factors, out=factors)
        self._count(~finite)
        self.begin_step()

    def _count(self, dropped: Tensor) -> None:
        if isinstance(self.dropped, int):
            self.dropped = self.dropped + dropped.long()
        else:
            self.dropped += dropped  # where it is: a CUDA graph goes on counting there

    def _replace(self, slot: Slot, staged: Tensor, name: str) -> None:
        if slot.once:
            del self._slots[slot.path, slot.kind, slot.layout]
        elif slot.spare is staged and slot.values.dtype == torch.float32:
            slot.values, slot.spare = staged, slot.values
        else:
            slot.values.copy_(self._rounded(slot, staged, name))

    def _rounded(self, slot: Slot, staged: Tensor, name: str) -> Tensor:
        if slot.values.dtype == torch.float32:
            return staged
        seed = crc32(f"{slot.path} {slot.kind} {name} {self.steps}".encode())
        return round_stochastically(staged, seed)

    # ----------------------------------------------------------------------------------------- facts

    def stats(self) -> dict[str, Any]:
        """Return the L2 norm of all residuals, the sampled error, bytes kept and dropped commits; waits for devices."""
        slots = self.slots()
        momentum = [slot for slot in slots if is_momentum(slot.path)]
        kept = [tensor for slot in slots for tensor in (slot.values, slot.spare) if tensor is not None]
        return {
            "residual_norm": _norm(slot for slot in slots if not is_momentum(slot.path)),
            **({"momentum_norm": _norm(momentum)} if momentum else {}),
            "compression_error": self.error.value(),
            "residual_bytes": sum(tensor.numel() * tensor.element_size() for tensor in kept),
            "dropped_commits": int(self.dropped),
            "factor_bytes": self.factors.nbytes,
        }


def _norm(slots: Iterable[Slot]) -> float:
    return sqrt(sum(float(slot.values.double().square().sum()) for slot in slots))
