# SPDX-License-Identifier: Apache-2.0
"""An allocator that counts: the bytes of tensors that the library makes on this rank, and the most at any time.

    with LiveMemory() as live:
        train()
    live.peak_nbytes; live.now_nbytes; live.at_peak       # the last by the line that asked for the memory

Counted is the memory that operations return which run for a message of the library, on whichever thread, or before a
forward. It counts until nothing refers to it any more. Not counted is what an operation needs inside.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from threading import RLock
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from commopt.attached.local_sgd import ParameterAverages
from commopt.attached.reduction import Reduction
from commopt.groups import Started


@dataclass
class _Block:
    memory: StorageWeakRef
    nbytes: int
    place: str


class LiveMemory:
    """Counts while it is entered."""

    def __init__(self) -> None:
        self.peak_nbytes = 0
        self.at_peak: Counter[str] = Counter()
        self._blocks: dict[int, _Block] = {}
        self._patches = ExitStack()
        self._lock = RLock()  # of the lane's thread and the caller's

    def __enter__(self) -> LiveMemory:
        run: Callable[[Reduction], Started | None] = Reduction.__call__

        def counted(reduction: Reduction) -> Started | None:
            given = (reduction.buffer, reduction.base, reduction.source)
            outside = [each for each in given if each is not None]
            with _Mode(self, outside):
                return run(reduction)

        turn: Callable[[ParameterAverages], None] = ParameterAverages.take_turn

        def counted_turn(averages: ParameterAverages) -> None:
            with _Mode(self, []):
                turn(averages)

        self._patches.enter_context(patch.object(Reduction, "__call__", counted))
        self._patches.enter_context(patch.object(ParameterAverages, "take_turn", counted_turn))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    @property
    def now_nbytes(self) -> int:
        """Bytes that are in use now."""
        with self._lock:
            self._forget()
            return sum(block.nbytes for block in self._blocks.values())

    def by_place(self) -> Counter[str]:
        """Return the bytes in use by the line that asked for them."""
        found: Counter[str] = Counter()
        for block in self._blocks.values():
            found[block.place] += block.nbytes
        return found

    def add(self, tensor: Tensor) -> None:
        """Count the memory of a tensor that has just been made."""
        with self._lock:
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._blocks and not self._blocks[storage._cdata].memory.expired():
            return
        self._blocks[storage._cdata] = _Block(StorageWeakRef(storage), storage.nbytes(), _place())
        now_nbytes = self.now_nbytes
        if now_nbytes > self.peak_nbytes:
            self.peak_nbytes, self.at_peak = now_nbytes, self.by_place()

    def _forget(self) -> None:
        for key in [key for key, block in self._blocks.items() if block.memory.expired()]:
            del self._blocks[key]


class _Mode(TorchDispatchMode):
    """Adds memory that an operation returns and was not given, and that is not of `outside`."""

    def __init__(self, live: LiveMemory, outside: list[Tensor]) -> None:
        super().__init__()
        self._live = live
        self._outside = {each.untyped_storage()._cdata for each in outside}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = self._outside | {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for each in _tensors(result):
            if each.untyped_storage()._cdata not in given:
                self._live.add(each)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


def _place() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/commopt/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    return f"{frame.f_code.co_filename.rpartition('/commopt/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
