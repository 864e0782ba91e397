# SPDX-License-Identifier: Apache-2.0
"""`commopt run` and the processes that a script starts itself: each trains with the hook."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from commopt.run.cli import NOTHING
from tests import frameworks

TRAINING = """
import os
import subprocess
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def train(rank: int) -> None:
    dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
    torch.manual_seed(3)
    ddp = DistributedDataParallel(nn.Linear(8, 4, bias=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.full((2, 8), rank + 1.0)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

def start() -> None:
    how = sys.argv[1]
    if how == "itself":  # as Lightning does without torchrun
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        copy = None
        if rank == 0:
            program = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
            copy = subprocess.Popen(program, env={**os.environ, "LOCAL_RANK": "1"})
        train(rank)
        assert copy is None or copy.wait() == 0
    elif how == "nothing":
        mp.start_processes(print, nprocs=1, start_method="fork")
    else:
        mp.start_processes(train, nprocs=2, start_method=how)

if __name__ == "__main__":
    start()
"""


def command(tmp_path: Path, how: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    run_it = [sys.executable, "-m", "commopt", "run", "--strategy", "hierarchical_bf16", "--report", str(script)]
    return [*run_it, how, str(tmp_path / "store")]


@pytest.mark.parametrize("how", ["spawn", "fork", "itself"])
def test_processes_of_a_script_train_with_the_hook(how: str, tmp_path: Path) -> None:
    printed = frameworks.launch(command(tmp_path, how))
    (line,) = re.findall(r"^Linear .*", printed, re.M)  # of the first rank
    assert line.split()[-3:] == ["3", "0", "0.00006400"]  # two ranks send all of 32 gradients in 16 bits


def test_processes_without_a_model_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(NOTHING)):
        frameworks.launch(command(tmp_path, "nothing"))
