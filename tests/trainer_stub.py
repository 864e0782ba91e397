# SPDX-License-Identifier: Apache-2.0
"""What CommoptCallback needs of Transformers, with the Trainer's order of calls: the real one takes seconds to import.

tests/test_integrations_transformers.py has the real one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


@contextmanager
def callback_class() -> Iterator[Any]:
    """Yield CommoptCallback over this Trainer."""
    name, transformers, utils = "commopt.integrations.transformers", ModuleType("transformers"), ModuleType("utils")
    names = ("TrainerCallback", "TrainerControl", "TrainerState", "TrainingArguments")
    vars(transformers).update(Trainer=Trainer, **dict.fromkeys(names, object))
    vars(utils).update(PREFIX_CHECKPOINT_DIR="checkpoint", get_last_checkpoint=None)
    there = {"transformers": transformers, "transformers.trainer_utils": utils}
    with patch.dict(sys.modules, there):
        sys.modules.pop(name, None)
        yield import_module(name).CommoptCallback


class Trainer:
    """Trains a small model from the step of a checkpoint to step `last`, and saves after every second step.

    own_disk: whether the folder is this rank's alone, so that it has a model of its own.
    best: whether the model of the first checkpoint is loaded in the end.
    """

    def __init__(self, folder: Path, last: int, *, own_disk: bool = False, best: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 4)
        self.model_wrapped: nn.Module = self.model
        self.accelerator = SimpleNamespace(scaler=None)
        self.args = SimpleNamespace(
            output_dir=str(folder),
            process_index=dist.get_rank(),
            world_size=dist.get_world_size(),
            save_only_model=False,
            load_best_model_at_end=best,
        )
        self._last = last
        self._writes = own_disk or dist.get_rank() == 0
        self.callbacks: list[Any] = []
        self.add_callback = self.callbacks.append

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        self.model_wrapped = TorchDDP(self.model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        state = SimpleNamespace(global_step=0, stateful_callbacks={}, best_model_checkpoint=None)
        control = SimpleNamespace(should_save=False, should_evaluate=False)
        if resume_from_checkpoint is not None:
            self._load_model(resume_from_checkpoint)
            vars(state).update(json.loads(Path(resume_from_checkpoint, "trainer_state.json").read_text()))
        for callback in self.callbacks:
            callback.on_train_begin(self.args, state, control, model=self.model)
        while state.global_step < self._last:
            optimizer.zero_grad()
            self.model_wrapped(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            state.global_step += 1
            control.should_save = state.global_step % 2 == 0
            for callback in self.callbacks:
                callback.on_step_end(self.args, state, control)
            if control.should_save:
                self._save(state, control)
        if self.args.load_best_model_at_end:
            dist.barrier()
            self._load_model(state.best_model_checkpoint)
        for callback in self.callbacks:
            callback.on_train_end(self.args, state, control)

    def _save(self, state: Any, control: Any) -> None:
        folder = Path(self.args.output_dir, f"checkpoint-{state.global_step}")
        folder.mkdir(parents=True, exist_ok=True)
        state.best_model_checkpoint = state.best_model_checkpoint or str(folder)
        if self._writes:
            torch.save(self.model.state_dict(), folder / "model.pt")
            (folder / "trainer_state.json").write_text(json.dumps(vars(state)))
        for callback in self.callbacks:
            callback.on_save(self.args, state, control)

    def _load_model(self, folder: str) -> None:
        self.model.load_state_dict(torch.load(Path(folder, "model.pt")))
