# SPDX-License-Identifier: Apache-2.0
"""Lightning: a callback that attaches a strategy to a Trainer's model and saves its state with the checkpoint."""

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


class CommoptCallback(Callback):  # type: ignore[misc]  # its type depends on the version
    """Averages the gradients of `trainer.fit` as attach(model, choice, **options) does, with the Trainer's GradScaler.

    Every checkpoint contains the state of all ranks, so every rank must call trainer.save_checkpoint. It is loaded by
    fit(ckpt_path=...), in a world of any size. Each fit begins with the state of its checkpoint, or with none. With
    `adam=` the optimizer of CommState.optimizer replaces the AdamW of configure_optimizers, which must have the same
    betas and eps. With LocalSGD nodes hold different parameters. These are averaged, on all ranks, before the Trainer
    validates and saves, and when training ends. At the start of fit, errors of attach and CommState.load_state_dict are
    raised.

    comm: the state returned by attach; None before the first fit.
    """

    def __init__(self, choice: Aggregator | Preset | str, **options: Any) -> None:
        super().__init__()
        self.comm: CommState | None = None
        self._choice = choice
        self._options = options
        self._loaded: Mapping[str, Any] | None = None
        self._saving: WeakSet[Trainer] = WeakSet()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop the state of a checkpoint that was loaded only to validate, test or predict."""
        self._loaded = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model, which is wrapped now. Lightning has loaded its checkpoint before."""
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
        """Average the parameters of a LocalSGD, if nodes have trained since the last average."""
        self._average()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Average the nodes' parameters, so that the model may be tested and saved on any node."""
        self._average()

    def _average(self) -> None:
        if self.comm is not None and self.comm.nodes_differ:
            self.comm.average_parameters()

    def _average_before_saving(self, trainer: Trainer) -> None:
        """Wrap trainer.save_checkpoint: Lightning reads the model's state before it calls any callback."""
        if trainer in self._saving:
            return
        self._saving.add(trainer)
        save = trainer.save_checkpoint

        @wraps(save)
        def averaged_save(*args: Any, **kwargs: Any) -> Any:
            """Save a checkpoint with the mean of all nodes."""
            self._average()
            return save(*args, **kwargs)

        trainer.save_checkpoint = averaged_save

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all ranks on the first rank, which writes the checkpoint. Collective."""
        return {} if self.comm is None else self.comm.gathered_state_dict() or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until fit starts."""
        self._loaded = state_dict
