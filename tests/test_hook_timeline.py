"""HookState.timeline with files: what one rank cannot write, every rank hears of, and training goes on."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import commopt
from tests.ranks import run


def try_files(rank: int, world_size: int, folder: str) -> list[str]:
    """Ask for files that cannot be, train on, and ask for one that can."""
    ddp = TorchDDP(nn.Linear(4, 4))
    state = commopt.attach(ddp, "flat", plan="ddp", record=True)

    def step() -> None:
        ddp(torch.ones(2, 4)).sum().backward()

    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib") and rank == 0:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    step()
    said = []
    for asked in ({"trace": f"{folder}/none/trace.json"}, {"plot": f"{folder}/step.txt"}, {"plot": f"{folder}/a.png"}):
        without = patch.object(builtins, "__import__", without_matplotlib)
        with without, pytest.raises(commopt.ConfigurationError) as caught:
            state.timeline(**asked)
        said.append(str(caught.value))
        step()
    own = {"trace": f"{folder}/trace.json"} if rank == 0 else {}
    state.timeline(**own)
    return said


def test_every_rank_hears_of_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    first, second = run(try_files, 2, str(tmp_path))
    assert first == second
    parts = ("none/trace.json cannot be written", "no format to draw in", "pip install")
    for said, part in zip(first, parts, strict=True):
        assert part in said
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
