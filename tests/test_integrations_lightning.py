# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric: their own accumulation, precision and clipping; resuming changes no bit."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commopt
from tests import frameworks
from tests.frameworks import ACCUMULATED, LARGEST_NORM, LOSSY, SAVED_AT, STEPS, Net, loss_of, optimizer_of
from tests.hook_training import digest_of
from tests.ranks import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="needs Lightning: pip install lightning"),
]


def train_all(rank: int, world_size: int, port: int, folder: str) -> dict[str, Any]:
    frameworks.as_under_torchrun(rank, world_size, port)
    return {**with_trainer(Path(folder)), **with_fabric(Path(folder))}


def with_trainer(folder: Path) -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.strategies.ddp import _register_ddp_comm_hook
    from torch.utils.data import DataLoader

    from commopt.integrations.lightning import CommoptCallback

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.batches = Net(), 0

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.batches += 1
            return loss_of(self.net, self.batches)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    class AsOnGPUs(DDPStrategy):  # type: ignore[misc]
        """Registers the hook that it is given, which Lightning does on GPUs only."""

        def _register_ddp_hooks(self) -> None:
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    options = {
        **{"accelerator": "cpu", "devices": 2, "precision": "bf16-mixed", "gradient_clip_val": LARGEST_NORM},
        **{"accumulate_grad_batches": ACCUMULATED, "logger": False, "enable_checkpointing": False},
        **{"enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder},
    }
    data: Any = range(100)
    loader: Any = DataLoader(data)

    def fit(steps: int, *callbacks: Any, start: Path | None = None, strategy: Any = "ddp") -> tuple[str, Any]:
        module = Module()
        module.batches = 0 if start is None else SAVED_AT * ACCUMULATED
        trainer = Trainer(max_steps=steps, callbacks=list(callbacks), strategy=strategy, **options)
        trainer.fit(module, loader, ckpt_path=start)
        return digest_of(module.net), trainer

    done = {"stock": fit(STEPS)[0], "exact": fit(STEPS, CommoptCallback("flat"))[0]}
    averaging = CommoptCallback(**LOSSY)
    done["whole"], _ = fit(STEPS, averaging)
    assert averaging.comm is not None
    done["steps"] = averaging.comm.stats()["steps"]

    with_state, without = folder / "with.ckpt", folder / "without.ckpt"
    fit(SAVED_AT, averaging := CommoptCallback(**LOSSY))[1].save_checkpoint(with_state)
    if dist.get_rank() == 0:
        saved = torch.load(with_state)
        assert saved["callbacks"].pop("CommoptCallback")["ranks"]
        torch.save(saved, without)
    dist.barrier()
    done["resumed"] = fit(STEPS, averaging, start=with_state)[0]  # the same callback, in another fit
    done["without"] = fit(STEPS, CommoptCallback(**LOSSY), start=without)[0]

    # Lightning's own arguments: made before there is a process group, they join at the first bucket.
    dist.destroy_process_group()
    documented: dict[str, Any] = {"ddp_comm_state": commopt.HookState(), "ddp_comm_hook": commopt.hierarchical}
    done["documented"] = fit(STEPS, strategy=AsOnGPUs(**documented))[0]
    done["documented steps"] = documented["ddp_comm_state"].stats()["steps"]
    documented["ddp_comm_state"] = commopt.HookState()
    fit(1, strategy=DDPStrategy(**documented))
    done["documented steps on CPUs"] = documented["ddp_comm_state"].stats()["steps"]
    names = {"options": {**options, "max_steps": 1}, "loader": loader}
    made = frameworks.execute("Lightning", model=Module(), **names, folder=str(folder), commopt=commopt)
    done["page"] = made["averaging"].comm.stats()["steps"]
    return done


def with_fabric(folder: Path) -> dict[str, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
    fabric.launch()

    def fit(first: int, last: int, choice: dict[str, Any] | None, start: bool = False) -> tuple[str, dict[str, Any]]:
        net = Net()
        model, optimizer = fabric.setup(net, optimizer_of(net))
        state = {"model": model, "optimizer": optimizer}
        if choice is not None:
            state["comm"] = commopt.Gathered(commopt.attach(model, **choice))
        if start:
            fabric.load(folder / "fabric.ckpt", state)
        for step in range(first, last):
            for micro in range(ACCUMULATED):
                with fabric.no_backward_sync(model, enabled=micro + 1 < ACCUMULATED):
                    fabric.backward(loss_of(model, ACCUMULATED * step + micro) / ACCUMULATED)
            fabric.clip_gradients(model, optimizer, max_norm=LARGEST_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return digest_of(net), state

    done = {"stock": fit(0, STEPS, None)[0], "exact": fit(0, STEPS, {"choice": "flat"})[0]}
    done["whole"] = fit(0, STEPS, LOSSY)[0]
    fabric.save(folder / "fabric.ckpt", fit(0, SAVED_AT, LOSSY)[1])
    done["resumed"] = fit(SAVED_AT, STEPS, LOSSY, start=True)[0]
    net = Net()
    made = frameworks.execute(
        "Fabric", fabric=fabric, model=net, optimizer=optimizer_of(net), folder=str(folder), commopt=commopt
    )
    assert sorted(made["state"]) == ["comm", "model", "optimizer"]
    return {f"fabric {name}": digest for name, digest in done.items()}


SCRIPT = """
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def training_step(self, batch, number):
        return self.layer(torch.ones(2, 8)).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
if __name__ == "__main__":
    trainer = Trainer(max_steps=3, accelerator="cpu", devices=2, strategy="ddp", **quiet)
    trainer.fit(Module(), DataLoader(range(100)))
"""


def test_a_script_as_it_is_starts_its_other_rank_itself(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run_it = [sys.executable, "-m", "commopt", "run", "--strategy", "hierarchical_bf16", "--report", str(script)]
    assert frameworks.steps_reported(frameworks.launch(run_it)) == ["3"]


def test_lightning_and_fabric(tmp_path: Path) -> None:
    ranks = run(train_all, 2, frameworks.free_port(), str(tmp_path), nodes=(1, 1), fresh=True, timeout_s=240)
    assert ranks[0] == ranks[1]
    done = ranks[0]
    assert done["exact"] == done["stock"]  # accumulation, bfloat16 and clipping are Lightning's
    assert done["steps"] == STEPS  # not as many as there are batches
    assert done["resumed"] == done["whole"]
    assert done["without"] != done["whole"]
    assert done["documented"] == done["stock"]
    assert (done["documented steps"], done["documented steps on CPUs"]) == (STEPS, 0)
    assert done["page"] == 1
    assert done["fabric exact"] == done["fabric stock"]
    assert done["fabric resumed"] == done["fabric whole"] != done["fabric exact"]
