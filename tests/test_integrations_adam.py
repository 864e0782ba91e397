# SPDX-License-Identifier: Apache-2.0
"""Callbacks with adam=: the framework's AdamW becomes the SGD behind directions; on one node that changes nothing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import commopt
from commopt import ConfigurationError
from tests import frameworks
from tests.frameworks import Net, loss_of
from tests.ranks import run

missing = [name for name in ("accelerate", "transformers", "lightning") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"needs pip install {' '.join(missing)}"),
]
BETAS = (0.9, 0.99)


def with_trainer(folder: Path, adam: commopt.Adam | None) -> tuple[list[Tensor], str]:
    from commopt.integrations.transformers import CommoptCallback
    from tests.test_integrations_transformers import Judged, trainer_of

    model = Judged()
    options = {"use_cpu": True, "adam_beta2": BETAS[1], "weight_decay": 0.1, "save_strategy": "no"}
    trainer = trainer_of(model, 6, folder, **options)
    trainer.args.max_grad_norm = 0.0
    if adam is not None:
        trainer.add_callback(CommoptCallback(trainer, "hierarchical_onebit", adam=adam))
    trainer.train()
    return [p.detach().clone() for p in model.parameters()], type(trainer.optimizer.optimizer).__name__


def with_lightning(folder: Path, adam: commopt.Adam | None) -> tuple[list[Tensor], str]:
    import lightning.pytorch as pl

    from commopt.integrations.lightning import CommoptCallback

    class Module(pl.LightningModule):  # type: ignore[misc]  # of whatever version is there
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Tensor:
            return loss_of(self.net, number)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, betas=BETAS, weight_decay=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    module = Module()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    callbacks = [] if adam is None else [CommoptCallback("hierarchical_onebit", adam=adam)]
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=6, callbacks=callbacks, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(range(40)))  # type: ignore[arg-type]
    return [p.detach().clone() for p in module.parameters()], type(trainer.optimizers[0]).__name__


def compare(rank: int, world_size: int, port: int, folder: str) -> list[tuple[float, str, str]]:
    frameworks.as_under_torchrun(rank, world_size, port)
    found = []
    for way in (with_trainer, with_lightning):
        stock, name = way(Path(folder), None)
        ours, other = way(Path(folder), commopt.Adam(betas=BETAS))
        found.append((max(float((a - b).abs().max()) for a, b in zip(stock, ours, strict=True)), name, other))
        with pytest.raises(ConfigurationError, match=r"the optimizer has betas=\(0.9, 0.99\)"):
            way(Path(folder), commopt.Adam(betas=(0.5, 0.9)))
    return found


def test_their_optimizer_is_what_goes_behind_directions(tmp_path: Path) -> None:
    for found in run(compare, 2, frameworks.free_port(), str(tmp_path), fresh=True):
        for apart, before, after in found:
            assert apart < 1e-5
            assert (before, after) == ("AdamW", "SGD")
