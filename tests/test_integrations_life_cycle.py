# SPDX-License-Identifier: Apache-2.0
"""Callbacks begin, end, begin again, resume, only evaluate, meet another trainer; and average before they save."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commopt
from tests import frameworks
from tests.frameworks import LOSSY, Net, loss_of, optimizer_of
from tests.hook_training import digest_of
from tests.plan_changes import heard
from tests.ranks import run
from tests.test_groups import message_of

LOCAL: dict[str, Any] = {"choice": commopt.LocalSGD(period=50)}


def over_ranks(thing: Any) -> set[Any]:
    """Return what all ranks have; collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return set(found)


# ------------------------------------------------------------------------------ Transformers


def with_transformers(rank: int, world_size: int, port: int, folder: str) -> None:
    frameworks.as_under_torchrun(rank, world_size, port)
    from transformers import TrainerCallback

    from commopt.integrations.transformers import CommoptCallback
    from tests.test_integrations_transformers import Judged, trainer_of

    def made(name: str, choice: dict[str, Any], **options: Any) -> tuple[Any, Any]:
        trainer = trainer_of(Judged(), 4, Path(folder, name), use_cpu=True, **options)
        trainer.add_callback(averaging := CommoptCallback(trainer, **choice))
        return trainer, averaging

    trainer, averaging = made("evaluated", LOSSY)
    trainer.evaluate(trainer.train_dataset)
    trainer.predict(trainer.train_dataset)
    assert averaging.comm is None
    assert "call train() first" in message_of(trainer.train)  # Accelerate leaves its model unwrapped

    trainer, averaging = made("phases", LOSSY)
    trainer.train()
    first, kept = averaging.comm, averaging.comm.stats()["residual_norm"]
    trainer.evaluate(trainer.train_dataset)
    assert averaging.comm.stats()["residual_norm"] == kept > 0
    trainer.train()  # the next phase goes on with what is kept
    assert averaging.comm is first
    assert averaging.comm.stats()["steps"] == 8
    dist.barrier()
    trainer.args.max_steps = 5
    trainer.train(resume_from_checkpoint=True)
    assert averaging.comm.stats()["steps"] == 9  # the checkpoint is of the second phase
    assert len(over_ranks(digest_of(trainer.model))) == 1

    other, _ = made("other", LOSSY)
    other.add_callback(averaging)
    assert "made for another Trainer" in message_of(other.train)
    another, averaging = made("another", LOSSY)
    another.train()
    assert averaging.comm.stats()["steps"] == 4
    averaging.comm.close()

    # Nodes that learn by themselves: what is saved, evaluated and left behind is all nodes'.
    trainer, averaging = made("local", LOCAL)
    seen: list[int] = []
    save = trainer._save_checkpoint

    def looking_save(*args: Any, **kwargs: Any) -> None:
        seen.append(len(over_ranks(digest_of(trainer.model))))
        save(*args, **kwargs)

    trainer._save_checkpoint = looking_save
    with heard() as said:
        trainer.train()
    assert seen == [1, 1]
    assert not [text for _, text in said if "first node alone" in text]
    assert averaging.comm.stats()["parameter_averages"] == 2  # and none more in the end
    assert len(over_ranks(digest_of(trainer.model))) == 1
    dist.barrier()
    resumed, _ = made("local", LOCAL)
    with heard() as said:
        resumed.train(resume_from_checkpoint=str(Path(folder, "local", "checkpoint-3")))
    assert not [text for _, text in said if "other parameters" in text]
    assert len(over_ranks(digest_of(resumed.model))) == 1

    # Stopped after a step that evaluates nothing, while a round is under way: the best model is what is left.
    best = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "best", "metric_for_best_model": "loss"}
    late = {"choice": commopt.diloco(period=3, delay=2)}
    trainer, _ = made("best", late, load_best_model_at_end=True, greater_is_better=False, **best)
    trainer.args.max_steps = 9

    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 4

    trainer.add_callback(Stops())
    trainer.train()
    left = digest_of(trainer.model)
    trainer._load_best_model()
    assert left == digest_of(trainer.model)


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs pip install accelerate transformers")
def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    run(with_transformers, 2, frameworks.free_port(), str(tmp_path), nodes=(1, 1), fresh=True, timeout_s=120)


# ------------------------------------------------------------------------------ Lightning


def with_lightning(rank: int, world_size: int, port: int, folder: str) -> None:
    frameworks.as_under_torchrun(rank, world_size, port)
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    from commopt.integrations.lightning import CommoptCallback

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batches, self.seen = Net(), 0, list[int]()

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.batches += 1
            return loss_of(self.net, self.batches)

        def validation_step(self, batch: Any, number: int) -> None:
            self.seen.append(len(over_ranks(digest_of(self.net))))

        test_step = predict_step = validation_step

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    data: Any = range(8)
    loader: Any = DataLoader(data)
    quiet: dict[str, Any] = {
        **{"accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False, "enable_progress_bar": False},
        **{"enable_model_summary": False, "default_root_dir": folder, "limit_val_batches": 1},
    }

    averaging, module = CommoptCallback(**LOSSY), Module()
    trainer = Trainer(max_epochs=1, callbacks=[averaging], enable_checkpointing=False, **quiet)
    trainer.validate(module, loader)
    trainer.predict(module, loader)
    assert averaging.comm is None
    trainer.fit(module, loader)
    trainer.save_checkpoint(saved := Path(folder, "lossy.ckpt"))
    trainer.test(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)  # begins with nothing
    assert averaging.comm is not None
    assert averaging.comm.stats()["steps"] == 4
    trainer.test(module, loader, ckpt_path=saved)  # which is for the model alone
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader)
    assert averaging.comm.stats()["steps"] == 4
    Trainer(max_epochs=2, callbacks=[averaging], enable_checkpointing=False, **quiet).fit(
        module, loader, ckpt_path=saved
    )
    assert averaging.comm.stats()["steps"] == 8
    averaging.comm.close()

    averaging, module = CommoptCallback(**LOCAL), Module()
    keep = ModelCheckpoint(dirpath=folder, filename="local", every_n_train_steps=2, save_top_k=-1)
    trainer = Trainer(max_epochs=1, callbacks=[keep, averaging], val_check_interval=3, **quiet)
    trainer.fit(module, loader, loader)
    assert set(module.seen) == {1}
    assert len(over_ranks(digest_of(module.net))) == 1
    state = torch.load(keep.best_model_path or Path(folder, "local.ckpt"), weights_only=False)
    left_as = {part["rounds"]["parameters"] for part in state["callbacks"]["CommoptCallback"]["ranks"]}
    assert len(left_as) == 1  # of both nodes
    (resumed := Module()).load_state_dict(state["state_dict"])
    averaging = CommoptCallback(**LOCAL)
    with heard() as said:
        trainer = Trainer(max_epochs=2, callbacks=[averaging], enable_checkpointing=False, **quiet)
        trainer.fit(resumed, loader, ckpt_path=keep.best_model_path)
    assert not [text for _, text in said if "other parameters" in text]
    assert averaging.comm is not None
    assert not averaging.comm.nodes_differ


@pytest.mark.skipif(find_spec("lightning") is None, reason="needs pip install lightning")
def test_a_trainer_of_lightning(tmp_path: Path) -> None:
    run(with_lightning, 2, frameworks.free_port(), str(tmp_path), nodes=(1, 1), fresh=True, timeout_s=120)


# ------------------------------------------------------------------------------ Accelerate


def with_accelerate(rank: int, world_size: int, port: int, folder: str) -> None:
    frameworks.as_under_torchrun(rank, world_size, port)
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), Net()
    model, optimizer = accelerator.prepare(net, optimizer_of(net))
    comm = commopt.attach(model, **LOCAL, timeout=4)
    accelerator.register_for_checkpointing(commopt.Gathered(comm))

    def step(number: int) -> None:
        accelerator.backward(loss_of(model, number))
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    with heard() as said:
        accelerator.save_state(folder)
    assert len([text for _, text in said if "call average_parameters() on every rank" in text]) == (rank == 0)
    comm.average_parameters()
    with heard() as said:
        accelerator.save_state(folder)
    assert not said
    with heard() as said:
        alone = message_of(lambda: accelerator.save_state(folder) if accelerator.is_main_process else None)
    told = [text for _, text in said if text.startswith("waiting for rank 1 in gathered_state_dict (of save_state")]
    assert (len(told) > 0) == (rank == 0)
    assert ("which every rank must call" in alone) == (rank == 0)
    dist.barrier()
    step(1)
    accelerator.save_state(folder)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs pip install accelerate")
def test_save_state_of_accelerate(tmp_path: Path) -> None:
    run(with_accelerate, 2, frameworks.free_port(), str(tmp_path), nodes=(1, 1), fresh=True, timeout_s=120)
