# SPDX-License-Identifier: Apache-2.0
"""Lightning: a callback that attaches a strategy to the model of a Trainer, and is saved with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commopt.aggregate import Aggregator
from commopt.hooks import CommState, Preset, attach
from commopt.hooks.optimizers import stand_for_adam

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError as missing:
    raise ImportError(
        f"commopt.integrations.lightning needs Lightning, and there is no module {missing.name}: pip install lightning"
    ) from missing


class CommoptCallback(Callback):  # type: ignore[misc]  # of whatever version is there
    """Averages the gradients of `trainer.fit`, as attach(model, choice, **options) does; with the Trainer's GradScaler.

    Every checkpoint has what all ranks have kept, so every rank must call trainer.save_checkpoint. It is loaded with
    fit(ckpt_path=...), in any world. With `adam=` the AdamW of configure_optimizers becomes what CommState.optimizer
    returns; it must have the same betas and eps. Each fit begins with what its checkpoint has, or with nothing.
    comm: what attach returned, None before the first fit. Raises, when fit starts, what attach and
    CommState.load_state_dict raise.
    """

    def __init__(self, choice: Aggregator | Preset | str, **options: Any) -> None:
        super().__init__()
        self.comm: CommState | None = None
        self._choice, self._options = choice, options
        self._loaded: Mapping[str, Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: the model is wrapped now. Lightning has loaded its checkpoint before."""
        if self.comm is not None:
            self.comm.close()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.comm = attach(trainer.strategy.model, self._choice, **{"scaler": scaler, **self._options})
        stand_for_adam(self.comm, trainer.strategy.model.parameters())
        if self._loaded is not None:
            self.comm.load_state_dict(self._loaded)
            self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks have kept on the first rank, which writes the checkpoint; collective."""
        return {} if self.comm is None else self.comm.gathered_state_dict() or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until there is something to load it into."""
        self._loaded = state_dict
