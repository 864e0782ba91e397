# SPDX-License-Identifier: Apache-2.0
"""Callbacks around the steps of all torch optimizers, through one hook before them and one after, which stay.

torch walks its hooks as it calls them. A hook that was removed at that moment, as a model was collected or in another
thread, would make the user's step raise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

See = Callable[[Any, Optimizer], None]


class _OptimizerHooks:
    """Calls `see(owner, optimizer)` for each owner that is alive; keeps no owner alive."""

    def __init__(self, register: Callable[[Any], Any]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._seen_by: tuple[tuple[ref[Any], See], ...] = ()

    def show(self, owner: Any, see: See) -> None:
        """Call `see` from the next step on; it must not hold `owner`."""
        with self._lock:
            first = not self._seen_by
            self._seen_by = (*(each for each in self._seen_by if each[0]() is not None), (ref(owner), see))
            if first:
                self._register(self._call)

    def _call(self, optimizer: Optimizer, *_: Any) -> None:
        for owner, see in self._seen_by:
            alive = owner()
            if alive is not None:
                see(alive, optimizer)


def update_mark(scaler: Any) -> object:
    """Return an object that GradScaler.update() replaces by another one; None where there is no such scaler."""
    return getattr(scaler, "_per_optimizer_states", None)


before_steps = _OptimizerHooks(register_optimizer_step_pre_hook)
after_steps = _OptimizerHooks(register_optimizer_step_post_hook)
