# SPDX-License-Identifier: Apache-2.0
"""The transaction of a step: next residuals and factors are written aside, and all of them are committed, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import RLock
from zlib import crc32

import torch
from torch import Tensor

from commopt.cuda_streams import current_stream
from commopt.feedback.residual import Residual, round_stochastically
from commopt.feedback.scratch import Scratch
from commopt.kernels.cpu import copy_parts, parts_of
from commopt.kernels.finite import all_finite, all_true
from commopt.kernels.residual import commit


@dataclass(eq=False, slots=True)
class Staged:
    """What a step has staged so far; the fields are Transaction's."""

    residuals: dict[Residual, tuple[Tensor, int]]
    factors: list[tuple[Tensor, Tensor]]
    flags: list[Tensor]
    checked: int
    unchecked: list[Tensor]
    commits: list[Tensor]

    def tensors(self) -> Iterator[Tensor]:
        """Iterate over all that is not committed yet, in order."""
        for values, _ in self.residuals.values():
            yield values
        for pair in self.factors:
            yield from pair
        yield from self.flags
        yield from self.unchecked


@dataclass(eq=False)
class Transaction:
    """Stages the next values of residuals and factors; `end_bucket` commits them, or drops all of them.

    They are dropped when a result is not finite on any rank. No message is sent to find out: a non-finite value
    reaches every rank, so every rank finds the same.

    remove: called for a residual that was flushed, when that is committed.
    lock: held while a commit changes values.
    per_step: commit all buckets of a step or none, as a GradScaler drops whole steps; else each bucket by itself.
    steps: complete steps so far.
    dropped: number of commits that a non-finite value prevented.
    commits: whether each commit of the step was made, bool, 0-d.
    flags: whether the results of the step are finite, bool, 0-d each.
    """

    remove: Callable[[Residual], None]
    scratch: Scratch
    lock: RLock
    per_step: bool = False
    steps: int = 0
    dropped: Tensor | int = 0
    commits: list[Tensor] = field(default_factory=list)
    flags: list[Tensor] = field(default_factory=list)
    _staged: dict[Residual, tuple[Tensor, int]] = field(default_factory=dict)  # each with the rank that rounds it
    _staged_factors: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _fetched: dict[Residual, Tensor] = field(default_factory=dict)  # the values of offloaded ones, on their device
    _copied: torch.cuda.Event | None = None  # to host memory
    _checked: int = 0  # flags of the buffers before the one under way
    _unchecked: list[Tensor] = field(default_factory=list)  # results without a flag
    _under_way: bool = False  # whether a step has begun and not ended

    def begin_step(self) -> None:
        """Drop the values still staged by a backward that raised, and end its bucket."""
        if self._under_way:
            self.scratch.end_bucket()
        if self._under_way or self._staged or self._staged_factors or self.flags or self._unchecked:
            self._forget_staged()
        self._under_way = True

    def _forget_staged(self) -> None:
        self._staged.clear()
        self._staged_factors.clear()
        self._fetched.clear()
        self.flags.clear()
        self._unchecked = []
        self._checked = 0

    @property
    def finite(self) -> Tensor | None:
        """Whether all commits of the step were made, bool, 0-d; None where nothing was to be committed."""
        return all_true(self.commits) if self.commits else None

    def stage(self, residual: Residual, rank: int = 0) -> tuple[Tensor, Tensor]:
        """Return the residual's values, and where to write the next, which count once committed; both float32.

        A step that sends a buffer twice, and commits at its end, gets the values staged the first time.
        rank: this one's, global, so that ranks round by random bits of their own: equal errors would add up where
        others cancel. Of a residual that several ranks keep alike, a number that they have in common.
        """
        before = self._staged.get(residual)
        if before is not None:
            old = before[0]
        else:
            old = residual.values.float() if residual.used_on is None else self._fetch(residual, residual.used_on)
        if self.per_step and residual.used_on is None:
            if residual.spare is None or before is not None:
                residual.spare = torch.empty(residual.layout.numel, dtype=torch.float32, device=residual.values.device)
            staged = residual.spare
        else:
            tag = f"{len(self._staged)} staged"
            staged = self.scratch.take(tag, residual.layout.numel, torch.float32, old.device, lasting=True)
        self._staged[residual] = (staged, rank)
        return old, staged

    def _fetch(self, residual: Residual, device: torch.device) -> Tensor:
        """Return the residual's values as float32 on the device of their buffer, until the message ends."""
        tag, numel = f"{len(self._fetched)} fetched", residual.layout.numel
        fetched = self.scratch.take(tag, numel, torch.float32, device, lasting=True)
        self._fetched[residual] = fetched.copy_(residual.values, non_blocking=True)
        return fetched

    def settle(self) -> None:
        """Wait until what was committed to host memory is there."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def stage_factors(self, factors: Tensor) -> Tensor:
        """Return where to write the next values of `factors`, which are small and count once they are committed."""
        if self.per_step:  # scratch memory ends with the bucket
            staged = torch.empty_like(factors)
        else:
            tag = f"{len(self._staged_factors)} staged factors"
            staged = self.scratch.take(tag, tuple(factors.shape), factors.dtype, factors.device, lasting=True)
        self._staged_factors.append((factors, staged))
        return staged

    def stays_until_commit(self, residual: Residual) -> bool:
        """Return whether values of this residual are staged that only the end of the step commits."""
        return self.per_step and residual in self._staged

    def check_results(self) -> list[Tensor]:
        """Return the flags of all results so far; results without one are looked at now, before they may change."""
        self.flags.extend(map(all_finite, self._unchecked))
        self._unchecked = []
        self._checked = len(self.flags)
        return self.flags

    def snapshot(self) -> Staged:
        """Return what is staged and not committed yet."""
        return Staged(
            dict(self._staged),
            list(self._staged_factors),
            list(self.flags),
            self._checked,
            list(self._unchecked),
            list(self.commits),
        )

    def restore(self, staged: Staged) -> None:
        """Go back to a snapshot."""
        self._staged, self._staged_factors = dict(staged.residuals), list(staged.factors)
        self.flags, self._checked = list(staged.flags), staged.checked
        self._unchecked, self.commits = list(staged.unchecked), list(staged.commits)

    def end_bucket(self, result: Sequence[Tensor] = (), *, last: bool) -> None:
        """Commit the staged values if all results are finite: now, or with a GradScaler at the last bucket of the step.

        result: where the buffer's values are, to be looked at if it has no flag and anything is staged.
        """
        if len(self.flags) == self._checked:
            self._unchecked.extend(result)
        self._checked = len(self.flags)
        if last or not self.per_step:
            if self._staged or self._staged_factors:
                with self.lock:
                    self._commit()
            self._forget_staged()
        self.scratch.end_bucket()
        if last:
            self._under_way = False
            self.scratch.end_step()
            self.steps += 1

    def _commit(self) -> None:
        finite = all_true(self.check_results())
        self.commits.append(finite)
        # No host sync on a GPU, except for residuals that are flushed: in a few steps after a change.
        known = finite.device.type == "cpu" or any(residual.flushing for residual in self._staged)
        committed = {} if known and not finite else self._staged
        for residual, (staged, rank) in committed.items():
            if known and residual.flushing:
                self.remove(residual)
            elif residual.used_on is not None:
                self._offload(residual, finite, staged)
            elif known and residual.spare is staged and residual.values.dtype == torch.float32:
                residual.values, residual.spare = staged, residual.values
            else:
                if residual.values.dtype != torch.float32:
                    # By what it is of, not by its place: sites that keep the same may keep more beside it, or less.
                    what = f"{residual.path} {residual.kind} {residual.layout.pieces[:1]} of {rank} {self.steps}"
                    staged = round_stochastically(staged, crc32(what.encode()))
                if known:
                    whole = parts_of([(0, 0, staged.numel())])
                    if not copy_parts(staged, residual.values, whole):
                        residual.values.copy_(staged)
                else:
                    commit(finite, staged, residual.values)
        for factors, staged in self._staged_factors:
            commit(finite, staged, factors)
        if isinstance(self.dropped, int):
            self.dropped = self.dropped + (~finite).long()
        else:
            self.dropped += ~finite  # in its own memory: a CUDA graph counts on there

    def _offload(self, residual: Residual, finite: Tensor, staged: Tensor) -> None:
        """Commit values to host memory, by way of those that were fetched where the host does not know `finite` yet."""
        if staged.device.type == "cpu":
            residual.values.copy_(staged)
            return
        fetched = self._fetched[residual]
        commit(finite, staged, fetched)
        residual.values.copy_(fetched, non_blocking=True)
        self._copied = current_stream(staged.device).record_event()
