# SPDX-License-Identifier: Apache-2.0
"""Transformers: a callback that attaches a strategy to a Trainer's model and saves its state beside the checkpoint."""

from __future__ import annotations

import logging
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from commopt.aggregate import Aggregator
from commopt.attached.optimizers import stand_for_adam
from commopt.checkpoint_files import load_whole, save_checkpoint
from commopt.errors import ConfigurationError
from commopt.hooks import CommState, Preset, attach, merged_state

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ModuleNotFoundError as missing:
    raise ImportError(
        f"commopt.integrations.transformers needs Transformers with its Trainer, and there is no module "
        f"{missing.name}: pip install transformers accelerate"
    ) from missing

_log = logging.getLogger("commopt")


class CommoptCallback(TrainerCallback):  # type: ignore[misc]  # its type depends on the version
    """Averages the gradients of `trainer.train` as attach(model, choice, **options) does, with its GradScaler.

    Every rank writes its state into the checkpoint's folder, beside its state of random numbers, and reads it there
    with train(resume_from_checkpoint=...). In a world of another size every rank must see the files of all ranks. A
    further train() continues with the present state if the Trainer keeps its wrapped model; otherwise it begins with
    none. With `adam=` the optimizer of CommState.optimizer replaces the Trainer's AdamW, which must have the same betas
    and eps; set max_grad_norm=0, as directions must not be clipped. With LocalSGD nodes hold different parameters.
    These are averaged, on all ranks, before the Trainer evaluates and saves, and when training ends. At the start of
    training, errors of attach and CommState.load_state_dict are raised, and ConfigurationError in another Trainer than
    the one given here.

    comm: the state returned by attach; None before training.
    """

    def __init__(self, trainer: Trainer, choice: Aggregator | Preset | str, **options: Any) -> None:
        self.comm: CommState | None = None
        self._trainer = trainer
        self._choice = choice
        self._options = options
        self._resumed: str | None = None
        self._attached: ref[torch.nn.Module] | None = None
        train = trainer.train

        @wraps(train)
        def noted_train(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            """Note the checkpoint from which the Trainer resumes, which callbacks are not told."""
            found = get_last_checkpoint(trainer.args.output_dir) if resume_from_checkpoint is True else None
            self._resumed = found if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = noted_train

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model, which is wrapped now and has loaded its checkpoint, unless that was done before."""
        if kwargs.get("model", self._trainer.model) is not self._trainer.model:
            raise ConfigurationError(
                "this CommoptCallback was made for another Trainer than the one that trains; make one for each: "
                "trainer.add_callback(CommoptCallback(trainer, ...))"
            )
        wrapped, options = self._trainer.model_wrapped, {"scaler": self._trainer.accelerator.scaler, **self._options}
        if self.comm is None or self._attached is None or self._attached() is not wrapped:
            if self.comm is not None:
                self.comm.close()
            if wrapped is self._trainer.model and getattr(wrapped, "_is_accelerate_prepared", False):
                _refuse_unwrapped(wrapped)
            self.comm = attach(wrapped, self._choice, **options)
            self._attached = ref(wrapped)
        elif self.comm.scaler is not options["scaler"]:
            self.comm.scaler = options["scaler"]
        comm = self.comm
        stand_for_adam(comm, wrapped.parameters())
        if self._resumed is None:
            return
        files = sorted(Path(self._resumed).glob("commopt_*_of_*.pt"))
        found = comm.membership.exchange("the files of a checkpoint", number=len(files))
        if any(answer["number"] for answer in found):
            own = Path(self._resumed, _name(args))
            comm.load_from(lambda: _load(own) if own in files else merged_state(map(_load, files)))
        elif args.process_index == 0:
            _log.warning("%s was saved without commopt's callback: error feedback starts with nothing", self._resumed)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Average the parameters of a LocalSGD when the Trainer is about to evaluate or to save."""
        if control.should_save or control.should_evaluate:
            self._average()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average as in on_step_end."""
        self.on_step_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average the nodes' parameters, so that the model may be evaluated and saved on any node."""
        self._average()

    def _average(self) -> None:
        if self.comm is not None and self.comm.nodes_differ:
            self.comm.average_parameters()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write this rank's state where it has just written its state of random numbers."""
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if self.comm is not None and self.comm.nodes_differ and args.process_index == 0:
            _log.warning(
                "%s has the model of the first node only, because another callback requested it after CommoptCallback "
                "had run: add CommoptCallback last",
                folder,
            )
        # A hyperparameter search keeps its checkpoints elsewhere.
        if self.comm is not None and not args.save_only_model and folder.is_dir():
            save_checkpoint(self.comm.state_dict(), folder / _name(args))


def _refuse_unwrapped(model: torch.nn.Module) -> None:
    """Raise ConfigurationError for a model that Accelerate has prepared without wrapping it in DDP."""
    if torch.distributed.is_initialized() and not hasattr(model, "set_reshard_after_forward"):  # FSDP2 models have it
        raise ConfigurationError(
            f"Accelerate has left this {type(model).__name__} unwrapped, so its gradients would not be averaged: the "
            f"Trainer evaluated or predicted with it before the first train(); call train() first, or "
            f"evaluate with another Trainer and another copy of the model"
        )


def _name(args: TrainingArguments) -> str:
    return f"commopt_{args.process_index}_of_{args.world_size}.pt"


def _load(file: Path) -> Any:
    return load_whole(file, mmap=True)
