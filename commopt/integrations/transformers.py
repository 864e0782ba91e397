# SPDX-License-Identifier: Apache-2.0
"""Transformers: a callback that attaches a strategy to a Trainer's model and saves its state beside the checkpoint."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar
from weakref import ref

import torch

from commopt.aggregate import Aggregator
from commopt.attached.checkpoint import digest
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
_T = TypeVar("_T")

_KEY = "commopt"  # in the Trainer's state; no callback's name, under which the Trainer would look for a class
_RUN = "run"  # in the state of a rank
_FILE = re.compile(r"commopt_\d+_of_(\d+)\.pt")


class CommoptCallback(TrainerCallback):  # type: ignore[misc]  # its type depends on the version
    """Averages the gradients of `trainer.train` as attach(model, choice, **options) does, with its GradScaler.

    Every rank writes its state into the checkpoint's folder, beside its state of random numbers, and reads it there
    with train(resume_from_checkpoint=...). In a world of another size, and where files are missing, every rank must see
    those of all ranks that there are. Files of the train() that wrote the checkpoint last count, and no others. A
    further train() continues with the present state if the Trainer keeps its wrapped model; otherwise it begins with
    none. With `adam=` the optimizer of CommState.optimizer replaces the Trainer's AdamW, which must have the same betas
    and eps; set max_grad_norm=0, as directions must not be clipped. With LocalSGD nodes hold different parameters.
    These are averaged, on all ranks, before the Trainer evaluates and saves, and when training ends without loading
    the best model. At the start of training, errors of attach and CommState.load_state_dict are raised, and
    ConfigurationError in another Trainer than the one given here.

    comm: the state returned by attach; None before training.
    """

    def __init__(self, trainer: Trainer, choice: Aggregator | Preset | str, **options: Any) -> None:
        self.comm: CommState | None = None
        self._trainer = trainer
        self._choice = choice
        self._options = options
        self._resumed: str | None = None
        self._run = ""  # which train() this is; the same on all ranks
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
        self._begin_or_resume(args, state, comm)

    def _begin_or_resume(self, args: TrainingArguments, state: TrainerState, comm: CommState) -> None:
        """Give this run a name, the same on all ranks, and load the files of the run that wrote the checkpoint.

        Several runs may have written into its folder, in worlds of several sizes, and any may have been killed then.
        The Trainer's state names the one whose model is there, as both are written together. Times of files do not:
        clocks of nodes differ, and a copy has its own. All ranks decide by the same answers.
        """
        folder = None if self._resumed is None else Path(self._resumed)
        there = [] if folder is None else folder.glob("commopt_*")
        files = sorted(file for file in there if _FILE.fullmatch(file.name))
        mine = [file for file in files if file.name == _name(args)]
        own, problem = _try(lambda: _of_nodes(_read(mine[0]), comm) if mine else None)
        wrote = state.stateful_callbacks.get(_KEY, "")
        answers = comm.membership.exchange(
            f"train() from step {state.global_step}", problem, begins=token_hex(8), wrote=wrote, own=_run_of(own)
        )
        self._run = state.stateful_callbacks[_KEY] = str(answers[0]["begins"])
        wrote = answers[0]["wrote"]
        lacking = [rank for rank, each in zip(comm.membership.ranks, answers, strict=True) if each["own"] != wrote]
        if folder is not None and lacking:
            self._merge(args, files, wrote, lacking)
        elif folder is not None:
            comm.load_from(lambda: own)

    def _merge(self, args: TrainingArguments, files: list[Path], wrote: str, lacking: list[int]) -> None:
        """Load what the files of one run have, where not all ranks have their own of it."""
        assert self.comm is not None
        read, problem = _try(lambda: {file.name: part for file in files if _run_of(part := _read(file)) == wrote})
        parts = read or {}
        answers = self.comm.membership.exchange(
            "the files of a checkpoint", problem, number=len(parts), names=digest(list(parts))
        )
        numbers = [each["number"] for each in answers]
        if not any(numbers):
            if args.process_index == 0:
                _log.warning(
                    "%s was saved without commopt's callback, or the job was killed before any rank had written its "
                    "state: error feedback starts with nothing",
                    self._resumed,
                )
            return
        if len({each["names"] for each in answers}) > 1:
            raise ConfigurationError(
                f"rank {', '.join(map(str, lacking))} has no file of its own in {self._resumed}, because the world is "
                f"another one or the job was killed while it saved; and ranks see different files there, "
                f"{min(numbers)} to {max(numbers)}, which cannot be merged: copy commopt_*_of_*.pt of all nodes into "
                f"the folder on each, resume from another checkpoint, or delete them all to start with nothing"
            )
        size = max(int(_FILE.sub(r"\1", name)) for name in parts)
        missing = [name for place in range(size) if (name := f"commopt_{place}_of_{size}.pt") not in parts]
        if missing and args.process_index == 0:
            _log.warning(
                "%s has no %s: the job was killed before it was written, or it was deleted; going on from the others",
                self._resumed,
                ", ".join(missing),
            )
        self.comm.load_from(lambda: merged_state(parts.values()))

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
        """Average the nodes' parameters, so that the model may be evaluated and saved on any node.

        With load_best_model_at_end the Trainer has just loaded the best model, on every rank.
        """
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):
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
            save_checkpoint({**self.comm.state_dict(), _RUN: self._run}, folder / _name(args))
            if args.process_index == 0:  # which has written the model before: files of another world are of none here
                for file in folder.glob("commopt_*"):
                    if (found := _FILE.match(file.name)) and int(found[1]) != args.world_size:
                        with suppress(OSError):
                            file.unlink()


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


def _read(file: Path) -> Any:
    return load_whole(file, mmap=True)


def _run_of(part: object) -> str | None:
    """Return which run wrote a part, "" where it does not say; None where it is no part."""
    return str(part.get(_RUN, "")) if isinstance(part, Mapping) else None


def _of_nodes(part: Any, comm: CommState) -> Any:
    """Return a part that was saved on the same nodes, None for another."""
    same = isinstance(part, Mapping) and part.get("nodes") == list(comm.membership.team.wire.nodes)
    return part if same else None


def _try(read: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return what is read, or why it cannot be: whatever it is, the other ranks must learn of it."""
    try:
        return read(), None
    except Exception as error:
        return None, error
