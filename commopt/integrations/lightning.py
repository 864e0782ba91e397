# SPDX-License-Identifier: Apache-2.0
"""Lightning: a callback that attaches a strategy to the model of a Trainer, and is saved with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import Any
from weakref import WeakSet

from commopt.aggregate import Aggregator
from commopt.attached.optimizers import stand_for_adam
from commopt.hooks import CommState, Preset, attach

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
    returns; it must have the same betas and eps. Each fit begins with what its checkpoint has, or with nothing. With a
    LocalSGD nodes hold different parameters: these are averaged, on all ranks, before the Trainer validates and saves,
    and when training ends.
    comm: what attach returned, None before the first fit. Raises, when fit starts, what attach and
    CommState.load_state_dict raise.
    """

    def __init__(self, choice: Aggregator | Preset | str, **options: Any) -> None:
        super().__init__()
        self.comm: CommState | None = None
        self._choice = choice
        self._options = options
        self._loaded: Mapping[str, Any] | None = None
        self._saving: WeakSet[Trainer] = WeakSet()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget what a checkpoint has brought that was only validated, tested or predicted with."""
        self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: the model is wrapped now. Lightning has loaded its checkpoint before."""
        if self.comm is not None:
            self.comm.close()
        self._average_before_saving(trainer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.comm = attach(trainer.strategy.model, self._choice, **{"scaler": scaler, **self._options})
        stand_for_adam(self.comm, trainer.strategy.model.parameters())
        if self._loaded is not None:
            self.comm.load_state_dict(self._loaded)
            self._loaded = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the parameters of a LocalSGD, if nodes have learned anything since that was done last."""
        self._average()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the nodes hold one model, which may then be tested and saved anywhere."""
        self._average()

    def _average(self) -> None:
        if self.comm is not None and self.comm.nodes_differ:
            self.comm.average_parameters()

    def _average_before_saving(self, trainer: Trainer) -> None:
        """See to it: Lightning takes the model's state before it asks a callback for anything."""
        if trainer in self._saving:
            return
        self._saving.add(trainer)
        save = trainer.save_checkpoint

        @wraps(save)
        def averaged_save(*args: Any, **kwargs: Any) -> Any:
            """Save a checkpoint of the mean of all nodes."""
            self._average()
            return save(*args, **kwargs)

        trainer.save_checkpoint = averaged_save

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks have kept on the first rank, which writes the checkpoint; collective."""
        return {} if self.comm is None else self.comm.gathered_state_dict() or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until there is something to load it into."""
        self._loaded = state_dict
