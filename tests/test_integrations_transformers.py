# SPDX-License-Identifier: Apache-2.0
"""Accelerate and the Trainer of Transformers: their own accumulation, precision and clipping; exact resuming; HSDP."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import commopt
from tests import frameworks
from tests.frameworks import ACCUMULATED, LARGEST_NORM, LOSSY, SAVED_AT, STEPS, Net, loss_of, optimizer_of
from tests.hook_training import digest_of
from tests.ranks import run

missing = [name for name in ("accelerate", "transformers") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"needs pip install {' '.join(missing)}"),
]


def train_all(rank: int, world_size: int, port: int, folder: str) -> dict[str, Any]:
    frameworks.as_under_torchrun(rank, world_size, port)
    return {**with_accelerate(Path(folder, "accelerate")), **with_trainer(Path(folder, "trainer"))}


def accelerated(
    folder: Path, first: int, last: int, choice: dict[str, Any] | None, start: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Train from step `first` to `last`, save, and return the model and the Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(**{"cpu": True, "gradient_accumulation_steps": ACCUMULATED, **options})
    net = Net()
    model, optimizer = accelerator.prepare(net, optimizer_of(net))
    if choice is not None:
        comm = commopt.attach(model, **choice)
        accelerator.register_for_checkpointing(commopt.Gathered(comm))
    if start:
        accelerator.load_state(str(folder))
    for number in range(first * ACCUMULATED, last * ACCUMULATED):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, number))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return model, accelerator


def with_accelerate(folder: Path) -> dict[str, Any]:
    def fit(*how: Any, **options: Any) -> str:
        model, _ = accelerated(folder, *how, mixed_precision="bf16", **options)
        return digest_of(model.module)

    done = {"stock": fit(0, STEPS, None), "exact": fit(0, STEPS, {"choice": "flat"}), "whole": fit(0, STEPS, LOSSY)}
    _, accelerator = accelerated(folder, 0, SAVED_AT, LOSSY, mixed_precision="bf16")
    accelerator.save_state(str(folder))
    done["resumed"] = fit(SAVED_AT, STEPS, LOSSY, start=True)
    net = Net()
    frameworks.execute("Accelerate", accelerator=accelerator, model=net, optimizer=optimizer_of(net), commopt=commopt)
    return {f"accelerate {name}": digest for name, digest in done.items()}


class Judged(nn.Module):
    """Returns the loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x).float(), labels)}


def trainer_of(model: nn.Module, steps: int, folder: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    drawn = torch.Generator().manual_seed(3)
    data = [{"x": torch.randn(16, generator=drawn), "labels": torch.randn(4, generator=drawn)} for _ in range(400)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=SAVED_AT,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=ACCUMULATED,
        max_grad_norm=LARGEST_NORM,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        **{"report_to": [], "disable_tqdm": True, "logging_strategy": "no", **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:16])


def trained(
    options: dict[str, Any], folder: Path, choice: dict[str, Any] | None, steps: int = STEPS, start: Any = None
) -> tuple[Any, Any]:
    """Train with the Trainer, and return the model and the callback."""
    from commopt.integrations.transformers import CommoptCallback

    model = Judged()
    trainer, averaging = trainer_of(model, steps, folder, **options), None
    if choice is not None:
        averaging = CommoptCallback(trainer, **choice)
        trainer.add_callback(averaging)
    trainer.train(resume_from_checkpoint=start)
    return model, averaging


def with_trainer(folder: Path) -> dict[str, Any]:
    on_cpus: dict[str, Any] = {"use_cpu": True, "bf16": True}

    def fit(where: str, *how: Any, **resumed: Any) -> tuple[str, Any]:
        model, averaging = trained(on_cpus, folder / where, *how, **resumed)
        return digest_of(model.net), averaging

    done = {"stock": fit("stock", None)[0], "exact": fit("exact", {"choice": "flat"})[0]}
    done["whole"], averaging = fit("whole", LOSSY)
    done["steps"] = averaging.comm.stats()["steps"]
    fit("half", LOSSY, SAVED_AT)
    dist.barrier()  # its last checkpoint is there
    done["resumed"] = fit("half", LOSSY, start=True)[0]
    saved = folder / "whole" / f"checkpoint-{SAVED_AT}"
    done["resumed elsewhere"] = fit("elsewhere", LOSSY, start=str(saved))[0]
    dist.barrier()
    mine = saved / f"commopt_{dist.get_rank()}_of_2.pt"
    others = mine.rename(saved / f"commopt_{dist.get_rank()}_of_9.pt")
    dist.barrier()
    done["resumed from all files"] = fit("all", LOSSY, start=str(saved))[0]
    dist.barrier()
    others.unlink()
    dist.barrier()
    done["without"] = fit("without", LOSSY, start=str(saved))[0]
    model = Judged()
    trainer = trainer_of(model, 1, folder / "page", **on_cpus)
    made = frameworks.execute("Transformers", trainer=trainer, commopt=commopt)
    done["page"] = made["averaging"].comm.stats()["steps"]
    return done


def train_sharded(rank: int, world_size: int, port: int, folder: str) -> dict[str, Any]:
    frameworks.as_under_torchrun(rank, world_size, port)
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import DistributedType, PartialState

    # For GPUs only: on CPUs Accelerate makes a model of DDP.
    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    def fit(first: int, last: int, *how: Any) -> tuple[str, Any]:
        mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        model, accelerator = accelerated(
            Path(folder), first, last, *how, parallelism_config=mesh, fsdp_plugin=plugin, cpu=False
        )
        whole = [parameter.full_tensor() for parameter in model.parameters()]
        return digest_of(nn.ParameterList(whole)), accelerator

    done = {"stock": fit(0, STEPS, None)[0], "exact": fit(0, STEPS, {"choice": "flat"})[0]}
    done["whole"] = fit(0, STEPS, LOSSY)[0]
    fit(0, SAVED_AT, LOSSY)[1].save_state(folder)
    done["resumed"] = fit(SAVED_AT, STEPS, LOSSY, True)[0]

    sharded: dict[str, Any] = {"fsdp": True, "accelerator_config": {"use_configured_state": True}}
    sharded["fsdp_config"] = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}

    def train(where: str, *how: Any, **resumed: Any) -> str:
        sharded["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        model, _ = trained(sharded, Path(folder, where), *how, **resumed)
        assert {parameter.device_mesh.ndim for parameter in model.parameters()} == {2}
        return digest_of(nn.ParameterList([parameter.full_tensor() for parameter in model.parameters()]))

    done["Trainer's stock"], done["Trainer's exact"] = train("stock", None), train("exact", {"choice": "flat"})
    done["Trainer's whole"] = train("whole", LOSSY)
    train("half", LOSSY, SAVED_AT)
    dist.barrier()
    done["Trainer's resumed"] = train("half", LOSSY, start=True)
    return done


def test_hsdp_of_accelerate_and_the_trainer(tmp_path: Path) -> None:
    ranks = run(train_sharded, 4, frameworks.free_port(), str(tmp_path), nodes=(2, 2), fresh=True, timeout_s=240)
    done = ranks[0]
    for name in ("", "Trainer's "):
        assert done[f"{name}exact"] == done[f"{name}stock"]
        assert done[f"{name}resumed"] == done[f"{name}whole"] != done[f"{name}exact"]


SCRIPT = """
import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
net = nn.Linear(8, 4)
model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for step in range(3):
    accelerator.backward(model(torch.ones(2, 8)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
"""


def test_a_script_as_it_is_under_accelerate_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--main_process_port", str(frameworks.free_port())]
    run_it = ["-m", "commopt", "run", "--strategy", "hierarchical_bf16", "--report", str(script)]
    assert frameworks.steps_reported(frameworks.launch([*launcher, *run_it])) == ["3"]


def test_accelerate_and_the_trainer(tmp_path: Path) -> None:
    ranks = run(train_all, 2, frameworks.free_port(), str(tmp_path), nodes=(1, 1), fresh=True, timeout_s=240)
    assert ranks[0] == ranks[1]
    done = ranks[0]
    for name in ("accelerate ", ""):
        assert done[f"{name}exact"] == done[f"{name}stock"]  # accumulation, bfloat16 and clipping are the framework's
        assert done[f"{name}resumed"] == done[f"{name}whole"] != done[f"{name}exact"]
    assert done["resumed elsewhere"] == done["resumed from all files"] == done["whole"] != done["without"]
    assert (done["steps"], done["page"]) == (STEPS, 1)
