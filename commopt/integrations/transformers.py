# SPDX-License-Identifier: Apache-2.0
"""Transformers: a callback that attaches a strategy to the model of a Trainer, and saves its state beside it."""

from __future__ import annotations

import logging
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from commopt.aggregate import Aggregator
from commopt.attached.optimizers import stand_for_adam
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


class CommoptCallback(TrainerCallback):  # type: ignore[misc]  # of whatever version is there
    """Averages the gradients of `trainer.train`, as attach(model, choice, **options) does; with its GradScaler.

    Every rank writes what it has kept into the checkpoint's folder, beside its state of random numbers, and reads it
    there with train(resume_from_checkpoint=...). In another world every rank must see the files of all. A further
    train() goes on with what is kept, as long as the Trainer keeps its wrapped model, else with nothing.
    With `adam=` the Trainer's AdamW becomes what CommState.optimizer returns: it must have the same betas and eps, and
    max_grad_norm=0 must leave directions unclipped.
    With a LocalSGD nodes hold different parameters: these are averaged, on all ranks, before the Trainer evaluates and
    saves, and when training ends.
    comm: what attach returned, None before training. Raises, when training begins, what attach and
    CommState.load_state_dict raise, and ConfigurationError in another Trainer than the one it was made with.
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
            """Note what the Trainer tells no callback: from where it resumes."""
            found = get_last_checkpoint(trainer.args.output_dir) if resume_from_checkpoint is True else None
            self._resumed = found if isinstance(resume_from_checkpoint, bool) else resume_from_checkpoint
            return train(resume_from_checkpoint, *args, **kwargs)

        trainer.train = noted_train

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach, unless it is done: the model is wrapped now, and its checkpoint loaded."""
        if kwargs.get("model", self._trainer.model) is not self._trainer.model:
            raise ConfigurationError(
                "this CommoptCallback was made with another Trainer than the one that trains; make one for each: "
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
            _log.warning("%s was saved without commopt's callback: error feedback begins with nothing", self._resumed)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Average the parameters of a LocalSGD when the Trainer is about to evaluate or to save."""
        if control.should_save or control.should_evaluate:
            self._average()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Do as on_step_end."""
        self.on_step_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the nodes hold one model, which may then be evaluated and saved anywhere."""
        self._average()

    def _average(self) -> None:
        if self.comm is not None and self.comm.nodes_differ:
            self.comm.average_parameters()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what this rank has kept, where it has just written its state of random numbers."""
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if self.comm is not None and self.comm.nodes_differ and args.process_index == 0:
            _log.warning(
                "%s has the model of the first node alone, as another callback asked for it after CommoptCallback had "
                "its turn: add CommoptCallback last",
                folder,
            )
        # A search for hyperparameters has its checkpoints elsewhere.
        if self.comm is not None and not args.save_only_model and folder.is_dir():
            torch.save(self.comm.state_dict(), folder / _name(args))


def _refuse_unwrapped(model: torch.nn.Module) -> None:
    """Raise ConfigurationError for a model that Accelerate has prepared without making one of DDP of it."""
    if torch.distributed.is_initialized() and not hasattr(model, "set_reshard_after_forward"):  # which FSDP2's has
        raise ConfigurationError(
            f"Accelerate has left this {type(model).__name__} unwrapped, and nobody would average its gradients: the "
            f"Trainer evaluated or predicted with it before the first train(); call train() first, or "
            f"evaluate with a Trainer of its own and another copy of the model"
        )


def _name(args: TrainingArguments) -> str:
    return f"commopt_{args.process_index}_of_{args.world_size}.pt"


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
