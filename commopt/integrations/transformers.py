# SPDX-License-Identifier: Apache-2.0
"""Transformers: a callback that attaches a strategy to the model of a Trainer, and saves its state beside it."""

from __future__ import annotations

import logging
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from commopt.aggregate import Aggregator
from commopt.hooks import CommState, Preset, attach, merged_state
from commopt.hooks.optimizers import stand_for_adam

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ModuleNotFoundError as missing:
    raise ImportError(
        f"commopt.integrations.transformers needs Transformers with its Trainer, and there is no module "
        f"{missing.name}: pip install transformers accelerate"
    ) from missing

_log = logging.getLogger("commopt")


class CommoptCallback(TrainerCallback):  # type: ignore[misc]  # of whatever version is there
    """Averages the gradients of `trainer.train`, as attach(model, choice, **options) does; with its GradScaler.

    Every rank writes what it has kept into the checkpoint's folder, beside its state of random numbers, and reads it
    there with train(resume_from_checkpoint=...). In another world every rank must see the
    files of all. With `adam=` the Trainer's AdamW becomes what CommState.optimizer returns: it must have the same betas
    and eps, and max_grad_norm=0 must leave directions unclipped.
    comm: what attach returned, None before training. Raises, when training begins, what attach and
    CommState.load_state_dict raise.
    """

    def __init__(self, trainer: Trainer, choice: Aggregator | Preset | str, **options: Any) -> None:
        self.comm: CommState | None = None
        self._trainer, self._choice, self._options = trainer, choice, options
        self._resumed: str | None = None
        train = trainer.train

        @wraps(train)
        def noted_train(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            """Note what the Trainer tells no callback: from where it resumes."""
            found = get_last_checkpoint(trainer.args.output_dir) if resume_from_checkpoint is True else None
            self._resumed = found if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = noted_train

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach: the model is wrapped now, and its checkpoint loaded."""
        if self.comm is not None:
            self.comm.close()
        options = {"scaler": self._trainer.accelerator.scaler, **self._options}
        self.comm = comm = attach(self._trainer.model_wrapped, self._choice, **options)
        stand_for_adam(comm, self._trainer.model_wrapped.parameters())
        if self._resumed is None:
            return
        files = sorted(Path(self._resumed).glob("commopt_*_of_*.pt"))
        found = comm.membership.exchange("files of a checkpoint", number=len(files))
        if any(answer["number"] for answer in found):
            own = Path(self._resumed, _name(args))
            comm.load_from(lambda: _load(own) if own in files else merged_state(map(_load, files)))
        elif args.process_index == 0:
            _log.warning("%s was saved without commopt's callback: error feedback begins with nothing", self._resumed)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what this rank has kept, where it has just written its state of random numbers."""
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        # A search for hyperparameters has its checkpoints elsewhere.
        if self.comm is not None and not args.save_only_model and folder.is_dir():
            torch.save(self.comm.state_dict(), folder / _name(args))


def _name(args: TrainingArguments) -> str:
    return f"commopt_{args.process_index}_of_{args.world_size}.pt"


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
