"""Find the GradScaler of a script, and tell the hooks of it."""

from __future__ import annotations

import gc
import logging
from weakref import ref

import torch

from commopt.hooks import HookState
from commopt.hooks.checks import enabled_scalers

_log = logging.getLogger("commopt")


class Scalers:
    """Gives each state the one enabled GradScaler there is; where there are several, says who must.

    Asked whenever a loss is scaled: after the forward in which a hook was attached, and before its first bucket.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._waiting: list[ref[HookState]] = []
        self._only: ref[torch.amp.GradScaler] | None = None
        self._several = False

    def expect(self, state: HookState) -> None:
        """Give `state` a scaler when one is in use."""
        self._waiting.append(ref(state))

    def notice(self, scaler: torch.amp.GradScaler) -> None:
        """Take note that `scaler` is about to scale a loss."""
        if self._several or not scaler.is_enabled():
            return
        if self._only is None or self._only() is not scaler:
            others = [each for each in _enabled() if each is not scaler]
            if others:
                self._several = True
                self._warn(1 + len(others))
                return
            self._only = ref(scaler)
        for waiting in self._waiting:
            state = waiting()
            if state is not None:
                state.scaler = scaler
        self._waiting.clear()

    def _warn(self, count: int) -> None:
        _log.warning(
            "commopt run: %d enabled GradScalers are there, and which scales the loss of which model cannot be seen; "
            "with error feedback the script must pass it: commopt.attach(ddp, %r, scaler=scaler), before the first "
            "forward of each model",
            count,
            self._strategy,
        )


def _enabled() -> list[torch.amp.GradScaler]:
    gc.collect()  # those of an earlier model may wait for it
    return enabled_scalers()
