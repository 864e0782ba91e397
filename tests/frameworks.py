# SPDX-License-Identifier: Apache-2.0
"""What the tests of frameworks share: a model and its batches, what a launcher sets, and the page's blocks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
STEPS, SAVED_AT = 6, 3
ACCUMULATED = 2  # batches in a step
LARGEST_NORM = 0.05  # far below that of the gradients, so that every step is clipped
LOSSY: dict[str, Any] = {"choice": "quantized", "bits": 2, "block": 64}  # every step depends on those before


class Net(nn.Module):
    """Two layers, in the same state on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Return this rank's batch of that number: [8, 16] and [8, 4]."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
    return torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def loss_of(net: nn.Module, number: int) -> Tensor:
    x, y = batch_of(number)
    return nn.functional.mse_loss(net(x).float(), y)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def as_under_torchrun(rank: int, world_size: int, port: int) -> None:
    """Leave the process group to the framework, which is told of the others as torchrun would tell it."""
    dist.destroy_process_group()
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in here.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests")


def launch(command: list[str]) -> str:
    """Return what a command prints, which takes commopt from here and its ranks for nodes."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COMMOPT_RANKS_PER_NODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "commopt run" in line and ": ranks from " not in line]
    assert not said, done.stderr  # no model was left alone, and there was one
    return done.stdout


def steps_reported(printed: str) -> list[str]:
    """Return the steps of each model in a report of `commopt run`."""
    return [line.split()[-3] for line in printed.splitlines() if "Hierarchical(" in line]


def execute(heading: str, **names: Any) -> dict[str, Any]:
    """Run the Python blocks of a section of the page; return what they have made."""
    (section,) = re.findall(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, f"<{heading}>", "exec"), names)
    return names
